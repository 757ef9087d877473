"""Putting the gradient together: coefficients per row, and groups that a micro-batch or a rank has cut.

With c_i = factor_i (R_i - b) the gradient is linear in the group's b. So the rows of a half-finished group go to `.grad`
with its centre in place of b (known beforehand), S = sum_i factor_i grad L_i is kept, and once b is known `.grad`
receives (b - centre) S: the same gradient as if the group had come whole (law 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vcpo.learner.baseline_rule import BaselineRule
from vcpo.learner.open_batch import OpenBatch


@dataclass
class HalfGroup:
    """A group cut by a micro-batch or a rank: S = sum of factor_i grad L_i over its members seen so far."""

    gradients: list[Tensor | None]

    def add(self, parts: Sequence[Tensor | None]) -> None:
        """Accumulate in fp32 or better."""
        for i, part in enumerate(parts):
            if part is None:
                continue
            wide = part if part.dtype == torch.float64 else part.float()
            held = self.gradients[i]
            self.gradients[i] = wide.clone() if held is None else held.add_(wide)

    def release(self, parameters: Sequence[torch.nn.Parameter], coefficient: float) -> None:
        """.grad += coefficient x S."""
        for parameter, held in zip(parameters, self.gradients, strict=True):
            if held is None:
                continue
            update = (coefficient * held).to(parameter.dtype)
            if parameter.grad is None:
                parameter.grad = update
            else:
                parameter.grad.add_(update)


class Assembly:
    """The half-finished groups of one open batch, and the coefficients that its rows get."""

    def __init__(self, rule: BaselineRule, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.rule = rule
        self._parameters = parameters
        self._half_groups: dict[int, HalfGroup] = {}

    def cut(self, open_batch: OpenBatch, at: Tensor) -> Tensor:
        """[m] bool: rows whose baseline is shared with rows outside this micro-batch."""
        shares = open_batch.local("baseline_ids")[at]
        _, inverse, counts = shares.unique(return_inverse=True, return_counts=True)
        return counts[inverse] < open_batch.local("share_sizes")[at]

    def baseline_of(self, open_batch: OpenBatch, at: Tensor) -> Tensor:
        """[m] baselines; right for rows whose groups are whole in this micro-batch, or known beforehand."""
        if open_batch.fixed_baseline is not None:
            return open_batch.fixed_baseline[open_batch.here][at]
        local = open_batch.local
        return self.rule.per_row(
            local("rewards")[at], local("baseline_ids")[at], local("lengths")[at], open_batch.table[at]
        )

    def coefficients(self, open_batch: OpenBatch, at: Tensor, sums: Tensor) -> tuple[Tensor, dict[int, float]]:
        """[m] what multiplies each row's weighted log-prob now, and what to release of half-finished groups afterwards."""
        rewards, factors = open_batch.local("rewards")[at], open_batch.local("factors")[at]
        shares, centres = open_batch.local("baseline_ids")[at], open_batch.local("centres")[at]
        baseline = self.baseline_of(open_batch, at)
        live = factors > 0
        cut = self.cut(open_batch, at) & live if self.rule.optimal else torch.zeros_like(live)
        releases: dict[int, float] = {}
        for share in shares[cut].unique().tolist():
            members = (shares == share) & live
            b = self._close(open_batch, share)
            if b is None:
                self._keep_half(open_batch, share, (factors[members].to(sums.dtype) * sums[members]).sum())
                b = float(centres[members][0])
            else:
                releases[share] = b - float(centres[members][0])
            baseline = torch.where(members, b, baseline)
        coefficients = torch.where(live, factors * (rewards - baseline), 0.0)
        return coefficients, {s: c for s, c in releases.items() if s in self._half_groups}

    def _close(self, open_batch: OpenBatch, share: int) -> float | None:
        """The baseline of a cut group if all its members, on all ranks, have come by now; else None."""
        local = open_batch.local("baseline_ids") == share
        everywhere = open_batch.known.baseline_ids == share
        if int(everywhere.sum()) != int(local.sum()) or not bool(open_batch.seen[local].all()):
            return None
        return self.rule.shared(open_batch.known, everywhere, open_batch.table[local])

    def _keep_half(self, open_batch: OpenBatch, share: int, share_sum: Tensor) -> None:
        """Add this micro-batch's part of S: one more backward, only for groups that a micro-batch has cut."""
        parts = torch.autograd.grad(share_sum, self._parameters, retain_graph=True, allow_unused=True)
        half = self._half_groups.setdefault(share, HalfGroup([None] * len(self._parameters)))
        half.add(parts)

    def finish(self, open_batch: OpenBatch, table: Tensor) -> None:
        """Groups that span ranks: every rank knows all rows' figures by now and releases its own S."""
        for share in list(self._half_groups):
            members = open_batch.known.baseline_ids == share
            b = self.rule.shared(open_batch.known, members, table[members])
            centre = float(open_batch.known.centres[members][0])
            self._half_groups.pop(share).release(self._parameters, b - centre)

    def release(self, releases: dict[int, float]) -> None:
        """.grad += (b - centre) S for groups that this micro-batch has finished; after its backward."""
        for share, coefficient in releases.items():
            self._half_groups.pop(share).release(self._parameters, coefficient)
