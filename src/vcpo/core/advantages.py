"""Advantages: rewards minus a baseline, over a scale.

Statistics are fp64 inside and carry no gradient; unscorable rows (reward NaN or infinite) take part in none of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vcpo.core.groups import float_type, group_index, group_spread, group_sum, scorable
from vcpo.core.masking import check_vector

REWARD_SCALES = ("group", "batch", "mean", "none")


@torch.no_grad()
def advantages(rewards: Tensor, baseline: Tensor, scale: Tensor) -> Tensor:
    """How much better each trajectory did than its baseline, in units of the scale; all [n] -> [n], finite.

    A_i = (R_i - b_i) / scale_i. 0 where the reward is unscorable, and where the result would not be a number: a bad
    baseline or scale must not turn into a step. ValueError unless all three are vectors of one length.
    """
    check_vector(rewards=rewards, baseline=baseline, scale=scale)
    gain = (rewards.double() - baseline.double()) / scale.double()
    return torch.where(gain.isfinite(), gain, 0.0).to(float_type(rewards))


@torch.no_grad()
def zero_variance(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """True for the rows of groups whose scorable rewards are all equal: nothing to learn there; [n], [n] -> [n] bool.

    Compared as max == min, exactly. A group with one scorable row or none is one too.
    """
    check_vector(rewards=rewards, group_ids=group_ids)
    index, count = group_index(group_ids)
    return (group_spread(rewards, index, count) == 0)[index]


@torch.no_grad()
def group_scale(
    rewards: Tensor, group_ids: Tensor, *, scale_rewards: str = "group", std_eps: float = 0.0, ddof: int = 0
) -> Tensor:
    """What each row's advantage is divided by; [n], [n] -> [n], positive.

        "group"  std of the group's scorable rewards + std_eps     GRPO, arXiv 2402.03300
        "batch"  the same over the whole batch                     REINFORCE++, arXiv 2501.03262
        "mean"   mean of the group's scorable rewards + std_eps    MaxRL, arXiv 2602.02710; inf where the mean is <= 0
        "none"   1                                                 Dr. GRPO, arXiv 2503.20783

    The std divides by N - ddof: 0 is the population std of arXiv 2602.17616, verl and TRL use 1 (with std_eps 1e-6 and
    1e-4). Where all rewards are equal, and for unscorable rows, the scale is 1: the advantage there is 0 anyway.
    ValueError: unknown `scale_rewards`, negative `std_eps`, `ddof` other than 0 and 1.
    """
    check_vector(rewards=rewards, group_ids=group_ids)
    if scale_rewards not in REWARD_SCALES:
        raise ValueError(f"unknown scale_rewards {scale_rewards!r}: use one of {', '.join(REWARD_SCALES)}")
    if not 0 <= std_eps < math.inf:
        raise ValueError(f"std_eps must be a finite number >= 0, got {std_eps}")
    if ddof not in (0, 1):
        raise ValueError(f"ddof must be 0 (population std) or 1 (sample std), got {ddof}")
    if scale_rewards == "none":
        return torch.ones_like(rewards, dtype=float_type(rewards))
    index, count = group_index(torch.zeros_like(group_ids) if scale_rewards == "batch" else group_ids)
    values, known = scorable(rewards)
    size = group_sum(known.double(), index, count)
    mean = group_sum(values, index, count) / size.clamp(min=1)
    if scale_rewards == "mean":
        scale = torch.where(mean > 0, mean + std_eps, math.inf)
    else:
        deviation = torch.where(known, values - mean[index], 0.0)
        scale = (group_sum(deviation.square(), index, count) / (size - ddof).clamp(min=1)).sqrt() + std_eps
    scale = torch.where(group_spread(rewards, index, count) > 0, scale, 1.0)
    return torch.where(known, scale[index], 1.0).to(float_type(rewards))


@torch.no_grad()
def whiten(values: Tensor, mask: Tensor, *, eps: float = 0.0) -> Tensor:
    """Values shifted and scaled to mean 0 and sample variance 1 over the mask; any shape -> the same, 0 outside.

    (x - mean) / sqrt(var + eps), var with N - 1: advantage whitening over all action tokens as in REINFORCE++
    (arXiv 2501.03262; peers use eps = 1e-8). All values equal, or fewer than two: 0. ValueError when shapes differ.
    """
    if values.shape != mask.shape:
        raise ValueError(f"mask must have the shape of values {tuple(values.shape)}, got {tuple(mask.shape)}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps must be a finite number >= 0, got {eps}")
    x = values.double()[mask.bool()]
    white = torch.zeros_like(values, dtype=torch.float64)
    if x.numel() > 1 and bool(x.max() > x.min()):
        white[mask.bool()] = (x - x.mean()) / (x.var() + eps).sqrt()
    return white.to(float_type(values))
