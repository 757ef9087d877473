"""Sums and row tables across data-parallel ranks; every function is the identity in a single process.

`group=None` follows torch's own convention: the default process group when one is initialised, else a single process.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate

from vcpo.errors import BatchError, ConfigError

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
            # Below fp64 a factor alone asks for PREMUL_SUM, which gloo has not got.
            module.set_force_sum_reduction_for_comms(True)


def check_sharding(model: torch.nn.Module, group: ProcessGroup | None = None) -> None:
    """ConfigError naming the parameter unless FSDP2 sums every sharded gradient over exactly the ranks of `group`.

    FSDP2 and HSDP over those ranks pass, also with some parameters left whole. What does not: FSDP1, tensor-parallel
    parameters, and a mesh of other ranks; their gradients would be summed over too few ranks, without a word.
    """
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ConfigError("FullyShardedDataParallel (FSDP1) hides the parameters: use fully_shard (FSDP2) instead")
    managed = {id(p) for m in model.modules() if isinstance(m, FSDPModule) for p in m.parameters()}
    for name, parameter in model.named_parameters():
        if not (parameter.requires_grad and isinstance(parameter, DTensor)):
            continue
        whole_until_last = all(isinstance(p, Replicate) for p in parameter.placements[:-1])
        if id(parameter) not in managed or not whole_until_last:
            raise ConfigError(
                f"parameter '{name}' is in pieces other than fully_shard's ({parameter.placements}): only FSDP2 over the "
                "data-parallel ranks works, no tensor parallelism"
            )
        over = sorted(parameter.device_mesh.mesh.flatten().tolist())
        ranks = sorted(dist.get_process_group_ranks(group))
        if over != ranks:
            raise ConfigError(
                f"parameter '{name}' is sharded over ranks {over}, but gradients are to be summed over {ranks}: "
                "give process_group and fully_shard's mesh the same ranks"
            )


def check_micro_batch(left: int, *, cut: bool, device: torch.device, group: ProcessGroup | None = None) -> None:
    """With sharded parameters, before a micro-batch's backward: BatchError on every rank, or on none.

    left: rows of the optimizer batch this rank has still to hand in after this micro-batch; at the announcement, all.
    cut: this micro-batch holds part of a group whose baseline needs the rest. Forward and backward gather parameters
    from every rank, so a rank that runs one micro-batch more, or fails alone, would leave the others waiting.
    Collective: one all-reduce of three numbers.
    """
    if world_size(group) == 1:
        flags = [int(cut), int(left > 0), int(left == 0)]
    else:
        state = torch.tensor([int(cut), int(left > 0), int(left == 0)], device=device)
        dist.all_reduce(state, op=dist.ReduceOp.MAX, group=group)
        flags = state.tolist()
    if flags[0]:
        raise BatchError(
            "with sharded parameters (FSDP2) every group must be whole in one micro-batch of one rank when the baseline "
            "is optimal: use larger micro-batches and deal whole groups to ranks, or another baseline"
        )
    if flags[1] and flags[2]:
        raise BatchError(
            "with sharded parameters (FSDP2) every rank must run equally many micro-batches: here some have no rows left "
            f"while others do (this rank: {left}); deal rows so that all ranks end together"
        )


def reduce_gradients(model: torch.nn.Module) -> None:
    """Have FSDP2 reduce gradients over the ranks in the next backward, whatever was set before."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(True, recurse=False)


def broadcast(tensor: Tensor, source: int, group: ProcessGroup | None = None) -> Tensor:
    """The tensor as rank `source` of the group has it, in place. Collective."""
    if world_size(group) > 1:
        dist.broadcast(tensor, group=group, group_src=source)
    return tensor


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

    A sum, not an average: coefficients are already divided by the size of the whole optimizer batch. Sharded parameters
    are left alone, as FSDP2 has summed theirs in the backward; BatchError when it has summed none of them.
    """
    parameters = list(parameters)
    sharded = [p for p in parameters if is_sharded(p)]
    if sharded and all(p.grad is None for p in sharded):
        raise BatchError(
            "no gradient has come to the sharded parameters (FSDP2): call backward, and "
            "set_requires_gradient_sync(True) before that of the last micro-batch"
        )
    if world_size(group) == 1:
        return
    for parameter in parameters:
        if is_sharded(parameter):
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM, group=group)
