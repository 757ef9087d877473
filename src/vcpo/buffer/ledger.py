"""The ledger: where every dispatched group is, at every moment. Not thread-safe; RolloutBuffer holds the lock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from vcpo.types import TrajectoryGroup

State = Literal["in_flight", "queued", "taken"]


@dataclass(frozen=True, slots=True)
class BufferCounts:
    """Where every dispatched group is: `dispatched` equals the sum of all the others."""

    dispatched: int
    in_flight: int
    queued: int
    taken: int
    """In the batch that the learner is training now."""
    trained: int
    dropped: Mapping[str, int]
    """Reason -> groups."""

    @property
    def dropped_total(self) -> int:
        """Groups dropped for any reason."""
        return sum(self.dropped.values())


@dataclass(frozen=True, slots=True)
class TakenBatch:
    """The groups of one update, in the order of their ids, and what the learner waited for, in seconds."""

    groups: tuple[TrajectoryGroup, ...]
    batch_wait_s: float
    """Fewer than a batch of groups were ready."""
    bound_wait_s: float
    """A batch was ready, but taking it would have left slow groups behind that break the lag bound."""


@dataclass(slots=True)
class Entry:
    """A group that is neither trained nor dropped yet."""

    group_id: int
    version: int
    """The oldest version any of its tokens can have: that of its dispatch until its sampler says which one it used."""
    state: State = "in_flight"
    started: bool = False
    group: TrajectoryGroup | None = None
    """The scored trajectories, from `queued` on."""


class Ledger:
    """Open groups by id, and how many have left. `dispatched` is counted apart, so that a loss shows."""

    def __init__(self) -> None:
        self._open: dict[int, Entry] = {}
        self._in_state: Counter[State] = Counter()
        self.dispatched, self.trained = 0, 0
        self.dropped: Counter[str] = Counter()
        self.last_id = -1

    def dispatch(self, group_id: int, version: int) -> None:
        """Open a group; ids rise, so that late news of a group that has left can be told from nonsense."""
        if group_id <= self.last_id:
            raise ValueError(f"group ids must rise: {group_id} dispatched after {self.last_id}")
        self._open[group_id] = Entry(group_id, version)
        self._in_state["in_flight"] += 1
        self.last_id, self.dispatched = group_id, self.dispatched + 1

    def find(self, group_id: int) -> Entry | None:
        """The entry of an open group; None for one that has left."""
        if group_id > self.last_id:
            raise ValueError(f"group {group_id} was never dispatched; the newest is {self.last_id}")
        return self._open.get(group_id)

    def in_flight(self, group_id: int) -> Entry | None:
        """The entry of a group in flight; None for one that has completed or left."""
        entry = self.find(group_id)
        return entry if entry is not None and entry.state == "in_flight" else None

    def move(self, entry: Entry, state: State) -> None:
        """Change the state of an open group."""
        self._in_state[entry.state] -= 1
        self._in_state[state] += 1
        entry.state = state

    def drop(self, entry: Entry, reason: str) -> None:
        """Close a group that will not be trained."""
        self._close(entry)
        self.dropped[reason] += 1

    def train(self, entry: Entry) -> None:
        """Close a group that was trained."""
        self._close(entry)
        self.trained += 1

    def count(self, state: State) -> int:
        """How many groups are in this state."""
        return self._in_state[state]

    @property
    def outstanding(self) -> int:
        """Groups in flight or queued."""
        return self._in_state["in_flight"] + self._in_state["queued"]

    def entries(self, *states: State) -> Sequence[Entry]:
        """The open groups in any of these states, in the order of their dispatch."""
        return [e for e in self._open.values() if e.state in states]

    def counts(self) -> BufferCounts:
        """All counts at this moment, the open ones counted entry by entry."""
        states = Counter(e.state for e in self._open.values())
        return BufferCounts(
            dispatched=self.dispatched,
            in_flight=states["in_flight"],
            queued=states["queued"],
            taken=states["taken"],
            trained=self.trained,
            dropped=dict(self.dropped),
        )

    def check(self) -> None:
        """Assert that no group was lost or counted twice."""
        c = self.counts()
        total = c.in_flight + c.queued + c.taken + c.trained + c.dropped_total
        assert c.dispatched == total, f"groups are not conserved: {c}"
        kept = {s: n for s, n in self._in_state.items() if n}
        assert kept == Counter(e.state for e in self._open.values()), f"state counters {kept} disagree with {c}"

    def _close(self, entry: Entry) -> None:
        del self._open[entry.group_id]
        self._in_state[entry.state] -= 1
