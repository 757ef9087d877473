"""Sums and row tables across data-parallel ranks; every function is the identity in a single process.

`group=None` follows torch's own convention: the default process group when one is initialised, else a single process.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

ProcessGroup = dist.ProcessGroup


def world_size(group: ProcessGroup | None = None) -> int:
    """Ranks in the group; 1 without torch.distributed."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def rank(group: ProcessGroup | None = None) -> int:
    """This process's place in the group, from 0."""
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def is_sharded(parameter: Tensor) -> bool:
    """Whether the parameter lives in pieces on several ranks (FSDP2's DTensor)."""
    return isinstance(parameter, DTensor)


def sum_over_ranks_not_mean(model: torch.nn.Module) -> None:
    """Have FSDP2 add gradients up over the ranks; left alone it averages, and coefficients are divided already."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)


def gather_rows(rows: Tensor, group: ProcessGroup | None = None) -> tuple[Tensor, int]:
    """All ranks' rows stacked in rank order, and where this rank's begin.

    rows: [n, ...], where n may differ from rank to rank (0 included) and the rest may not. Collective: every rank calls it.
    """
    ranks = world_size(group)
    if ranks == 1:
        return rows, 0
    counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(ranks)]
    dist.all_gather(counts, torch.tensor([rows.shape[0]], dtype=torch.int64, device=rows.device), group=group)
    sizes = [int(c) for c in counts]
    padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    parts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([p[:n] for p, n in zip(parts, sizes, strict=True)]), sum(sizes[: rank(group)])


def sum_gradients(parameters: Iterable[torch.nn.Parameter], group: ProcessGroup | None = None) -> None:
    """Add up `.grad` over the ranks, in place. A rank that has no gradient for a parameter contributes zeros.

    A sum, not an average: coefficients are already divided by the size of the whole optimizer batch.
    """
    if world_size(group) == 1:
        return
    for parameter in parameters:
        if is_sharded(parameter):
            continue  # FSDP2 has done it in the backward
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM, group=group)
