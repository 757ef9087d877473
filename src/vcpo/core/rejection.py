"""Which actions are trained at all (rejection by disagreement of learner and sampler), and batch-normalised weights.

Truncation (`weight_treatments`) makes a large weight smaller; rejection takes actions, or whole trajectories, out of
the loss. Both may be used together. Nothing here carries gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vcpo.core.divergences import divergences
from vcpo.core.masking import check_rows, masked_fill, masked_mean
from vcpo.core.weights import log_ratios, quarantined

REJECTION_LEVELS = ("token", "sum", "mean", "max")
REJECTION_MEASURES = ("ratio", "k2", "k3")


@torch.no_grad()
def kept_actions(
    learner_logprobs: Tensor,
    sampler_logprobs: Tensor,
    action_mask: Tensor,
    *,
    level: str = "token",
    measure: str = "ratio",
    low: float = -math.inf,
    high: float = math.inf,
) -> Tensor:
    """True on the actions whose disagreement lies in [low, high]; [n, s] each -> [n, s] bool, False where masked.

    `measure`, with l = log pi - log mu: "ratio" exp(l), compared in log space; "k2" l^2 / 2 and "k3" exp(l) - 1 - l,
    the estimates of KL(sampler || learner).
    `level`: "token" judges each action by itself; "sum", "mean" and "max" judge the trajectory by that statistic over
    its actions and keep or drop it whole. For "ratio" the sum is the product of the ratios (the sequence's importance
    weight), the mean their geometric mean; "max" keeps a trajectory when every single action lies inside the bounds.

    A quarantined trajectory (log weight NaN or +inf) and a statistic that is NaN or +inf are dropped in any case.
    ValueError for an unknown level or measure, bounds in the wrong order, or shapes that differ.
    """
    if level not in REJECTION_LEVELS or measure not in REJECTION_MEASURES:
        raise ValueError(
            f"need a level of {', '.join(REJECTION_LEVELS)} and a measure of {', '.join(REJECTION_MEASURES)}, "
            f"got {level!r} and {measure!r}"
        )
    if not low <= high:
        raise ValueError(f"low must not exceed high, got [{low}, {high}]")
    mask = check_rows(action_mask, learner_logprobs=learner_logprobs, sampler_logprobs=sampler_logprobs)
    ratios = log_ratios(learner_logprobs, sampler_logprobs, mask)
    if measure == "ratio":
        values, low, high = ratios, _log(low), _log(high)
    else:
        values = divergences[measure](sampler_logprobs.to(ratios.dtype), learner_logprobs.to(ratios.dtype), mask)
    usable = mask & ~quarantined(ratios.sum(1, keepdim=True))
    if level in ("sum", "mean"):
        total = values.sum(1, keepdim=True)
        values = total / mask.sum(1, keepdim=True).clamp(min=1) if level == "mean" else total
    inside = (values >= low) & (values <= high) & ~quarantined(values)
    if level == "max":
        inside = (inside | ~mask).all(1, keepdim=True)
    return usable & inside


@torch.no_grad()
def batch_normalized(weights: Tensor, action_mask: Tensor, *, mean: Tensor | float | None = None) -> Tensor:
    """Weights divided by their mean, so that a batch keeps its overall scale; [n, s] or [n, 1] -> the same shape.

    Per-token weights are averaged over all actions, per-trajectory weights over the trajectories that have actions.
    `mean` overrides that average: the mean over the WHOLE optimizer batch, needed when it comes in micro-batches or on
    several ranks. A weight may exceed afterwards the cap it was truncated at. A mean of 0 leaves the weights, all 0,
    as they are; per-token results are 0 at masked positions. ValueError for a mean that is not a finite number >= 0.
    """
    mask = check_rows(action_mask)
    per_trajectory = weights.shape == (len(mask), 1)
    if not per_trajectory:
        check_rows(mask, weights=weights)
    counted = mask.any(1, keepdim=True) if per_trajectory else mask
    if mean is None:
        mean = masked_mean(weights.flatten(), counted.flatten())
    scale = torch.as_tensor(mean, dtype=weights.dtype, device=weights.device)
    if not 0 <= float(scale) < math.inf:
        raise ValueError(f"the mean of the weights must be a finite number >= 0, got {float(scale)}")
    return masked_fill(weights / torch.where(scale > 0, scale, 1.0), counted)


def _log(bound: float) -> float:
    """The logarithm of a bound on a ratio; every ratio is above a bound <= 0."""
    return math.log(bound) if bound > 0 else -math.inf
