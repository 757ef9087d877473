"""Policy losses: pure functions of log-probs and advantages, all with one signature, named in `policy_losses`.

    f(learner_logprobs, sampler_logprobs, advantages, action_mask, *, proximal_logprobs=None, reference_logprobs=None,
      aggregation="seq_mean_token_mean", normalizer=None, length=None, **params) -> (loss [], metrics)

Log-probs and mask are [n, s], in nats; advantages [n] or [n, s]. The gradient flows into `learner_logprobs` alone.
Rules that hold for each of them:
- What stands at a masked position (inf and NaN too) changes nothing; the gradient there is exactly 0.
- A row whose log weight is NaN or +inf, and a token whose advantage is not a number, has coefficient 0; the row still
  counts in the normalizer, so that losing trajectories can only shrink the step.
- `normalizer` is that of the whole optimizer batch (see `aggregation_factors`): micro-batches add up.
- `kl_coef` times the `kl_estimator` divergence from `reference_logprobs` is added per token before aggregation; tokens
  more than `MAX_KL_LOG_RATIO` nats apart are left out, as exp of such a distance is no estimate but an explosion.
- Metrics are detached 0-d tensors: means over the tokens (`_share`: of the tokens) of this call that are trained on.

`loss_function.linear_in_coefficients` is True where the loss is, apart from the KL term, a sum over trajectories of a
detached coefficient times that trajectory's log-prob: then its gradient can be assembled from per-trajectory scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol, cast

import torch
from torch import Tensor

from vcpo.core.aggregation import aggregate
from vcpo.core.divergences import divergences
from vcpo.core.masking import check_rows, masked_fill
from vcpo.core.weights import log_ratios, quarantined, row_is_quarantined, weight_treatments

MAX_KL_LOG_RATIO = 20.0
LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


class PolicyLoss(Protocol):
    """One entry of `policy_losses`; the module says what it takes and gives."""

    linear_in_coefficients: bool

    def __call__(
        self,
        learner_logprobs: Tensor,
        sampler_logprobs: Tensor,
        advantages: Tensor,
        action_mask: Tensor,
        **params: object,
    ) -> LossAndMetrics: ...


def _policy_loss(*, linear_in_coefficients: bool) -> Callable[[Callable[..., LossAndMetrics]], PolicyLoss]:
    """Declares whether the loss is linear in per-trajectory coefficients."""

    def declare(f: Callable[..., LossAndMetrics]) -> PolicyLoss:
        loss = cast(PolicyLoss, f)
        loss.linear_in_coefficients = linear_in_coefficients
        return loss

    return declare


@_policy_loss(linear_in_coefficients=True)
def reinforce(
    learner_logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    *,
    proximal_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    aggregation: str = "seq_mean_token_mean",
    normalizer: float | Tensor | None = None,
    length: float | None = None,
    weight_treatment: str = "sequence_truncate",
    cap: float = 8.0,
    low: float = 0.0,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
) -> LossAndMetrics:
    """Importance-weighted REINFORCE: the advantage times the log-prob, weighted by how likely the learner is to say it.

    loss = -sum_it f_i w^_it A_it log pi(a_it), with w^ the detached weight of `weight_treatment` between learner and
    sampler (min(exp(lw_i), cap) by default, arXiv 2602.17616) and f_i the aggregation. `proximal_logprobs` is not used.
    Metrics: weight_mean (of w^), ratio_mean (of the raw token ratios), log_ratio_abs_mean, quarantined_share (of rows).
    ValueError: unknown treatment, aggregation or estimator, `kl_coef` without reference, shapes that do not agree.
    """
    mask = check_rows(action_mask, learner_logprobs=learner_logprobs, sampler_logprobs=sampler_logprobs)
    weights = _treated(weight_treatment, learner_logprobs, sampler_logprobs, mask, cap, low)
    coefficients = torch.where(mask, weights * _per_token(advantages, mask), 0.0)
    # A log-prob of -inf has weight 0 or comes in a quarantined row: its term is 0, not 0 * inf.
    active = coefficients.isfinite() & learner_logprobs.detach().isfinite()
    logprobs = masked_fill(_at_least_fp32(learner_logprobs), active)
    per_token = -masked_fill(coefficients, active).to(logprobs.dtype) * logprobs
    penalty = _kl_penalty(learner_logprobs, reference_logprobs, mask, kl_coef, kl_estimator)
    loss = aggregate(per_token + penalty, mask, aggregation=aggregation, normalizer=normalizer, length=length)
    metrics = {"weight_mean": _mean(weights.expand(mask.shape), mask)}
    return loss, metrics | _ratio_metrics(learner_logprobs, sampler_logprobs, mask)


@_policy_loss(linear_in_coefficients=False)
def ppo_clip(
    learner_logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    *,
    proximal_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    aggregation: str = "seq_mean_token_mean",
    normalizer: float | Tensor | None = None,
    length: float | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    max_log_ratio: float = 20.0,
    weight_treatment: str = "none",
    cap: float = 8.0,
    low: float = 0.0,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
) -> LossAndMetrics:
    """PPO's clipped objective per token; with a group baseline it is GRPO's (arXiv 1707.06347, 2402.03300).

    loss = -sum_it f_i min(r_it A_it, clip(r_it, 1 - clip_low, 1 + clip_high) A_it), r_it = pi / pi_old, where pi_old is
    the proximal policy if given, else the sampler. `clip_high` > `clip_low` is DAPO's clip-higher (arXiv 2503.14476);
    `dual_clip` = c > 1 bounds the objective of negative advantages below by c A_it (arXiv 1912.09729). log r is cut off
    at +-`max_log_ratio` nats, with gradient 0 beyond, so that no ratio overflows. With a proximal policy,
    `weight_treatment` may weigh the terms by proximal / sampler (decoupled PPO, arXiv 2110.00641).
    Metrics: clip_share, dual_clip_share, ratio_mean, ratio_max, kl_k1 and kl_k3 of the learner from pi_old,
    log_ratio_abs_mean (to the sampler) and quarantined_share (of rows).
    ValueError: as `reinforce`; clip_low outside [0, 1], negative clip_high, dual_clip <= 1; a `weight_treatment` but no
    proximal log-probs, which would correct for the sampler twice.
    """
    mask = check_rows(action_mask, learner_logprobs=learner_logprobs, sampler_logprobs=sampler_logprobs)
    _check_clipping(clip_low, clip_high, dual_clip, max_log_ratio)
    old = (sampler_logprobs if proximal_logprobs is None else proximal_logprobs).detach()
    if proximal_logprobs is None and weight_treatment != "none":
        raise ValueError(f"weight_treatment {weight_treatment!r} needs proximal_logprobs: the ratio is to the sampler")
    # Also with "none": it is 0 for rows that are quarantined between these two.
    weights = _treated(weight_treatment, old, sampler_logprobs, mask, cap, low)
    gain = _per_token(advantages, mask)
    bad_row = row_is_quarantined(learner_logprobs, sampler_logprobs, mask)
    bad_row = bad_row | row_is_quarantined(learner_logprobs, old, mask)
    active = mask & ~bad_row.unsqueeze(1) & gain.isfinite()
    log_ratio = log_ratios(learner_logprobs, old, active).clamp(-max_log_ratio, max_log_ratio)
    gain = masked_fill(gain, active).to(log_ratio.dtype)
    ratio = log_ratio.exp()
    objective, clipped, floored = _clipped_objective(ratio, gain, clip_low, clip_high, dual_clip)
    per_token = -masked_fill(weights.expand(mask.shape).to(ratio.dtype), active) * objective
    penalty = _kl_penalty(learner_logprobs, reference_logprobs, mask, kl_coef, kl_estimator)
    loss = aggregate(per_token + penalty, mask, aggregation=aggregation, normalizer=normalizer, length=length)
    metrics = _ratio_metrics(learner_logprobs, sampler_logprobs, mask) | {
        "clip_share": _mean(clipped.float(), active),
        "dual_clip_share": _mean(floored.float(), active),
        "ratio_mean": _mean(ratio, active),
        "ratio_max": masked_fill(ratio.detach(), active).max() if mask.numel() else ratio.new_zeros(()),
        "kl_k1": _mean(-log_ratio, active),
        "kl_k3": _mean(ratio - 1 - log_ratio, active),
    }
    return loss, metrics


def _clipped_objective(
    ratio: Tensor, gain: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Per token: the objective, whether the clip cut its gradient, whether the dual clip did; all [n, s]."""
    free, bounded = ratio * gain, ratio.clamp(1 - clip_low, 1 + clip_high) * gain
    objective, clipped = torch.minimum(free, bounded), bounded < free
    if dual_clip is None:
        return objective, clipped, torch.zeros_like(clipped)
    floor = dual_clip * gain
    floored = (gain < 0) & (objective < floor)
    return torch.where(floored, floor, objective), clipped, floored


def _check_clipping(clip_low: float, clip_high: float, dual_clip: float | None, max_log_ratio: float) -> None:
    if not (0 <= clip_low <= 1 and 0 <= clip_high < math.inf):
        raise ValueError(f"need 0 <= clip_low <= 1 and 0 <= clip_high < inf, got {clip_low} and {clip_high}")
    if dual_clip is not None and not 1 < dual_clip < math.inf:
        raise ValueError(f"dual_clip must be a finite number > 1, or None for no dual clip, got {dual_clip}")
    if not 0 < max_log_ratio < 80:
        raise ValueError(f"max_log_ratio must be in (0, 80) nats, beyond which fp32 overflows, got {max_log_ratio}")


def _at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _per_token(advantages: Tensor, mask: Tensor) -> Tensor:
    """Advantages as [n, s], detached; a masked entry is 0."""
    advantages = advantages.detach()
    if advantages.shape not in (mask.shape, mask.shape[:1]):
        raise ValueError(f"advantages must be [{mask.shape[0]}] or {tuple(mask.shape)}, got {tuple(advantages.shape)}")
    table = advantages.unsqueeze(1).expand(mask.shape) if advantages.ndim == 1 else advantages
    return masked_fill(table, mask)


def _treated(name: str, numerator: Tensor, sampler: Tensor, mask: Tensor, cap: float, low: float) -> Tensor:
    """Detached multipliers [n, 1] or [n, s] of one weight treatment."""
    if name not in weight_treatments:
        raise ValueError(f"unknown weight_treatment {name!r}: use one of {', '.join(weight_treatments)}")
    return weight_treatments[name](numerator, sampler, mask, cap=cap, low=low)


def _kl_penalty(learner: Tensor, reference: Tensor | None, mask: Tensor, kl_coef: float, kl_estimator: str) -> Tensor:
    """kl_coef times the per-token divergence estimate from the reference policy; [n, s]."""
    if kl_coef == 0:
        return torch.zeros_like(_at_least_fp32(learner))
    if not 0 < kl_coef < math.inf:
        raise ValueError(f"kl_coef must be a finite number >= 0, got {kl_coef}")
    if reference is None:
        raise ValueError(f"kl_coef {kl_coef} needs reference_logprobs, the log-probs of the policy to stay close to")
    if kl_estimator not in divergences:
        raise ValueError(f"unknown kl_estimator {kl_estimator!r}: use one of {', '.join(divergences)}")
    check_rows(mask, reference_logprobs=reference)
    # False for NaN and infinite differences too.
    known = mask & ((learner - reference).detach().abs() <= MAX_KL_LOG_RATIO)
    return kl_coef * divergences[kl_estimator](_at_least_fp32(learner), _at_least_fp32(reference).detach(), known)


@torch.no_grad()
def _mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over the masked entries of the whole table, 0 where there are none; []."""
    return masked_fill(x, mask).sum() / mask.sum().clamp(min=1)


@torch.no_grad()
def _ratio_metrics(learner: Tensor, sampler: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How far the learner is from the sampler, over the tokens of rows that are not quarantined."""
    ratios = log_ratios(learner, sampler, mask).double()
    bad_row = quarantined(ratios.sum(1))
    finite = mask & ~bad_row.unsqueeze(1) & ratios.isfinite()
    # The cut only keeps a metric printable: exp(700) is near the largest fp64.
    return {
        "ratio_mean": _mean(ratios.clamp(max=700).exp(), finite),
        "log_ratio_abs_mean": _mean(ratios.abs(), finite),
        "quarantined_share": bad_row.double().sum() / max(len(bad_row), 1),
    }


policy_losses: Mapping[str, PolicyLoss] = {"reinforce": reinforce, "ppo_clip": ppo_clip, "grpo": ppo_clip}
