"""Sums and extremes over groups named by arbitrary integers: unsorted, of any size, without a loop over groups.

A group is the set of rows with one id. `group_index` numbers the groups 0..count-1; the reductions take that numbering
and give one entry per group, to be spread over the rows again by `[index]`.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from vcpo.core.masking import check_vector


def group_index(group_ids: Tensor) -> tuple[Tensor, int]:
    """Each row's group as a number in 0..count-1, and the count; [n] integers of any value -> [n] int64.

    ValueError unless `group_ids` is a vector of integers.
    """
    check_vector(group_ids=group_ids)
    if group_ids.is_floating_point() or group_ids.is_complex():
        raise ValueError(f"group_ids must be integers, one per trajectory, got {group_ids.dtype}")
    unique = cast("tuple[Tensor, Tensor]", torch.unique(group_ids, return_inverse=True))  # pyright: ignore[reportUnknownMemberType]
    return unique[1], len(unique[0])


def group_sum(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Sum over the rows of each group; [n] -> [count]."""
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, index, values)


def group_max(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Largest entry of each group; [n] -> [count], -inf where every entry is."""
    lowest = torch.full((count,), -math.inf, dtype=values.dtype, device=values.device)
    return lowest.scatter_reduce(0, index, values, "amax")


def group_softmax(log_v: Tensor, index: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """exp(log_v) relative to its group's largest, and each group's total of these; [n] -> [n] in [0, 1], [count].

    Subtracting the largest is what makes a common factor of a group's weights irrelevant and overflow impossible.
    The total is 0 exactly where every log_v of the group is -inf, else at least 1.
    """
    top = group_max(log_v, index, count)[index]
    relative = torch.where(top.isneginf(), 0.0, (log_v - top).exp())
    return relative, group_sum(relative, index, count)


def scorable(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards in fp64 with 0 in place of non-numbers, and where they are numbers at all; [n] -> [n], [n] bool.

    A missing reward travels as NaN; an infinite one can be compared with nothing either.
    """
    known = rewards.isfinite()
    return torch.where(known, rewards.double(), 0.0), known


def group_spread(rewards: Tensor, index: Tensor, count: int) -> Tensor:
    """max - min of the scorable rewards of each group; [n] -> [count], 0 exactly where they are all equal or absent."""
    values, known = scorable(rewards)
    highest = group_max(torch.where(known, values, -math.inf), index, count)
    lowest = -group_max(torch.where(known, -values, -math.inf), index, count)
    return torch.where(highest > lowest, highest - lowest, 0.0)


def float_type(rewards: Tensor) -> torch.dtype:
    """The type results are returned in: the rewards' own where that is a float type, else fp64."""
    return rewards.dtype if rewards.is_floating_point() else torch.float64
