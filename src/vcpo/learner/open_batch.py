"""One optimizer batch while it is being put together: what is known beforehand, and what each row turned out to be.

Everything that depends on rewards, groups and lengths alone is fixed when the batch is announced, over all micro-batches
and ranks; so coefficients can be divided by the size of the whole batch before its second row was seen (law 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vcpo import core
from vcpo.distributed import ProcessGroup, gather_rows
from vcpo.errors import BatchError

COLUMNS = (
    "log_weight",
    "score_norm",
    "weighted_logprob",
    "log_ratio_abs_sum",
    "kl_k1_sum",
    "kl_k3_sum",
    "token_log_m1",
    "token_log_m2",
    "treated_weight",
    "sampler_logprob_sum",
)
"""What is recorded of each row, in fp64 (log_weight, score_norm: method.md; weighted_logprob: sum_t w^_t log pi_t)."""


@dataclass(frozen=True)
class Announced:
    """Facts of the whole optimizer batch, over all ranks; every tensor [B] in fp64 or int64, in rank order."""

    rewards: Tensor
    group_ids: Tensor
    baseline_ids: Tensor
    """What a baseline is shared by: the group, or the whole batch."""
    lengths: Tensor
    policy_lags: Tensor
    """-1 where unknown."""
    factors: Tensor
    """1 / (std x denominator of the aggregation); 0 for rows that cannot carry gradient: coefficient = factor (R - b)."""
    scales: Tensor
    """The std that advantages are divided by."""
    centres: Tensor
    """Mean reward of the row's baseline group: the origin of rewards in half-finished groups, against cancellation."""
    share_sizes: Tensor
    """Rows that share this row's baseline."""
    zero_variance: Tensor
    unscorable: Tensor

    @property
    def size(self) -> int:
        """B: every trajectory, quarantined, empty and unscorable ones too."""
        return len(self.rewards)

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


def announce(
    rewards: Tensor,
    group_ids: Tensor,
    lengths: Tensor,
    policy_lags: Tensor | None,
    *,
    scope: str,
    scale_rewards: str,
    std_eps: float,
    aggregation: str,
    constant_length: int | None,
    process_group: ProcessGroup | None,
) -> tuple[Announced, int]:
    """Gather this rank's rows with all others' and fix what depends on them; also where this rank's rows begin."""
    lags = policy_lags if policy_lags is not None else torch.full_like(lengths, -1)
    # Two trips: int64 group ids do not survive fp64 beyond 2^53.
    integers, offset = gather_rows(torch.stack([group_ids.long(), lengths.long(), lags.long()], 1), process_group)
    r, _ = gather_rows(rewards.double(), process_group)
    ids, n_actions = integers[:, 0], integers[:, 1]
    shares = ids if scope == "group" else torch.zeros_like(ids)
    unscorable = ~r.isfinite()
    r = torch.where(unscorable, torch.nan, r)
    scales = core.group_scale(r, ids, scale_rewards=scale_rewards, std_eps=std_eps).double()
    flat = core.zero_variance(r, shares)
    _, inverse, counts = shares.unique(return_inverse=True, return_counts=True)
    spread = core.aggregation_factors(n_actions, aggregation=aggregation, length=constant_length)
    dead = unscorable | flat | (n_actions == 0)
    factors = torch.where(dead, 0.0, spread / scales)
    centres = core.group_mean(r, shares).nan_to_num(0.0)
    known = Announced(
        rewards=r,
        group_ids=ids,
        baseline_ids=shares,
        lengths=n_actions,
        policy_lags=integers[:, 2],
        factors=factors,
        scales=scales,
        centres=centres,
        share_sizes=counts[inverse],
        zero_variance=flat,
        unscorable=unscorable,
    )
    return known, offset


class OpenBatch:
    """This rank's part of an announced batch: which rows came, what was recorded of them, which groups are half-finished."""

    def __init__(self, known: Announced, offset: int, size: int, fixed_baseline: Tensor | None) -> None:
        self.known = known
        self.fixed_baseline = fixed_baseline
        self.here = slice(offset, offset + size)
        self.size = size
        self.seen = torch.zeros(size, dtype=torch.bool, device=known.rewards.device)
        self.table = torch.full((size, len(COLUMNS)), torch.nan, dtype=torch.float64, device=known.rewards.device)
        self.extra_loss = 0.0

    def local(self, name: str) -> Tensor:
        """This rank's slice of an announced column, [size]."""
        return getattr(self.known, name)[self.here]

    def enter(self, rows: Tensor | Sequence[int], count: int) -> Tensor:
        """Mark rows as seen; BatchError names a row that is out of range or came twice."""
        at = torch.as_tensor(rows, device=self.seen.device)
        if at.dtype == torch.bool:
            at = at.nonzero().flatten()
        at = at.long()
        if at.ndim != 1 or len(at) != count:
            raise BatchError(
                f"rows must name one row of the batch per trajectory given: {count} given, rows has shape {tuple(at.shape)}"
            )
        if len(at) and (int(at.min()) < 0 or int(at.max()) >= self.size):
            raise BatchError(
                f"rows must be indices in [0, {self.size}) into the rewards given to vc.batch, got {at.tolist()}"
            )
        again = at[self.seen[at]].tolist()
        if again or len(at.unique()) != len(at):
            raise BatchError(
                f"rows of the optimizer batch came twice: {again or at.tolist()}; give each row to one micro-batch"
            )
        self.seen[at] = True
        return at

    def missing(self) -> list[int]:
        """Rows announced but never given."""
        return (~self.seen).nonzero().flatten().tolist()

    def record(self, rows: Tensor, values: dict[str, Tensor]) -> None:
        """Keep this micro-batch's figures."""
        for name, value in values.items():
            self.table[rows, COLUMNS.index(name)] = value.double()

    def recorded(self, name: str) -> Tensor:
        """One column of this rank's table, [size]; NaN where a row has not come yet."""
        return self.table[:, COLUMNS.index(name)]
