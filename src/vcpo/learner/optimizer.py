"""AdamW and the learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from vcpo.errors import ConfigError

SCHEDULES = ("constant", "linear", "cosine")


def make_optimizer(
    model: torch.nn.Module,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; weight decay only on matrices (norms, biases and scalars are left alone)."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ConfigError("the model has no trainable parameters: set requires_grad on those to train")
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, eps=eps)


def schedule_factor(kind: str, *, warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    """step (from 0) -> factor of the base lr in (0, 1]: linear warm-up, then constant, linear or cosine decay towards 0.

    The first step already has 1/warmup_steps of the lr, and the last one more than 0: no step is spent at lr 0.
    """
    if kind not in SCHEDULES:
        raise ConfigError(f"lr_schedule must be one of {', '.join(SCHEDULES)}, got {kind!r}")

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        if kind == "linear":
            return max(1.0 - progress, 1.0 / max(1, total_steps))
        if kind == "cosine":
            return max(0.5 * (1.0 + math.cos(math.pi * progress)), 1.0 / max(1, total_steps))
        return 1.0

    return factor


def make_schedule(
    optimizer: torch.optim.Optimizer, kind: str, *, warmup_steps: int, total_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """A torch scheduler that multiplies each group's initial lr by `schedule_factor`; it only ever sees base rates."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, schedule_factor(kind, warmup_steps=warmup_steps, total_steps=total_steps)
    )
