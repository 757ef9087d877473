"""Score norms from the number of action tokens alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vcpo.batch import Batch


def length_norms(action_mask: Tensor) -> Tensor:
    """sqrt(L_i): [n, s] -> [n] fp64. Exact up to a constant where every token's score has the same norm and no two of
    one trajectory correlate; with weights of 1 it turns the optimal baseline into the length-weighted one."""
    if action_mask.ndim != 2:
        raise ValueError(f"action_mask must be [n, s], one row per trajectory, got shape {tuple(action_mask.shape)}")
    return action_mask.bool().sum(1, dtype=torch.float64).sqrt()


def length(model: nn.Module, batch: Batch) -> Tensor:
    """Score-norm proxy sqrt(L_i) of each trajectory: [n] fp64; the model is not run."""
    return length_norms(batch.action_mask)
