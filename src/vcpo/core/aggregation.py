"""From one number per token to one loss: every way of averaging is a weight per trajectory.

    loss = sum_i f_i sum_t x_it

and f_i depends on lengths and on the size of the *optimizer batch* alone. So micro-batches that are given the same
`normalizer` add up to the loss and gradient of the whole, however the batch was cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from vcpo.core.masking import check_rows, check_vector, masked_sum

Aggregation = Callable[[Tensor, float, float | None], Tensor]
"""f(lengths [n] fp64, normalizer, length) -> f_i [n]."""


def _constant_length(lengths: Tensor, normalizer: float, length: float | None) -> Tensor:
    if length is None or not 0 < length < math.inf:
        raise ValueError(f"seq_mean_token_sum_norm needs length, the positive number it divides by, got {length}")
    return torch.ones_like(lengths) / (normalizer * length)


aggregations: Mapping[str, Aggregation] = {
    "token_mean": lambda lengths, normalizer, length: torch.ones_like(lengths) / normalizer,
    "seq_mean_token_mean": lambda lengths, normalizer, length: 1 / (lengths.clamp(min=1) * normalizer),
    "seq_mean_token_sum": lambda lengths, normalizer, length: torch.ones_like(lengths) / normalizer,
    "seq_mean_token_sum_norm": _constant_length,
}


def aggregation_factors(
    lengths: Tensor, *, aggregation: str, normalizer: float | Tensor | None = None, length: float | None = None
) -> Tensor:
    """What every token of a trajectory is multiplied by in the loss, f_i; lengths = action tokens, [n] -> [n] fp64.

        "token_mean"               1 / T         DAPO (arXiv 2503.14476); T = action tokens of the optimizer batch
        "seq_mean_token_mean"      1 / (B L_i)   GRPO (arXiv 2402.03300) and VCPO (arXiv 2602.17616)
        "seq_mean_token_sum"       1 / B
        "seq_mean_token_sum_norm"  1 / (B C)     Dr. GRPO (arXiv 2503.20783); C = `length`, a constant

    B counts every trajectory of the optimizer batch, empty and quarantined ones too. `normalizer` is that T or B of the
    whole optimizer batch; None takes the rows given here for all of it. ValueError: unknown name, negative or
    non-finite `normalizer`, missing `length`.
    """
    check_vector(lengths=lengths)
    if aggregation not in aggregations:
        raise ValueError(f"unknown aggregation {aggregation!r}: use one of {', '.join(aggregations)}")
    if normalizer is None:
        whole = float(lengths.sum()) if aggregation == "token_mean" else float(len(lengths))
    else:
        whole = float(normalizer)
        if not 0 <= whole < math.inf:
            raise ValueError(f"normalizer must be a count of trajectories or tokens, a finite number >= 0, got {whole}")
    # A batch without a single token: the sum is 0, and so is the loss.
    return aggregations[aggregation](lengths.double(), whole or 1.0, length)


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    *,
    aggregation: str,
    normalizer: float | Tensor | None = None,
    length: float | None = None,
) -> Tensor:
    """The loss of a table of per-token terms: sum_i f_i sum_t x_it over the mask; [n, s], [n, s] -> [].

    The f_i are those of `aggregation_factors`. What stands at masked positions changes neither value nor gradient.
    ValueError as there, and when shapes differ.
    """
    mask = check_rows(mask, per_token=per_token)
    factors = aggregation_factors(mask.sum(1), aggregation=aggregation, normalizer=normalizer, length=length)
    return (masked_sum(per_token, mask, 1) * factors.to(per_token.dtype)).sum()
