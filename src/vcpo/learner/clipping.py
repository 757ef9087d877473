"""Gradient clipping by global norm: a fixed bound, a bound that follows the running median, or none."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

MEDIAN_WINDOW = 50
MEDIAN_FACTOR = 1.5
MEDIAN_CEILING = 1.0
MEDIAN_WARMUP_STEPS = 5


class GradientClip:
    """Decides the bound of each step. `"running_median"`: min(1, 1.5 x median of the last 50 earlier pre-clip norms),
    from the 6th step on; before that 1. Isolated large gradients start slides that a fixed bound cannot see, because
    healthy norms fall by an order of magnitude during a run.
    """

    def __init__(self, max_grad_norm: float | str | None) -> None:
        fixed = isinstance(max_grad_norm, (int, float)) and not isinstance(max_grad_norm, bool)
        if not (max_grad_norm is None or max_grad_norm == "running_median" or (fixed and float(max_grad_norm) > 0)):
            raise ValueError(
                f'max_grad_norm must be a positive number, "running_median" or None, got {max_grad_norm!r}'
            )
        self._rule = max_grad_norm
        self._norms: deque[float] = deque(maxlen=MEDIAN_WINDOW)

    def bound(self) -> float | None:
        """The bound for the step about to be taken; None for no clipping."""
        if self._rule is None or not isinstance(self._rule, str):
            return self._rule
        if len(self._norms) < MEDIAN_WARMUP_STEPS:
            return MEDIAN_CEILING
        return min(MEDIAN_CEILING, MEDIAN_FACTOR * statistics.median(self._norms))

    def observe(self, grad_norm: float) -> None:
        """Remember a pre-clip norm; one that is not a number teaches nothing."""
        if math.isfinite(grad_norm):
            self._norms.append(grad_norm)

    def state_dict(self) -> dict[str, Any]:
        return {"norms": list(self._norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._norms = deque(state["norms"], maxlen=MEDIAN_WINDOW)


def global_norm(parameters: Sequence[torch.nn.Parameter]) -> float:
    """Norm of all gradients together, accumulated in fp32 or better; 0.0 when there are none.

    Collective where parameters are sharded (FSDP2): the norm of the whole gradient, the same on every rank.
    """
    norms: dict[DeviceMesh | None, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            norm = torch.linalg.vector_norm(p.grad, dtype=_wide(p.grad))
            # Whole tensors, and pieces on different meshes, do not mix.
            norms.setdefault(p.grad.device_mesh if isinstance(p.grad, DTensor) else None, []).append(norm)
    totals = [torch.nn.utils.get_total_norm(found) for found in norms.values()]
    return math.hypot(*(float(t.full_tensor() if isinstance(t, DTensor) else t) for t in totals))


def scale_gradients(parameters: Sequence[torch.nn.Parameter], factor: float) -> None:
    """Multiply every gradient by `factor`, in place."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if factor == 1.0:
        return
    for gradient in gradients:
        gradient.mul_(factor)


def _wide(gradient: Tensor) -> torch.dtype:
    return torch.float64 if gradient.dtype == torch.float64 else torch.float32
