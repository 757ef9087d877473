"""RolloutBuffer: admission, order, states and waiting, one rule at a time. The laws are in tests/properties."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from vcpo.buffer import RolloutBuffer
from vcpo.buffer.lag_rule import LagRule
from vcpo.buffer.ledger import Entry
from vcpo.errors import RolloutError
from vcpo.types import Prompt, Trajectory, TrajectoryGroup

pytestmark = pytest.mark.timeout(60)


def group(group_id: int, version: int = 0) -> TrajectoryGroup:
    token = Trajectory(0, (7,), (-0.5,), (version,), "stop", reward=1.0)
    return TrajectoryGroup(group_id, Prompt(f"p/{group_id}", "x"), (1,), (token,), completed_version=version)


def filled(groups_per_batch: int, k: int, **options) -> RolloutBuffer:
    """A buffer in which everything admissible has been dispatched at version 0."""
    buffer = RolloutBuffer(groups_per_batch, k, **options)
    buffer.published(0)
    buffer.dispatched(range(buffer.admissible()))
    return buffer


def ids(batch) -> list[int]:
    assert batch is not None
    return [g.group_id for g in batch.groups]


# ---- admission ----


def test_nothing_is_admitted_before_the_first_published_version():
    buffer = RolloutBuffer(4, 2)
    assert buffer.admissible() == 0
    buffer.published(0)
    assert buffer.admissible() == 4 * (2 + 1)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_admission_is_one_batch_more_while_waiting_than_while_training(k):
    buffer = filled(2, k)
    assert buffer.counts().in_flight == 2 * (k + 1)
    for group_id in range(2):
        buffer.completed(group(group_id))
    assert buffer.admissible() == 0
    assert buffer.try_take(0) is not None
    assert buffer.admissible() == 0
    assert buffer.counts().in_flight == 2 * k  # nothing at all during an update at lag 0
    buffer.mark_trained(1)
    assert buffer.admissible() == 2


def test_a_dropped_group_makes_room_for_another():
    buffer = filled(2, 0)
    buffer.drop(0, "lone_survivor")
    assert buffer.admissible() == 1
    buffer.dispatched([2])
    for group_id in (1, 2):
        buffer.completed(group(group_id))
    assert ids(buffer.try_take(0)) == [1, 2]


def test_total_groups_stops_admission_and_lets_the_last_batch_be_short():
    buffer = filled(2, 2, total_groups=5)
    assert buffer.counts().dispatched == 5
    for group_id in range(5):
        buffer.completed(group(group_id))
    for version, expected in enumerate([[0, 1], [2, 3], [4]]):
        assert ids(buffer.take_batch(version, timeout_s=5)) == expected
        buffer.mark_trained(version + 1)
        assert buffer.admissible() == 0
    assert buffer.exhausted
    assert buffer.take_batch(3, timeout_s=5) is None


def test_more_than_admissible_is_refused():
    buffer = RolloutBuffer(2, 0)
    buffer.published(0)
    with pytest.raises(ValueError, match="3 groups dispatched but only 2 are admissible"):
        buffer.dispatched([0, 1, 2])
    assert buffer.counts().dispatched == 0


def test_a_waiting_rollout_thread_is_woken_by_publication():
    buffer = RolloutBuffer(3, 0)
    threading.Timer(0.05, lambda: buffer.published(0)).start()
    assert buffer.wait_admissible(timeout_s=30) == 3


@pytest.mark.parametrize("end", ["close", "fail"])
def test_a_waiting_rollout_thread_is_woken_by_the_end(end):
    buffer = RolloutBuffer(3, 0)
    act = {"close": buffer.close, "fail": lambda: buffer.fail(KeyError("x"))}
    threading.Timer(0.05, act[end]).start()
    began = time.monotonic()
    assert buffer.wait_admissible(timeout_s=50) == 0
    assert time.monotonic() - began < 30


# ---- the batch ----


def test_the_oldest_version_is_taken_first_and_a_batch_is_ordered_by_id():
    buffer = filled(2, 1)
    for group_id in (3, 2, 1):
        buffer.completed(group(group_id))
    assert ids(buffer.try_take(0)) == [1, 2]  # of equal versions, those dispatched first
    buffer.mark_trained(1)
    buffer.dispatched([4, 5])
    buffer.completed(group(4, 1))
    buffer.completed(group(0, 0))
    assert ids(buffer.try_take(1)) == [0, 3]  # both of version 0; 4 is of version 1


def test_a_batch_is_ordered_by_id_whatever_the_versions():
    buffer = filled(2, 1)
    for group_id in (0, 1):
        buffer.completed(group(group_id))
    buffer.try_take(0)
    buffer.mark_trained(1)
    buffer.completed(group(2, 1))  # started late
    buffer.completed(group(3, 0))
    assert ids(buffer.try_take(1)) == [2, 3]


def test_a_batch_waits_for_groups_it_would_leave_behind_too_long():
    buffer = filled(2, 1)  # 0..3 at version 0
    for group_id in (0, 1):
        buffer.completed(group(group_id))
    assert ids(buffer.try_take(0)) == [0, 1]
    buffer.mark_trained(1)
    buffer.dispatched([4, 5])
    for group_id in (4, 5):
        buffer.completed(group(group_id, 1))
    assert buffer.try_take(1) is None  # 2 and 3 must go into this very update
    buffer.completed(group(2))
    assert buffer.try_take(1) is None
    buffer.completed(group(3))
    assert ids(buffer.try_take(1)) == [2, 3]


def test_a_late_start_loosens_the_rule():
    """Groups that were dispatched at version 0 but started at 1 may stay behind update 1."""
    buffer = filled(2, 1)
    for group_id in (0, 1):
        buffer.completed(group(group_id))
    assert ids(buffer.try_take(0)) == [0, 1]
    buffer.mark_trained(1)
    buffer.dispatched([4, 5])
    for group_id in (4, 5):
        buffer.completed(group(group_id, 1))
    assert buffer.try_take(1) is None
    for group_id in (2, 3):
        buffer.started(group_id, 1)
    assert ids(buffer.try_take(1)) == [4, 5]


def test_a_redispatched_group_stays_in_flight_and_starts_anew():
    buffer = filled(1, 1)
    buffer.started(0, 0)
    buffer.completed(group(1))
    assert ids(buffer.try_take(0)) == [1]
    buffer.mark_trained(1)
    buffer.dispatched([2])
    buffer.completed(group(2, 1))
    assert buffer.try_take(1) is None  # 0 started at version 0
    buffer.redispatched(0, 1)
    assert buffer.counts().in_flight == 1
    assert ids(buffer.try_take(1)) == [2]


def test_drop_mode_gives_up_the_oldest_and_names_what_to_abort():
    buffer = filled(2, 1, on_bound="drop")
    for group_id in (0, 1):
        buffer.completed(group(group_id))
    assert ids(buffer.try_take(0)) == [0, 1]
    buffer.mark_trained(1)
    buffer.dispatched([4, 5])
    for group_id in (4, 5):
        buffer.completed(group(group_id, 1))
    assert ids(buffer.try_take(1)) == [4, 5]
    assert buffer.pop_aborts() == [2, 3]
    assert buffer.pop_aborts() == []
    assert buffer.counts().dropped == {"lag_bound": 2}
    assert not buffer.completed(group(2))  # it completed all the same: too late
    buffer.started(3, 1)  # late news of it changes nothing
    buffer.check()


def test_finished_work_is_kept_before_work_in_flight_of_the_same_version():
    rule = LagRule(groups_per_batch=1, max_policy_lag=1)
    queued, in_flight = Entry(0, 1, state="queued"), Entry(1, 1)
    assert rule.too_late([queued, in_flight], version=1) == [in_flight]


def test_the_rule_as_the_design_states_it():
    """For every u <= v, at most G (u + k - v) groups of version <= u stay: compared with counting, all small cases."""
    g, k, v = 2, 2, 3
    rule = LagRule(g, k)
    for a in range(5):
        for b in range(5):
            for c in range(5):
                versions = [1] * a + [2] * b + [3] * c
                staying = [Entry(i, u) for i, u in enumerate(versions)]
                holds = all(sum(x <= u for x in versions) <= g * max(u + k - v, 0) for u in range(v + 1))
                late = rule.too_late(staying, v)
                assert (not late) == holds
                left = [e.version for e in staying if e not in late]
                assert all(sum(x <= u for x in left) <= g * max(u + k - v, 0) for u in range(v + 1))


# ---- the end ----


def test_when_the_prompts_end_the_last_batch_is_short_and_then_there_is_none():
    buffer = RolloutBuffer(2, 1)
    buffer.published(0)
    buffer.dispatched([0, 1, 2])
    buffer.end_of_prompts()
    assert buffer.admissible() == 0
    for group_id in (0, 1):
        buffer.completed(group(group_id))
    assert ids(buffer.take_batch(0, timeout_s=5)) == [0, 1]
    buffer.mark_trained(1)
    assert buffer.try_take(1) is None  # 2 may still complete
    assert not buffer.exhausted
    buffer.completed(group(2))
    assert ids(buffer.take_batch(1, timeout_s=5)) == [2]
    buffer.mark_trained(2)
    assert buffer.take_batch(2, timeout_s=5) is None


def test_a_failure_wakes_the_learner_and_is_raised_there():
    buffer = RolloutBuffer(2, 1)
    buffer.published(0)
    failure, later = KeyError("the sampler's own error"), ValueError("and one after it")
    timer = threading.Timer(0.05, lambda: (buffer.fail(failure), buffer.fail(later)))
    timer.start()
    with pytest.raises(KeyError) as caught:
        buffer.take_batch(0, timeout_s=50)
    assert caught.value is failure
    timer.join(10)
    with pytest.raises(KeyError):  # and at every later wait
        buffer.take_batch(0, timeout_s=50)


def test_silence_ends_the_wait_with_a_clear_message():
    buffer = filled(2, 0)
    with pytest.raises(RolloutError, match=r"for 0\.2 s while the learner waited for a batch of 2 \(0 queued, 2 in fl"):
        buffer.take_batch(0, timeout_s=0.2)


def test_any_news_starts_the_silence_anew():
    """The bound is on silence, not on how long a batch takes."""
    buffer = filled(2, 0)
    events = [lambda: buffer.started(0, 0), lambda: buffer.completed(group(0)), lambda: buffer.completed(group(1))]

    def news() -> None:
        for event in events:
            time.sleep(0.2)
            event()

    thread = threading.Thread(target=news)
    thread.start()
    assert ids(buffer.take_batch(0, timeout_s=0.45)) == [0, 1]
    thread.join(10)


# ---- callers' mistakes ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1), "groups_per_batch must be at least 1, got 0"),
        ((1, -1), "max_policy_lag must be 0 or more, got -1"),
        ((1, 1, "discard"), "on_bound must be 'wait' or 'drop', got 'discard'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        RolloutBuffer(*arguments)


def test_wrong_calls_are_named():
    buffer = filled(1, 1)
    with pytest.raises(ValueError, match="group 7 was never dispatched; the newest is 1"):
        buffer.completed(group(7))
    with pytest.raises(ValueError, match="the learner is at version 1 but 0 is published"):
        buffer.try_take(1)
    buffer.completed(group(0))
    buffer.try_take(0)
    with pytest.raises(ValueError, match="call mark_trained before"):
        buffer.try_take(0)
    with pytest.raises(ValueError, match="group 0 is being trained"):
        buffer.drop(0, "no reason")
    buffer.mark_trained(3)
    with pytest.raises(ValueError, match="published version fell from 3 to 2"):
        buffer.published(2)
    with pytest.raises(ValueError, match="group ids must rise: 1 dispatched after 1"):
        buffer.dispatched([1])
    assert not buffer.drop(0, "gone already")
    assert not buffer.completed(group(0))
    buffer.check()


def test_the_buffer_needs_no_torch():
    code = "import sys, vcpo.buffer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
