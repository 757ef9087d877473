"""Which baseline a batch uses, from recorded figures: per row where a group is whole, one number where it was cut."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vcpo import core
from vcpo.core.masking import masked_sum
from vcpo.learner.open_batch import COLUMNS, Announced


@dataclass(frozen=True)
class BaselineRule:
    """`name` and `weights` as in VarianceControl; `by_length`: the loss divides a trajectory by its own length."""

    name: str
    weights: str
    cap: float
    by_length: bool

    @property
    def optimal(self) -> bool:
        """Whether weights and score norms are part of it; else rewards alone decide, before the first forward."""
        return self.name == "optimal"

    def log_v(self, table: Tensor, lengths: Tensor) -> Tensor:
        """log v_i = 2 log a_i + 2 log s_i, [n]; -inf for rows without weight. table: [n, columns], lengths [n]."""
        log_w, s = table[:, COLUMNS.index("log_weight")], table[:, COLUMNS.index("score_norm")]
        if self.weights == "estimator":
            # a_i is whatever the loss really multiplies the row by, so it is read off what was applied.
            log_applied = table[:, COLUMNS.index("treated_weight")].log()
            log_applied = torch.where(core.quarantined(log_w), torch.nan, log_applied)
            return core.log_baseline_weights(
                log_applied, s, weights="paper", lengths=lengths if self.by_length else None
            )
        return core.log_baseline_weights(log_w, s, weights=self.weights, cap=self.cap, lengths=None)

    def per_row(self, rewards: Tensor, shares: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        """[n] baselines; right for rows all of whose group is among these."""
        if self.optimal:
            return core.weighted_baseline(rewards, self.log_v(table, lengths), shares)
        return core.baselines[self.name](rewards, shares, lengths=lengths)

    def shared(self, known: Announced, members: Tensor, table: Tensor) -> float:
        """sum v R / sum v over one complete group; its centre when no member carries weight (its gradient is 0 then)."""
        log_v = self.log_v(table, known.lengths[members])
        log_v = torch.where(known.unscorable[members], -torch.inf, log_v)
        carries = log_v > -torch.inf
        if not bool(carries.any()):
            return float(known.centres[members][0])
        return float(masked_sum(log_v.softmax(0) * known.rewards[members], carries))
