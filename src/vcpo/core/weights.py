"""Importance weights of trajectories and tokens: always in log space until the last line.

Names: log ratio l_it = log pi(a_it) - log mu(a_it) in nats; log weight lw_i = sum over the row's actions of l_it.
Non-numbers: lw = -inf is an ordinary weight 0; NaN and +inf are *quarantined*, weight 0, so that a bad number can
only shrink a step. (arXiv 2602.17616)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from vcpo.core.masking import check_rows, check_vector, masked_fill


def log_ratios(learner_logprobs: Tensor, sampler_logprobs: Tensor, action_mask: Tensor) -> Tensor:
    """Log-prob of each taken token under the learner minus under the sampler, in nats; [n, s], 0 at masked positions.

    l_it = log pi(a_it | s_it) - log mu(a_it | s_it) (arXiv 2602.17616). Carries the learner's gradient, exactly 0 at
    masked positions whatever stands there. bf16 and fp16 are upcast to fp32. ValueError when shapes differ.
    """
    mask = check_rows(action_mask, learner_logprobs=learner_logprobs, sampler_logprobs=sampler_logprobs)
    return masked_fill(_at_least_fp32(learner_logprobs), mask) - masked_fill(_at_least_fp32(sampler_logprobs), mask)


def trajectory_log_weights(learner_logprobs: Tensor, sampler_logprobs: Tensor, action_mask: Tensor) -> Tensor:
    """Log importance weight of each trajectory, in nats: the sum of its actions' log ratios; [n, s] each -> [n].

    lw_i = sum_t l_it, sequence level, not length-normalised (arXiv 2602.17616). A row without actions gives 0.
    """
    return log_ratios(learner_logprobs, sampler_logprobs, action_mask).sum(1)


def quarantined(log_weights: Tensor) -> Tensor:
    """True where a log weight is NaN or +inf: such an entry carries no weight but still counts in B; any shape, bool."""
    return log_weights.isnan() | log_weights.isposinf()


def row_is_quarantined(learner_logprobs: Tensor, sampler_logprobs: Tensor, action_mask: Tensor) -> Tensor:
    """True for trajectories whose log weight is NaN or +inf; [n, s] each -> [n] bool."""
    with torch.no_grad():
        return quarantined(trajectory_log_weights(learner_logprobs, sampler_logprobs, action_mask))


@torch.no_grad()
def truncated_weights(log_weights: Tensor, cap: float) -> Tensor:
    """Importance weights cut off at `cap`: min(exp(lw), cap); [n] -> [n] in [0, cap], no gradient.

    w^_i = min(w_i, cap), cap = 8 in arXiv 2602.17616, cut in log space so that nothing overflows. Quarantined entries
    (NaN, +inf) and -inf give 0. ValueError unless 0 < cap < inf.
    """
    check_vector(log_weights=log_weights)
    return _truncate(log_weights, cap)


def _at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _truncate(log_weights: Tensor, cap: float) -> Tensor:
    """min(exp(lw), cap) for any shape; exactly cap at and above it."""
    if not (0 < cap < math.inf):
        raise ValueError(f"cap must be a positive, finite number, got {cap}")
    log_cap = math.log(cap)
    usable = torch.where(quarantined(log_weights), -math.inf, log_weights)
    return torch.where(usable >= log_cap, cap, usable.clamp(max=log_cap).exp())


def _keep_within(log_weights: Tensor, low: float, cap: float) -> Tensor:
    """exp(lw) where low <= exp(lw) <= cap, 0 elsewhere; for any shape, never inf."""
    if not (0 <= low <= cap < math.inf and cap > 0):
        raise ValueError(f"need 0 <= low <= cap < inf and cap > 0, got low {low} and cap {cap}")
    weights = _truncate(log_weights, cap)
    above = log_weights > math.log(cap)
    below = log_weights < (math.log(low) if low > 0 else -math.inf)
    return torch.where(above | below, 0.0, weights)


WeightTreatment = Callable[..., Tensor]
"""f(learner_logprobs, sampler_logprobs, action_mask, *, cap=8.0, low=0.0) -> [n, s] or [n, 1]: what multiplies each
token's term of the loss. Detached, finite, >= 0; 0 for quarantined and empty rows and, token-wise, at masked positions."""


def _treatment(level: str, kind: str) -> WeightTreatment:
    """One entry of the table: `level` says which log weight, `kind` what becomes of it."""

    @torch.no_grad()
    def treatment(
        learner_logprobs: Tensor, sampler_logprobs: Tensor, action_mask: Tensor, *, cap: float = 8.0, low: float = 0.0
    ) -> Tensor:
        ratios = log_ratios(learner_logprobs, sampler_logprobs, action_mask)
        mask = action_mask.bool()
        sums, counts = ratios.sum(1, keepdim=True), mask.sum(1, keepdim=True)
        log_weights = {"token": ratios, "sequence": sums, "geometric": sums / counts.clamp(min=1)}[level]
        weights = _truncate(log_weights, cap) if kind == "truncate" else _keep_within(log_weights, low, cap)
        carries = ~quarantined(sums) & (counts > 0)
        return torch.where(carries & mask if level == "token" else carries, weights, 0.0)

    treatment.__name__ = f"{level}_{kind}"
    return treatment


@torch.no_grad()
def _none(learner_logprobs: Tensor, sampler_logprobs: Tensor, action_mask: Tensor, *, cap: float = 8.0, low: float = 0.0) -> Tensor:
    sums = log_ratios(learner_logprobs, sampler_logprobs, action_mask).sum(1, keepdim=True)
    carries = ~quarantined(sums) & action_mask.bool().any(1, keepdim=True)
    return carries.to(sums.dtype)


weight_treatments: Mapping[str, WeightTreatment] = {
    "none": _none,
    **{f"{level}_{kind}": _treatment(level, kind) for level in ("sequence", "token", "geometric") for kind in ("truncate", "mask")},
}
