"""Per-token estimates of KL(policy || reference) from log-probs of sampled tokens.

With d = log pi(a) - log ref(a), a ~ pi:  k1 = d,  k2 = d^2 / 2,  k3 = exp(-d) - 1 + d.
k1 and k3 are unbiased, k1 may be negative, k2 and k3 may not. Nothing is clamped. (Schulman 2020, "Approximating KL
divergence".)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from vcpo.core.masking import check_rows, masked_fill

Divergence = Callable[[Tensor, Tensor, Tensor], Tensor]
"""f(log_prob, ref_log_prob, mask) -> per token, all [n, s]; 0 at masked positions, in value and gradient."""


def kl_k1(log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
    """The log-ratio estimate of the KL, d, per token in nats; any sign; [n, s] each -> [n, s], 0 where masked."""
    kept = check_rows(mask, log_prob=log_prob, ref_log_prob=ref_log_prob)
    return masked_fill(log_prob, kept) - masked_fill(ref_log_prob, kept)


def kl_k2(log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Half the squared log-ratio, d^2 / 2, per token; >= 0, biased; its gradient is the KL's on policy; [n, s]."""
    return kl_k1(log_prob, ref_log_prob, mask).square() / 2


def kl_k3(log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
    """The unbiased, never negative estimate exp(-d) - 1 + d, per token; [n, s] each -> [n, s], 0 at masked positions.

    Where the exponential overflows the value is +inf, never NaN; where the value is finite so is the gradient.
    """
    return _exp_minus_line(-kl_k1(log_prob, ref_log_prob, mask))


divergences: Mapping[str, Divergence] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}

SERIES_BELOW = 0.1
"""|x| under which exp(x) - 1 - x is summed as its series: the subtraction would lose all digits of a small KL."""
LINE_IS_LOST_ABOVE = 50.0
"""x above which x is under half a unit in the last place of exp(x), in fp64 too."""


def _exp_minus_line(x: Tensor) -> Tensor:
    """exp(x) - 1 - x, to full relative precision. Each branch sees harmless numbers where another one answers."""
    near = x.abs() < SERIES_BELOW
    small, rest = torch.where(near, x, 0.0), torch.where(near, 0.0, x)
    series = torch.zeros_like(small)
    for k in range(11, 1, -1):
        series = series * small + 1 / math.factorial(k)
    line = torch.where(rest > LINE_IS_LOST_ABOVE, 0.0, rest)  # else inf - inf at x = inf
    return torch.where(near, small.square() * series, torch.expm1(rest) - line)
