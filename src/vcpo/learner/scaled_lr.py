"""The step size scaled for one step only: the base learning rate is never touched (law 10)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def scaled_lr(optimizer: torch.optim.Optimizer, scale: float) -> Iterator[None]:
    """Inside the block every parameter group's lr is `scale` times its base; on exit, also by an exception, the base is back.

    Decoupled weight decay (AdamW) is scaled with it, since it multiplies the lr. An lr that is a tensor is changed and
    restored in place, so that an optimizer that holds on to the tensor sees it.

    scale: in [0, 1]. Raises ValueError otherwise: a bad number must never enlarge a step.
    """
    if not (math.isfinite(scale) and 0.0 <= scale <= 1.0):
        raise ValueError(f"scale must be a number in [0, 1], got {scale!r}; to raise the step, raise the base lr")
    bases = [_copy(group["lr"]) for group in optimizer.param_groups]
    try:
        for group, base in zip(optimizer.param_groups, bases, strict=True):
            _assign(group, base * scale)
        yield
    finally:
        for group, base in zip(optimizer.param_groups, bases, strict=True):
            _assign(group, base)


def _copy(lr: float | Tensor) -> float | Tensor:
    return lr.detach().clone() if isinstance(lr, Tensor) else lr


def _assign(group: dict, value: float | Tensor) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].copy_(torch.as_tensor(value))
    else:
        group["lr"] = value
