"""Taps: per-trajectory squared gradient norms from one backward over the activations of a whole batch.

A forward hook puts an identity function (a "tap") on the outputs of every module that owns trainable parameters, with
a dummy anchor as a second input. Differentiating the score with respect to the anchor makes autograd visit every tap
and compute no weight gradient. At its visit a tap holds the module's inputs and the gradient at its outputs, from
which a rule (rules/) gets || grad_W L_i ||^2 of every trajectory i: trajectories never mix inside a batch, so seeding
sum_i L_i serves them all.

Afterwards the taps are mute: an ordinary backward passes through them as through nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from vcpo.errors import ScoreNormError
from vcpo.score_norms.audit import check_every_use_is_tapped
from vcpo.score_norms.calls import Call, Owner, owners_of, record_call, stand_in_call
from vcpo.score_norms.chunked_head import HeadSlices
from vcpo.score_norms.collector import Collector
from vcpo.score_norms.packing import Packing
from vcpo.score_norms.parts import Share
from vcpo.score_norms.scoring import trainable_parameters
from vcpo.score_norms.single_pass import SinglePass

C = TypeVar("C", bound=Collector)

_ARMED: WeakKeyDictionary[nn.Module, Taps] = WeakKeyDictionary()
"""Which taps record the forward that a module takes part in, for functions that stand in for the module's own."""


def armed_taps(module: nn.Module) -> Taps | None:
    """The taps that record now and include this module."""
    return _ARMED.get(module)


class Taps:
    """Taps on a model. `arm()`, one forward, `squared_norms(...)`, any backward, `release()`; or as a context:

        with Taps(model) as taps:
            logprobs = ...                          # one forward; [n], with graph
            squares = taps.squared_norms(logprobs)  # parameter name -> [n] fp64
            loss.backward()                         # as if there were no taps

    Between `arm` and `release` the hooks stay on the model: gradient checkpointing (non-reentrant) repeats forwards
    inside the backward and must find the same graph again.
    """

    def __init__(self, model: nn.Module) -> None:
        _refuse_compiled(model)
        self.model = model
        self.parameters = trainable_parameters(model)
        """Name -> parameter, those the norms are taken over."""
        self._owners = owners_of(model, self.parameters)
        self._handles: list[RemovableHandle] = []
        self._calls: dict[Node, Call] = {}
        self._without_graph: set[Owner] = set()
        self._recording = False
        self._collector: Collector | None = None
        self._segments: Tensor | None = None
        self._anchor = torch.zeros((), requires_grad=True)

    def __enter__(self) -> Taps:
        self.arm()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def arm(self, segments: Tensor | None = None) -> None:
        """Record the next forward. What an earlier one left is forgotten.

        segments: [1, total] int64 where trajectories are packed end to end in one row: whose token each is, -1 for
        padding. Without it every row of the forward is one trajectory.
        """
        self.release()
        self._recording = True
        self._segments = segments
        for owner in self._owners:
            hook = self._hook(owner)
            # First in the queue: the tap must see what the module itself returned, not what another hook made of it.
            self._handles.append(owner.module.register_forward_hook(hook, prepend=True, with_kwargs=True))
            _ARMED[owner.module] = self

    def mute(self) -> None:
        """Record no further forward; the one that was recorded stays available."""
        self._recording = False
        for owner in self._owners:
            _ARMED.pop(owner.module, None)

    def release(self) -> None:
        """Take the hooks off the model and forget the forward."""
        self.mute()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._calls.clear()
        self._without_graph.clear()

    def squared_norms(self, trajectory_logprobs: Tensor, *, retain_graph: bool = True) -> dict[str, Tensor]:
        """|| grad_p L_i ||^2 for each trainable parameter p: name -> [n] fp64, where L = trajectory_logprobs [n], with graph.

        L_i must depend on row i of the recorded forward alone. The taps are mute afterwards; with `retain_graph` an
        ordinary backward can follow. ScoreNormError, naming the module or parameter, when something in the model has
        no exact rule.
        """
        collector = self._collector_for(Collector, trajectory_logprobs)
        self._visit(collector, trajectory_logprobs, retain_graph)
        return collector.squares

    def single_pass(
        self, trajectory_logprobs: Tensor, shares: Sequence[Share], *, retain_graph: bool = False
    ) -> SinglePass:
        """The norms and, in the same backward, what the gradient needs: see SinglePass. No parameter's own autograd
        gradient is computed, so neither hooks nor reducers on gradients run.

        shares: every trajectory in one of them. ScoreNormError as for `squared_norms`.
        """
        found = self._collector_for(SinglePass, trajectory_logprobs)
        found.shares = shares
        self._visit(found, trajectory_logprobs, retain_graph)
        return found

    def _collector_for(self, kind: type[C], trajectory_logprobs: Tensor) -> C:
        self.mute()
        if trajectory_logprobs.ndim != 1 or not trajectory_logprobs.requires_grad:
            raise ValueError(
                f"trajectory_logprobs must be [n] with a graph, got shape {tuple(trajectory_logprobs.shape)}, "
                f"requires_grad={trajectory_logprobs.requires_grad}"
            )
        self._check_recorded()
        root = get_gradient_edge(trajectory_logprobs).node
        check_every_use_is_tapped([root], self._calls, {**self.parameters, **self._stand_ins()})
        n, device = len(trajectory_logprobs), trajectory_logprobs.device
        packing = None if self._segments is None else Packing(self._segments, n)
        return kind(list(self._calls.values()), self.parameters, n, device, packing)

    def _stand_ins(self) -> dict[str, nn.Parameter]:
        """Under FSDP2 the forward used whole copies of the parameters; each goes by the name of what it was made of."""
        return {
            name: copy
            for call in self._calls.values()
            for name, copy in call.used.items()
            if copy is not self.parameters[name]
        }

    def _visit(self, collector: Collector, trajectory_logprobs: Tensor, retain_graph: bool) -> None:
        self._collector = collector
        try:
            torch.autograd.grad(trajectory_logprobs.sum(), [self._anchor], retain_graph=retain_graph, allow_unused=True)
        finally:
            self._collector = None

    def _hook(self, owner: Owner) -> Callable[..., Any]:
        def tap(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if self._collector is not None and self._collector.busy:
                return None  # a rule runs the module again
            if self._collector is not None:
                self._collector.recomputing = True
            leaves, spec = tree_flatten(output)
            at = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad)
            if self._recording and not torch.is_grad_enabled():
                self._without_graph.add(owner)
            if not at or not torch.is_grad_enabled():
                return None
            outputs = [leaves[i] for i in at]
            call = record_call(owner, args, kwargs, outputs, at)
            tapped = _Tap.apply(self, call, self._anchor, *outputs)
            if self._recording:
                self._calls[tapped[0].grad_fn] = call
            for i, leaf in zip(at, tapped, strict=True):
                leaves[i] = leaf
            return tree_unflatten(leaves, spec)

        return tap

    def chunked_head(
        self, head: nn.Module, hidden: Tensor, run: Callable[[Callable[[HeadSlices], bool], Tensor], Tensor]
    ) -> Tensor:
        """Record log-probs made by chunked_head.py in place of the head's own forward."""
        if self._segments is not None:
            raise ScoreNormError("chunked log-probs do not go with packed rows: pad them, or take the logits whole")
        owner = next(owner for owner in self._owners if owner.module is head)
        call = stand_in_call(owner, hidden)

        def visit(slices: HeadSlices) -> bool:
            if self._collector is not None:
                self._collector.visit_head(call, slices)
            return self._collector is not None

        taken = run(visit, self._anchor)
        self._calls[get_gradient_edge(taken).node] = call
        return taken

    def _check_recorded(self) -> None:
        if not self._calls:
            raise ScoreNormError(
                "no forward was recorded: run the model between arm() and squared_norms(), with gradients"
            )
        for owner in self._without_graph - {call.owner for call in self._calls.values()}:
            raise ScoreNormError(
                f"module '{owner.name}' ran without gradients (no_grad, or reentrant checkpointing: use_reentrant=False "
                "works), so its share of the score norms is unknown"
            )


def norms_from_squares(squares: Mapping[str, Tensor]) -> Tensor:
    """The score norms over all parameters: name -> [n] squares, as `Taps.squared_norms` gives them -> [n] fp64."""
    return torch.stack(list(squares.values())).sum(0).sqrt()


def _refuse_compiled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise ScoreNormError(
                f"module '{name or type(module).__name__}' is compiled, so its layers cannot be tapped: no exact score norms; "
                "pass the model before torch.compile, or use 'logit'"
            )


class _Tap(torch.autograd.Function):
    """Identity; in a backward while the taps collect, the place where a rule sees a module's inputs and gradients."""

    @staticmethod
    def forward(ctx: Any, taps: Taps, call: Call, anchor: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.taps, ctx.call = taps, call
        ctx.set_materialize_grads(False)
        # Saved in the graph, not in the call: checkpointing then drops and recomputes them like any activation.
        saved, call.saved = call.saved, ()
        ctx.save_for_backward(*saved)
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        collector = ctx.taps._collector
        if collector is not None:
            collector.visit(ctx.call, ctx.saved_tensors, grads)
        return (None, None, None, *grads)
