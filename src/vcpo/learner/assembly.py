"""Putting the gradient together: coefficients per row, and groups that a micro-batch or a rank has cut.

With c_i = factor_i (R_i - b) the gradient is linear in the group's b. So the rows of a half-finished group go to `.grad`
with its centre in place of b (known beforehand), S = sum_i factor_i grad L_i is kept, and once b is known `.grad`
receives (b - centre) S: the same gradient as if the group had come whole (law 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vcpo.distributed import is_sharded
from vcpo.learner.baseline_rule import BaselineRule
from vcpo.learner.open_batch import OpenBatch
from vcpo.score_norms import GradientSum, ParameterGradients, Share, SinglePass, as_rows


@dataclass(frozen=True)
class Plan:
    """What a single pass is told beforehand: the shares of a micro-batch, by baseline group."""

    shares: dict[int, Share]
    sums: dict[int, GradientSum]
    """Where each share's half that waits for b goes: a half-finished group's own sum where it has one."""


class Assembly:
    """The half-finished groups of one open batch, and the coefficients that its rows get."""

    def __init__(self, rule: BaselineRule, model: nn.Module) -> None:
        self.rule = rule
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._gradients = ParameterGradients(self._parameters)
        self._half_groups: dict[int, GradientSum] = {}
        self.sharded = any(is_sharded(p) for p in self._parameters.values())
        """Whether parameters live in pieces on several ranks (FSDP2)."""

    def cut(self, open_batch: OpenBatch, at: Tensor) -> Tensor:
        """[m] bool: rows that can carry gradient and share their baseline with rows outside this micro-batch."""
        shares = open_batch.local("baseline_ids")[at]
        _, inverse, counts = shares.unique(return_inverse=True, return_counts=True)
        return (counts[inverse] < open_batch.local("share_sizes")[at]) & (open_batch.local("factors")[at] > 0)

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
        cut = self.cut(open_batch, at) if self.rule.optimal else torch.zeros_like(live)
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
        """Add this micro-batch's part of S: one more backward, only for groups that a micro-batch has cut.

        Never reached with sharded parameters, whose backward is collective: such batches are refused beforehand.
        """
        parts = torch.autograd.grad(share_sum, list(self._parameters.values()), retain_graph=True, allow_unused=True)
        half = self._half_groups.setdefault(share, GradientSum(self._parameters))
        half.add(dict(zip(self._parameters, parts, strict=True)))

    def plan(self, open_batch: OpenBatch, at: Tensor, weights: Tensor) -> Plan:
        """The shares of rows `at` for a single pass; weights [m]: what multiplies each row's log-prob.

        As everywhere here `.grad` receives minus the gradient of sum_i c_i weight_i L_i, with the group's centre in
        place of b; S goes without the minus and is released with b - centre.
        """
        local = open_batch.local
        factors = (local("factors")[at] * weights).double()
        direct = torch.where(factors > 0, -factors * (local("rewards")[at] - local("centres")[at]), 0.0)
        groups = local("baseline_ids")[at]
        shares: dict[int, Share] = {}
        sums: dict[int, GradientSum] = {}
        for group in groups.unique().tolist():
            rows = as_rows((groups == group).nonzero().flatten())
            sums[group] = self._half_groups.get(group) or GradientSum(self._parameters)
            shares[group] = Share(rows, direct[rows], factors[rows], self._gradients.slot, sums[group].slot)
        return Plan(shares, sums)

    def settle(self, open_batch: OpenBatch, at: Tensor, plan: Plan, found: SinglePass) -> None:
        """After the single pass, with the rows' norms recorded: what waited for b goes to `.grad`, or waits on."""
        cut = self.cut(open_batch, at)
        baselines = self.baseline_of(open_batch, at)
        live = open_batch.local("factors")[at] > 0
        coefficients = torch.zeros(len(at), dtype=torch.float64, device=at.device)
        for group, share in list(plan.shares.items()):
            coefficients[share.rows] = share.direct
            members = live[share.rows]
            if not bool(members.any()):
                continue
            centre = float(open_batch.local("centres")[at][share.rows][members][0])
            if not bool(cut[share.rows].any()):
                b = float(baselines[share.rows][members][0])
                coefficients[share.rows] += (b - centre) * share.beta
                plan.sums.pop(group).add_to(self._gradients, b - centre)
                continue
            self._half_groups[group] = plan.sums[group]
            found.combine(share.rows, share.beta, plan.sums[group].slot)
            closed = self._close(open_batch, group)
            if closed is not None:
                self._half_groups.pop(group).add_to(self._gradients, closed - centre)
        found.use_up(coefficients, self._gradients.slot)

    def finish(self, open_batch: OpenBatch, table: Tensor) -> None:
        """Groups that span ranks: every rank knows all rows' figures by now and releases its own S."""
        for group in list(self._half_groups):
            members = open_batch.known.baseline_ids == group
            b = self.rule.shared(open_batch.known, members, table[members])
            centre = float(open_batch.known.centres[members][0])
            self._half_groups.pop(group).add_to(self._gradients, b - centre)
        self._gradients.flush()

    def release(self, releases: dict[int, float]) -> None:
        """.grad += (b - centre) S for groups that this micro-batch has finished; after its backward."""
        for group, coefficient in releases.items():
            self._half_groups.pop(group).add_to(self._gradients, coefficient)
