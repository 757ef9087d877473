"""Masked reductions that never read a masked value: `where`, never a product with the mask.

A product lets NaN and inf at masked positions through (0 * inf = NaN), in the value and in the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_rows(mask: Tensor, **tensors: Tensor) -> Tensor:
    """The mask as bool [n, s]; ValueError names the first of the given tensors that has another shape."""
    if mask.ndim != 2:
        raise ValueError(f"the mask must be [n, s], one row per trajectory, got shape {tuple(mask.shape)}")
    for name, value in tensors.items():
        if value.shape != mask.shape:
            raise ValueError(f"{name} must have the mask's shape {tuple(mask.shape)}, got {tuple(value.shape)}")
    return mask.bool()


def check_vector(**tensors: Tensor) -> None:
    """ValueError unless every named tensor is a vector, one number per trajectory, all of one length."""
    lengths: set[int] = set()
    for name, value in tensors.items():
        if value.ndim != 1:
            raise ValueError(f"{name} must be [n], one number per trajectory, got shape {tuple(value.shape)}")
        lengths.add(len(value))
    if len(lengths) > 1:
        given = ", ".join(f"{name} [{len(value)}]" for name, value in tensors.items())
        raise ValueError(f"need one number per trajectory in each, got {given}")


def masked_fill(x: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """`x` where the mask is True, `fill` elsewhere; the gradient at masked positions is exactly 0.

    Use it on the way into a non-linear function and again on the way out (the "double where"): then neither the
    value nor the gradient at a masked position is ever computed from what stands there.
    """
    return torch.where(mask.bool(), x, torch.as_tensor(fill, dtype=x.dtype, device=x.device))


def masked_sum(x: Tensor, mask: Tensor, dim: int = -1) -> Tensor:
    """Sum of `x` over the positions where the mask is True; 0 where there are none. x, mask [..., s] -> [...]."""
    return masked_fill(x, mask).sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int = -1) -> Tensor:
    """Mean of `x` over the positions where the mask is True; 0 where there are none. x, mask [..., s] -> [...]."""
    return masked_sum(x, mask, dim) / mask.bool().sum(dim).clamp(min=1)
