"""Any module that treats each trajectory on its own: run it again on one trajectory's rows and differentiate that."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_map

from vcpo.score_norms.module_run import ModuleRun
from vcpo.score_norms.parts import Part, PerTrajectory

SAME = {torch.float64: 1e-5, torch.float32: 1e-3}
"""How far the second run may be from the first, relative to its largest output; other dtypes 5e-2. It tells another
function (dropout, a wrong cut, rows that mix) from rounding."""


def generic(run: ModuleRun) -> list[Part]:
    """The module's own parameters, one trajectory at a time.

    ScoreNormError unless the second run gives what the first one gave: then the module is not a function of a
    trajectory's own rows and of its parameters alone.
    """
    for output in run.outputs:
        if output is not None:
            run.rows(output)  # raises unless one can tell whose it is

    def gradients(row: int) -> dict[str, Tensor]:
        grads = [None if g is None else _cut(run, g, row) for g in run.grads]
        if all(g is None or not g.any() for g in grads):
            return {}
        found = zip(run.wanted, _gradients(run, row, grads), strict=True)
        return {name: gradient for name, gradient in found if gradient is not None}

    return [PerTrajectory(run.wanted, run.n, gradients)]


def _gradients(run: ModuleRun, row: int, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    own = {name: run.module.get_parameter(name).detach().requires_grad_() for name in run.wanted}
    args, kwargs = tree_map(lambda leaf: _cut(run, leaf, row), (run.args, run.kwargs))
    device, enabled, dtype = run.autocast
    with torch.enable_grad(), torch.autocast(device, dtype=dtype, enabled=enabled):
        leaves = tree_flatten(functional_call(run.module, own, args, kwargs))[0]
    outputs = [leaves[at] for at in run.output_at]
    for again, first in zip(outputs, run.outputs, strict=True):
        _check_same(run, again, None if first is None else _cut(run, first, row))
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
    if not pairs:
        return (None,) * len(own)
    differentiable, seeds = zip(*pairs, strict=True)
    return torch.autograd.grad(differentiable, list(own.values()), seeds, allow_unused=True)


def _cut(run: ModuleRun, leaf: Any, row: int) -> Any:
    """One trajectory's part of a tensor that has rows; anything else (a mask for all, a number) as it is."""
    if not isinstance(leaf, Tensor) or leaf.ndim == 0:
        return leaf
    if run.packing is not None:
        at = run.packing.tokens[row]
        dimension = run.packing.token_dimension(leaf)
        if dimension is not None:
            return leaf.index_select(dimension, at)
        return leaf[at] if leaf.shape[0] == run.packing.total else leaf
    if run.n == 1:
        return leaf
    if leaf.shape[0] == run.n:
        return leaf[row : row + 1]
    if leaf.shape[0] in run.flattened:
        size = leaf.shape[0] // run.n
        return leaf[row * size : (row + 1) * size]
    return leaf


def _check_same(run: ModuleRun, again: Tensor, first: Tensor | None) -> None:
    if first is None:
        return
    same_kind = again.shape == first.shape and again.dtype == first.dtype
    limit = SAME.get(first.dtype, 5e-2) * float(first.abs().amax()) if first.numel() else 0.0
    if not same_kind or not bool(((again.detach() - first).abs() <= limit + torch.finfo(first.dtype).tiny).all()):
        raise run.error(
            "gives another output when run again on one trajectory alone (dropout, state, or rows that mix)"
        )
