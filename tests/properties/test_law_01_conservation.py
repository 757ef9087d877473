"""Law 1: groups dispatched = trained + dropped (with a counted reason) + queued + in flight, at every moment."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vcpo.buffer import RolloutBuffer
from vcpo.types import Prompt, Trajectory, TrajectoryGroup


def group(group_id: int, version: int) -> TrajectoryGroup:
    token = Trajectory(0, (7,), (-0.5,), (version,), "stop", reward=1.0)
    return TrajectoryGroup(group_id, Prompt(f"p/{group_id}", "x"), (1,), (token,), completed_version=version)


class AnyOrderOfEvents(RuleBasedStateMachine):
    """Every event a run can produce, in any order; a plain model that writes down where each group must be."""

    @initialize(g=st.integers(1, 4), k=st.integers(0, 3), on_bound=st.sampled_from(["wait", "drop"]), data=st.data())
    def begin(self, g, k, on_bound, data):
        total = data.draw(st.none() | st.integers(1, 30))
        self.g, self.k, self.total = g, k, total
        self.buffer = RolloutBuffer(g, k, on_bound, clock=lambda: 0.0, total_groups=total)
        self.version = 0
        self.in_flight: dict[int, int] = {}
        self.queued: dict[int, int] = {}
        self.taken: list[int] = []
        self.trained: list[int] = []
        self.dropped: Counter[str] = Counter()
        self.next_id = 0
        self.buffer.published(0)

    @precondition(lambda self: self.buffer.admissible() > 0)
    @rule(data=st.data())
    def dispatch(self, data):
        count = data.draw(st.integers(1, self.buffer.admissible()))
        ids = list(range(self.next_id, self.next_id + count))
        self.buffer.dispatched(ids)
        self.in_flight |= dict.fromkeys(ids, self.version)
        self.next_id += count

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def start(self, data):
        which = data.draw(st.sampled_from(sorted(self.in_flight)))
        self.in_flight[which] = data.draw(st.integers(self.in_flight[which], self.version))
        self.buffer.started(which, self.in_flight[which])

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def lose_its_sampler(self, data):
        which = data.draw(st.sampled_from(sorted(self.in_flight)))
        self.in_flight[which] = self.version
        self.buffer.redispatched(which, self.version)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def complete(self, data):
        which = data.draw(st.sampled_from(sorted(self.in_flight)))
        self.queued[which] = self.in_flight.pop(which)
        assert self.buffer.completed(group(which, self.queued[which]))

    @precondition(lambda self: self.in_flight or self.queued)
    @rule(data=st.data(), reason=st.sampled_from(["lone_survivor", "failed"]))
    def drop(self, data, reason):
        which = data.draw(st.sampled_from(sorted(self.in_flight | self.queued)))
        self.in_flight.pop(which, None)
        self.queued.pop(which, None)
        self.dropped[reason] += 1
        assert self.buffer.drop(which, reason)

    @precondition(lambda self: not self.taken)
    @rule()
    def take(self):
        batch = self.buffer.try_take(self.version)
        if batch is not None:
            self.taken = [g.group_id for g in batch.groups]
            assert self.taken == sorted(self.taken)
            for which in self.taken:
                assert self.queued.pop(which) >= self.version - self.k
        aborted = self.buffer.pop_aborts()
        for which in aborted:
            del self.in_flight[which]
        queued_now = {e.group_id for e in self.buffer._ledger.entries("queued")}
        gone = set(self.queued) - queued_now  # "drop" mode gives up finished work too; how much is checked below
        self.queued = {i: v for i, v in self.queued.items() if i in queued_now}
        self.dropped["lag_bound"] += len(aborted) + len(gone)

    @precondition(lambda self: self.taken)
    @rule(skipped=st.booleans())
    def train(self, skipped):
        self.version += not skipped
        self.buffer.mark_trained(self.version)
        self.trained += self.taken
        self.taken = []

    @precondition(lambda self: self.next_id > 0)
    @rule(data=st.data())
    def news_of_a_group_that_has_left(self, data):
        which = data.draw(st.integers(0, self.next_id - 1))
        if which not in self.in_flight:
            self.buffer.started(which, self.version)
            assert not self.buffer.completed(group(which, self.version))

    @invariant()
    def nothing_is_lost(self):
        self.buffer.check()
        c = self.buffer.counts()
        assert c.dispatched == c.trained + c.dropped_total + c.queued + c.in_flight + c.taken
        assert (c.dispatched, c.in_flight, c.queued) == (self.next_id, len(self.in_flight), len(self.queued))
        assert (c.taken, c.trained) == (len(self.taken), len(self.trained))
        assert c.dropped == {reason: n for reason, n in self.dropped.items() if n}
        assert len(set(self.trained)) == len(self.trained)  # none twice
        if self.total is not None:
            assert c.trained + c.taken + c.queued + c.in_flight <= self.total


TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase
TestAnyOrderOfEvents.settings = settings(deadline=None, max_examples=100, stateful_step_count=40)


def test_counts_add_up_while_two_threads_work():
    """A rollout thread and a learner at full speed; every snapshot in between adds up."""
    buffer = RolloutBuffer(4, 2, total_groups=400)
    buffer.published(0)
    snapshots = []

    def roll() -> None:
        next_id = 0
        while not buffer.exhausted:
            count = buffer.wait_admissible(0.05)
            ids = list(range(next_id, next_id + count))
            buffer.dispatched(ids)
            for group_id in ids:
                buffer.started(group_id, 0)
                if group_id % 7 == 3:
                    buffer.drop(group_id, "lone_survivor")
                else:
                    buffer.completed(group(group_id, buffer._published or 0))
            next_id += count

    thread = threading.Thread(target=roll, daemon=True)
    thread.start()
    version = 0
    while (batch := buffer.take_batch(version, timeout_s=30)) is not None:
        snapshots.append(buffer.counts())
        version += 1
        buffer.mark_trained(version)
        assert len(batch.groups) == 4
    thread.join(timeout=30)
    assert not thread.is_alive()
    for c in snapshots:
        assert c.dispatched == c.trained + c.dropped_total + c.queued + c.in_flight + c.taken
    end = buffer.counts()
    assert (end.trained, end.in_flight, end.queued, end.taken) == (400, 0, 0, 0)
    assert end.dispatched == 400 + end.dropped["lone_survivor"]


def test_the_check_sees_a_lost_group():
    buffer = RolloutBuffer(1, 1)
    buffer.published(0)
    buffer.dispatched([0, 1])
    del buffer._ledger._open[0]
    with pytest.raises(AssertionError, match="not conserved"):
        buffer.check()
