"""What the forward leaves behind for each module that owns trainable parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from vcpo.errors import ScoreNormError
from vcpo.score_norms.kernels import LastGram
from vcpo.score_norms.module_run import ModuleRun, Rule
from vcpo.score_norms.packing import Packing
from vcpo.score_norms.rules import generic, rule_for


@dataclass(frozen=True, eq=False)
class Owner:
    """A module with trainable parameters of its own (not its children's)."""

    name: str
    module: nn.Module
    parameters: dict[str, str]
    """Name inside the module -> name in the model; a shared parameter has the same name in the model everywhere."""
    rule: Rule


def owners_of(model: nn.Module, parameters: dict[str, nn.Parameter]) -> list[Owner]:
    """Every module that owns some of `parameters` (name in the model -> parameter), each module once."""
    names = {id(p): name for name, p in parameters.items()}
    owners = []
    for path, module in model.named_modules():
        own = {local: names[id(p)] for local, p in module._parameters.items() if id(p) in names}
        if len(set(own.values())) < len(own):
            raise ScoreNormError(
                f"module '{path}' uses one parameter under two names ({', '.join(own)}): no exact score norms, use 'loop'"
            )
        if own:
            owners.append(Owner(path or type(module).__name__, module, own, rule_for(module)))
    return owners


@dataclass(eq=False)
class Call:
    """One run of a module in the forward. Tensors that the rule will want travel with the autograd graph, not here."""

    owner: Owner
    saved: tuple[Tensor, ...]
    """Detached inputs and, for the generic rule, outputs; the tap moves them into the graph."""
    template: list[Any]
    """Flattened arguments, tensors taken out."""
    spec: TreeSpec
    tensor_at: tuple[int, ...]
    output_at: tuple[int, ...]
    views: frozenset[tuple[int, int]]
    """(n, N) of inputs of first dimension N that are a view of [n, s, ...] with n s = N."""
    autocast: tuple[str, bool, torch.dtype]
    token_ids: Tensor | None
    """First argument where it holds integers: what a tied head needs before the embedding's turn."""
    used: dict[str, nn.Parameter] = field(default_factory=dict)
    """Name in the model -> the parameter that the module held when it ran (FSDP2 puts whole copies there)."""
    input_nodes: list[Node] = field(default_factory=list)
    output_nodes: list[Node] = field(default_factory=list)

    def run(
        self,
        saved: Sequence[Tensor],
        grads: tuple[Tensor | None, ...],
        n: int,
        packing: Packing | None,
        last_gram: LastGram | None = None,
    ) -> ModuleRun:
        """What the rule sees, from the tensors that came back out of the graph."""
        leaves = list(self.template)
        for at, tensor in zip(self.tensor_at, saved, strict=False):
            leaves[at] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        kept = saved[len(self.tensor_at) :]
        return ModuleRun(
            name=self.owner.name,
            module=self.owner.module,
            wanted=tuple(self.owner.parameters),
            args=args,
            kwargs=kwargs,
            outputs=tuple(kept) if kept else (None,) * len(grads),
            output_at=self.output_at,
            grads=grads,
            n=n,
            flattened=frozenset(size for rows, size in self.views if rows == (n if packing is None else 1)),
            autocast=self.autocast,
            packing=packing,
            last_gram=last_gram,
        )


def record_call(
    owner: Owner, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor], output_at: tuple[int, ...]
) -> Call:
    """Describe one run; every tensor is detached, so that what is computed from it carries no history."""
    leaves, spec = tree_flatten((args, kwargs))
    tensor_at = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    inputs = [leaves[i] for i in tensor_at]
    kept = [*inputs, *outputs] if owner.rule is generic else inputs
    first = inputs[0] if inputs else None
    device = outputs[0].device.type
    return Call(
        owner=owner,
        saved=tuple(detached(t) for t in kept),
        template=[None if isinstance(leaf, Tensor) else leaf for leaf in leaves],
        spec=spec,
        tensor_at=tensor_at,
        output_at=output_at,
        views=frozenset(v for t in inputs if (v := _flattened_from(t)) is not None),
        autocast=(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),
        token_ids=first if first is not None and not first.is_floating_point() else None,
        used={name: owner.module.get_parameter(local) for local, name in owner.parameters.items()},
        input_nodes=[get_gradient_edge(t).node for t in inputs if t.requires_grad],
        output_nodes=[get_gradient_edge(t).node for t in outputs],
    )


def stand_in_call(owner: Owner, hidden: Tensor) -> Call:
    """A run of a linear head by a function that never makes its output: the rule is not asked, the graph is walked."""
    return Call(
        owner=owner,
        saved=(),
        template=[],
        spec=tree_flatten(((), {}))[1],
        tensor_at=(),
        output_at=(),
        views=frozenset(),
        autocast=(hidden.device.type, False, torch.bfloat16),
        token_ids=None,
        input_nodes=[get_gradient_edge(hidden).node] if hidden.requires_grad else [],
    )


def detached(tensor: Tensor) -> Tensor:
    """The same values without history: norms, and baselines made of them, must not carry gradient."""
    return tensor.detach()


def _flattened_from(tensor: Tensor) -> tuple[int, int] | None:
    """(n, N) when the tensor is [N, ...], made by a view or reshape from [n, s, ...] with n s = N."""
    source = getattr(tensor.grad_fn, "_saved_self_sym_sizes", None)
    if source is None or tensor.ndim < 2 or len(source) < 2 or source[0] * source[1] != tensor.shape[0]:
        return None
    return int(source[0]), int(tensor.shape[0])
