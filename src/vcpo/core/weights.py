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
    """True where a log weight is NaN or +inf: such an entry carries no weight but counts in B; any shape -> bool."""
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


def _truncate(log_weights: Tensor, cap: float, low: float = 0.0) -> Tensor:
    """exp(lw) held inside [low, cap], for any shape: exactly cap at and above it, 0 for quarantined entries."""
    if not (0 < cap < math.inf and 0 <= low <= cap):
        raise ValueError(f"need a finite cap > 0 and 0 <= low <= cap, got cap {cap} and low {low}")
    log_cap = math.log(cap)
    weights = torch.where(log_weights >= log_cap, cap, log_weights.clamp(max=log_cap).exp().clamp(min=low, max=cap))
    return torch.where(quarantined(log_weights), 0.0, weights)


def _keep_within(log_weights: Tensor, cap: float, low: float) -> Tensor:
    """exp(lw) where low <= exp(lw) <= cap, 0 elsewhere; for any shape."""
    weights = _truncate(log_weights, cap, low)
    log_low = math.log(low) if low > 0 else -math.inf
    return torch.where((log_weights < log_low) | (log_weights > math.log(cap)), 0.0, weights)


WeightTreatment = Callable[..., Tensor]
"""f(learner_logprobs, sampler_logprobs, action_mask, *, cap=8.0, low=0.0) -> what multiplies each token's loss term.

[n, s] for the token treatments, else [n, 1]. Detached, finite, in [0, cap]; 0 for quarantined and empty trajectories
and, token-wise, at masked positions. "_truncate" holds the weight inside [low, cap]; "_mask" gives 0 outside of it.
"""


def _treatment(level: str, kind: str) -> WeightTreatment:
    """One entry of the table: `level` says which log weight is meant, `kind` what becomes of one outside the bounds."""
    outcome = {"truncate": _truncate, "mask": _keep_within}[kind]

    @torch.no_grad()
    def treatment(
        learner_logprobs: Tensor, sampler_logprobs: Tensor, action_mask: Tensor, *, cap: float = 8.0, low: float = 0.0
    ) -> Tensor:
        ratios = log_ratios(learner_logprobs, sampler_logprobs, action_mask)
        mask = action_mask.bool()
        sums, counts = ratios.sum(1, keepdim=True), mask.sum(1, keepdim=True)
        log_weights = {"token": ratios, "sequence": sums, "geometric": sums / counts.clamp(min=1)}[level]
        carries = ~quarantined(sums) & (mask if level == "token" else counts > 0)
        return torch.where(carries, outcome(log_weights, cap, low), 0.0)

    treatment.__name__ = f"{level}_{kind}"
    treatment.__doc__ = f"The {level} weight, after `_{kind}` at low and cap; see `WeightTreatment`."
    return treatment


@torch.no_grad()
def no_weights(
    learner_logprobs: Tensor, sampler_logprobs: Tensor, action_mask: Tensor, *, cap: float = 8.0, low: float = 0.0
) -> Tensor:
    """Weight 1 for every trajectory, 0 for quarantined and empty ones: no correction at all; [n, s] each -> [n, 1]."""
    sums = log_ratios(learner_logprobs, sampler_logprobs, action_mask).sum(1, keepdim=True)
    return (~quarantined(sums) & action_mask.bool().any(1, keepdim=True)).to(sums.dtype)


weight_treatments: Mapping[str, WeightTreatment] = {
    "none": no_weights,
    "sequence_truncate": _treatment("sequence", "truncate"),
    "token_truncate": _treatment("token", "truncate"),
    "geometric_truncate": _treatment("geometric", "truncate"),
    "sequence_mask": _treatment("sequence", "mask"),
    "token_mask": _treatment("token", "mask"),
    "geometric_mask": _treatment("geometric", "mask"),
}
