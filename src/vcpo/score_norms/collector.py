"""Sums up, tap by tap, the squared norms of one backward."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from vcpo.errors import ScoreNormError
from vcpo.score_norms.calls import Call
from vcpo.score_norms.chunked_head import ChunkedHead, HeadSlices
from vcpo.score_norms.kernels import LastGram
from vcpo.score_norms.packing import Packing
from vcpo.score_norms.parts import Part
from vcpo.score_norms.rules.embedding import TOKEN_GRADIENTS
from vcpo.score_norms.rules.linear import linear
from vcpo.score_norms.rules.tied import TiedCrossTerm


class Collector:
    """Squared norms of each parameter, [n] fp64, growing while the backward visits the taps."""

    def __init__(
        self,
        calls: Sequence[Call],
        parameters: Iterable[str],
        n: int,
        device: torch.device,
        packing: Packing | None = None,
    ) -> None:
        _check_each_ran_once(calls)
        self.squares = {name: torch.zeros(n, dtype=torch.float64, device=device) for name in parameters}
        self.busy = False
        """A rule is at work, and may run modules again that have hooks."""
        self.recomputing = False
        """The backward has begun to repeat forwards: gradient checkpointing, so nothing large may be kept."""
        self._n = n
        self._packing = packing
        self._last_gram = LastGram()
        self._ties = _tied_pairs(calls)

    def visit(self, call: Call, saved: Sequence[Tensor], grads: tuple[Tensor | None, ...]) -> None:
        """One tap's turn: `saved` as the call put it into the graph, the gradients at its outputs."""
        if all(g is None for g in grads):
            return
        run = call.run(saved, grads, self._n, self._packing, self._last_gram)
        self.busy = True
        try:
            for part in call.owner.rule(run):
                for local, squares in self.take(call, part).items():
                    self._add(call.owner.parameters[local], squares)
            if call in self._ties:
                name, cross = self._ties[call]
                if call.owner.rule is linear:
                    cross.at_head(run)
                else:
                    self._add(name, cross.at_embedding(run))
        finally:
            self.busy = False

    def visit_head(self, call: Call, slices: HeadSlices) -> None:
        """The turn of a head whose logits were never whole."""
        if len(slices.hidden) != self._n:
            raise ScoreNormError(
                f"module '{call.owner.name}' saw {len(slices.hidden)} rows where {self._n} trajectories are scored"
            )
        if call in self._ties:
            self._ties[call][1].at_chunked_head(slices)
        for local, squares in self.take(call, ChunkedHead(slices)).items():
            self._add(call.owner.parameters[local], squares)

    def take(self, call: Call, part: Part) -> dict[str, Tensor]:
        """What is done with a part; here only its squares, by the module's own names."""
        return part.squares()

    def _add(self, name: str, squares: Tensor) -> None:
        self.squares[name] = self.squares[name] + squares.to(self.squares[name].device)


def _check_each_ran_once(calls: Sequence[Call]) -> None:
    for owner, runs in Counter(call.owner for call in calls).items():
        if runs > 1:
            raise ScoreNormError(
                f"module '{owner.name}' ran {runs} times in the recorded forward, so its parameter "
                f"'{next(iter(owner.parameters.values()))}' needs cross terms that are not known: run one forward, or use "
                "'loop'"
            )


def _tied_pairs(calls: Sequence[Call]) -> Mapping[Call, tuple[str, TiedCrossTerm]]:
    """Both calls of each embedding + lm_head that share a table -> (parameter, their cross term)."""
    users: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        for name in call.owner.parameters.values():
            users[name].append(call)
    found: dict[Call, tuple[str, TiedCrossTerm]] = {}
    for name, sharing in users.items():
        if len(sharing) == 1:
            continue
        heads = [c for c in sharing if c.owner.rule is linear and isinstance(c.owner.module, nn.Linear)]
        tables = [c for c in sharing if c.owner.rule in TOKEN_GRADIENTS and c.token_ids is not None]
        if len(sharing) != 2 or len(heads) != 1 or len(tables) != 1:
            where = ", ".join(f"'{c.owner.name}' ({type(c.owner.module).__name__})" for c in sharing)
            raise ScoreNormError(
                f"parameter '{name}' is shared by {where}; only an embedding tied to a linear head is known: use 'loop'"
            )
        ids = tables[0].token_ids
        assert ids is not None
        cross = TiedCrossTerm(tables[0].owner.rule, ids)
        found[heads[0]] = found[tables[0]] = (name, cross)
    return found
