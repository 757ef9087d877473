"""One run of one module, as a rule sees it: what went in, what gradient came back, whose rows are whose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vcpo.errors import ScoreNormError
from vcpo.score_norms.kernels import LastGram
from vcpo.score_norms.packing import Packing
from vcpo.score_norms.parts import Part


@dataclass(frozen=True)
class ModuleRun:
    """One run of a module on n trajectories, with the gradient of sum_i L_i at its outputs. All tensors detached."""

    name: str
    module: nn.Module
    wanted: tuple[str, ...]
    """The module's own parameters to answer for (names inside the module)."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor | None, ...]
    """Differentiable outputs, in order; None where the rule did not ask for them to be kept."""
    output_at: tuple[int, ...]
    """Where they stand among the flattened outputs."""
    grads: tuple[Tensor | None, ...]
    """Gradient at each of `outputs`; None where none came back."""
    n: int
    flattened: frozenset[int] = frozenset()
    """Sizes of a first dimension known to be [n, s] tokens flattened row by row."""
    autocast: tuple[str, bool, torch.dtype] = ("cpu", False, torch.bfloat16)
    """Device type, whether autocast was on in the forward, and its dtype."""
    last_gram: LastGram | None = None
    """Spares x x^T where the next module is fed the same input."""
    packing: Packing | None = None
    """Whose token is whose where the trajectories lie end to end in one row; None: one row each."""

    @property
    def input(self) -> Tensor:
        """The first argument, however it was passed."""
        found = self.args[0] if self.args else next(iter(self.kwargs.values()), None)
        if not isinstance(found, Tensor):
            raise self.error("got no tensor as its first argument")
        return found

    @property
    def grad(self) -> Tensor:
        """Gradient at the only output."""
        found = self.grads[0] if len(self.grads) == 1 else None
        if found is None:
            raise self.error(f"has {len(self.grads)} differentiable outputs where its rule knows one")
        return found

    def rows(self, tensor: Tensor) -> Tensor:
        """The tensor with one leading entry per trajectory, [n, ...]; ScoreNormError when that cannot be told."""
        size = tensor.shape[0] if tensor.ndim else 0
        if self.packing is not None:
            at = self.packing.token_dimension(tensor)
            if at is not None:
                return self.packing.padded(tensor[0].movedim(at - 1, 0))
            if size == self.packing.total and size in self.flattened:
                return self.packing.padded(tensor)
            raise self.error(
                f"works on a tensor of shape {tuple(tensor.shape)}, which does not hold the {self.packing.total} packed tokens"
            )
        if size == self.n:
            return tensor
        if self.n == 1 and tensor.ndim:
            return tensor[None]
        if size in self.flattened:
            return tensor.reshape(self.n, size // self.n, *tensor.shape[1:])
        raise self.error(
            f"works on a tensor of shape {tuple(tensor.shape)}, which does not have the {self.n} trajectories as its "
            "first dimension (broadcast over the batch, or sequence first)"
        )

    def tokens(self, tensor: Tensor) -> Tensor:
        """[n, T, features]: like `rows`, with everything between the first and the last dimension as one."""
        rows = self.rows(tensor)
        return rows.reshape(self.n, -1, rows.shape[-1])

    def error(self, what: str) -> ScoreNormError:
        """A ScoreNormError that names this module."""
        return ScoreNormError(
            f"module '{self.name}' ({type(self.module).__name__}) {what}: no exact score norms, use 'loop'"
        )


Rule = Callable[[ModuleRun], Sequence[Part]]
"""A layer's rule: one run -> what it found out about the wanted parameters, each in one part."""
