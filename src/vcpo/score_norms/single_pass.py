"""Norms and gradient in one backward: the part of the gradient that waits for the coefficients waits in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from vcpo.score_norms.calls import Call
from vcpo.score_norms.collector import Collector
from vcpo.score_norms.parts import Part, Rows, Share


class SinglePass(Collector):
    """Collects squares like its base; of each part keeps what is cheap to keep, and adds up the rest share by share.

    Afterwards the gradient sum_i c_i grad L_i with c_i = direct_i + b beta_i (b: one number per share) is
    `combine(rows, c)` for what was kept, plus b x the share's `shared` sum for what was not; its `direct` half is in
    `gradients` already.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.shares: Sequence[Share] = ()
        self._retained: list[tuple[Call, Part]] = []

    def take(self, call: Call, part: Part) -> dict[str, Tensor]:
        """Keep the part, or have it add to every share's two sums."""
        if not self.recomputing and part.should_retain(len(self.shares)):
            self._retained.append((call, part))
            return part.squares()
        return part.fused([_by_local_name(share, call) for share in self.shares])

    def combine(self, rows: Rows, coefficients: Tensor, into: Callable[[str], Tensor]) -> None:
        """into(name) += sum over m rows of coefficients [m] x grad L_i, for the parts that were kept."""
        for call, part in self._retained:
            part.add_combined(rows, coefficients, _named(into, call))

    def use_up(self, coefficients: Tensor, into: Callable[[str], Tensor]) -> None:
        """`combine` for all n rows, for the last time: each part is let go of before the next one's gradient is made."""
        everyone = slice(0, self._n)
        while self._retained:
            call, part = self._retained.pop()
            part.add_combined(everyone, coefficients, _named(into, call))


def _by_local_name(share: Share, call: Call) -> Share:
    return replace(share, gradients=_named(share.gradients, call), shared=_named(share.shared, call))


def _named(slot: Callable[[str], Tensor], call: Call) -> Callable[[str], Tensor]:
    """The same slots, asked for by the module's own names."""
    return lambda local: slot(call.owner.parameters[local])
