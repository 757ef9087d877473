"""The lag rule: which batch may be taken, and how many groups may be dispatched, so that no token grows too old.

With G groups per batch and bound k, the batch of update v is taken oldest version first. What stays outstanding (in
flight or queued) still has to be trained in time: a group that started at version u must go into an update <= u + k,
and the updates v+1 .. u+k hold G (u + k - v) groups. So a batch may be taken only if, for every u <= v, at most
G (u + k - v) groups that started at version <= u stay behind.

Bounding the number of outstanding groups alone does not bound the lag: a slow group can be overtaken without end.

Admission keeps the rule satisfiable: at most G (k + 1) groups are outstanding while the learner waits for a batch and
at most G k while it updates. If the rule held for the last batch, then once everything in flight has completed, it
holds for the next: N groups at version <= u become max(0, N - G), and G (u + k - v) grew smaller by just G.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vcpo.buffer.ledger import Entry

LAG_BOUND = "lag_bound"
"""The reason under which groups given up by the lag rule are counted."""


@dataclass(frozen=True, slots=True)
class LagRule:
    """The rule for G = `groups_per_batch` and k = `max_policy_lag`."""

    groups_per_batch: int
    max_policy_lag: int

    def __post_init__(self) -> None:
        if self.groups_per_batch < 1:
            raise ValueError(f"groups_per_batch must be at least 1, got {self.groups_per_batch}")
        if self.max_policy_lag < 0:
            raise ValueError(f"max_policy_lag must be 0 or more, got {self.max_policy_lag}")

    def limit(self, *, training: bool) -> int:
        """How many groups may be outstanding: G (k + 1) while the learner waits for a batch, G k while it updates."""
        return self.groups_per_batch * (self.max_policy_lag + (0 if training else 1))

    def oldest(self, queued: Sequence[Entry]) -> list[Entry]:
        """The batch: the G entries of the oldest versions; among equals those dispatched first."""
        return sorted(queued, key=lambda e: (e.version, e.group_id))[: self.groups_per_batch]

    def too_late(self, staying: Sequence[Entry], version: int) -> list[Entry]:
        """Of the groups that stay behind update `version`, the oldest that must go for the rest to keep the bound.

        Sorted by version, the i-th (from 1) of those that remain needs i <= G (u + k - version), u its own version: the
        rule, asked only where its left side changes. Among equals, work in flight goes before finished work.
        """
        remaining: list[Entry] = []
        late: list[Entry] = []
        for entry in sorted(staying, key=lambda e: (e.version, e.state == "queued", e.group_id)):
            remaining.append(entry)
            if len(remaining) > self.groups_per_batch * (entry.version + self.max_policy_lag - version):
                late.append(remaining.pop(0))
        return late
