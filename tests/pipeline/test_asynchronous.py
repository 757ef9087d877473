"""run_async: dispatch, events, short groups, rows, ends. What must never happen is in tests/properties."""

from __future__ import annotations

import threading
import time

import pytest

from vcpo.errors import RolloutError
from vcpo.metrics import METRICS
from vcpo.rollout.pool import GroupStarted

pytestmark = pytest.mark.timeout(60)


def test_a_run_trains_everything_it_dispatched_and_closes_the_pool(fakes):
    world = fakes.World()
    result = world.run_async(steps=20, groups_per_batch=4, max_policy_lag=2)
    c = result.counts
    assert (c.dispatched, c.trained, c.in_flight, c.queued, c.taken, c.dropped_total) == (80, 80, 0, 0, 0, 0)
    assert sorted(i for batch in world.trained_ids for i in batch) == list(range(80))
    assert world.publisher.versions == list(range(21))
    assert world.pool.closed > 0
    assert result.steps == len(world.rows) == 20
    assert result.ended_early is None
    assert max(r["policy_lag_max"] for r in world.rows) <= 2
    assert 0 < result.wall_s < 60


def test_everything_admissible_goes_out_in_one_submit(fakes):
    world = fakes.World()
    world.run_async(steps=6, groups_per_batch=4, max_policy_lag=2)
    sizes = [len(s) for s in world.pool.submits]
    assert sizes[0] == 12
    assert sum(sizes) == 24
    assert all(size % 4 == 0 for size in sizes)  # each update makes room for a whole batch


def test_groups_in_flight_can_be_limited(fakes):
    seen = []
    world = fakes.World(
        pool_options={"on_poll": lambda pool, n: seen.append(pool.num_outstanding)},
        rollout_options={"max_in_flight": 3},
    )
    result = world.run_async(steps=6, groups_per_batch=4, max_policy_lag=4)
    assert result.counts.trained == 24
    assert max(seen) == 3


def test_a_lost_sampler_is_counted_and_its_groups_stay_the_same_groups(fakes):
    world = fakes.World(pool_options={"on_poll": lambda pool, n: pool.lose_everything() if n in (3, 9) else None})
    result = world.run_async(steps=10, max_policy_lag=1)
    assert world.rows[-1]["sampler_restarts"] == 2
    assert result.counts.dispatched == result.counts.trained == 40
    assert sorted(i for batch in world.trained_ids for i in batch) == list(range(40))


def test_news_of_a_start_loosens_the_lag_rule(fakes):
    """Group 1 is dispatched at version 0, starts at 1 and ends after 2: the pool says so, so group 2 may overtake it."""

    class Held(fakes.Pool):
        def poll(self, timeout_s):
            held = [r for r in self._waiting if r.group_id == 1 and world.publisher.version < 1]
            self._waiting = [r for r in self._waiting if r not in held]
            events = super().poll(timeout_s)
            self._waiting += held
            return events

        def _write_token(self, work):
            if work.request.group_id != 1 or world.publisher.version >= 2:
                super()._write_token(work)

    world = fakes.World()
    world.pool = Held(world.publisher)
    world.run_async(steps=3, groups_per_batch=1, max_policy_lag=1)
    assert world.trained_ids == [[0], [2], [1]]


def test_late_news_of_a_start_is_no_news(fakes):
    """GroupStarted that comes after the group completed, or twice, changes nothing."""

    def again(pool, n):
        pool.events += [GroupStarted(0, 0, 0), GroupStarted(1, 0, 0)] if n > 2 else []

    assert fakes.World(pool_options={"on_poll": again}).run_async(steps=5).counts.trained == 20


def test_drop_mode_aborts_slow_groups_and_counts_them(fakes):
    world = fakes.World(pool_options={"length": lambda group_id: 800 if group_id % 10 == 3 else 4})
    result = world.run_async(steps=20, max_policy_lag=1, on_bound="drop")
    assert result.steps == 20
    assert result.counts.trained == 80
    dropped = result.counts.dropped["lag_bound"]
    assert dropped == result.counts.dispatched - 80 > 0
    assert 0 < len(world.pool.aborted) <= dropped  # one may end before it hears of it
    assert {i % 10 for i in world.pool.aborted} == {3}
    assert world.rows[-1]["groups_dropped_by_reason"] == {"lag_bound": dropped}
    assert all(r["bound_wait_s"] == 0 for r in world.rows)
    assert max(r["policy_lag_max"] for r in world.rows) <= 1


def test_wait_mode_waits_for_a_slow_group_and_books_it_as_bound_wait(fakes):
    world = fakes.World(pool_options={"length": lambda group_id: 1500 if group_id == 3 else 4})
    result = world.run_async(steps=6, groups_per_batch=4, max_policy_lag=1)
    assert result.counts.dropped_total == 0
    assert next(i for i, batch in enumerate(world.trained_ids) if 3 in batch) <= 1
    waits = [r["bound_wait_s"] for r in world.rows]
    assert max(waits) == waits[1] > 0
    assert max(r["policy_lag_max"] for r in world.rows) <= 1


def test_the_rows_hold_the_realised_lag_and_the_ledger(fakes):
    """At every row the groups add up, and every lag is in flight + in queue."""
    world = fakes.World(learner=fakes.Learner(update_s=0.002), pool_options={"slots": 5})
    world.run_async(steps=12, groups_per_batch=3, max_policy_lag=3)
    for row in world.rows:
        assert row["groups_dispatched"] == (
            row["groups_trained"] + row["groups_dropped"] + row["groups_queued"] + row["groups_in_flight"]
        )
        for name in ("policy_lag", "policy_lag_in_flight", "policy_lag_in_queue"):
            assert sum(row[f"{name}_histogram"].values()) == row["n_trajectories"]
        mean = sum(int(lag) * n for lag, n in row["policy_lag_histogram"].items()) / row["n_trajectories"]
        assert mean == pytest.approx(row["policy_lag_in_flight_mean"] + row["policy_lag_in_queue_mean"])
        assert row["policy_lag_max"] == max(map(int, row["policy_lag_histogram"])) <= 3
    assert [r["groups_trained"] for r in world.rows] == [3 * (i + 1) for i in range(12)]
    assert [r["tokens"] for r in world.rows] == [3 * 2 * fakes.LENGTH * (i + 1) for i in range(12)]
    assert [r["step"] for r in world.rows] == list(range(1, 13))


def test_times_are_booked_on_the_part_that_took_them(fakes):
    world = fakes.World(learner=fakes.Learner(update_s=0.02), scorer=fakes.Scorer(score_s=0.01))
    world.run_async(steps=4, groups_per_batch=2, max_policy_lag=0)
    for row in world.rows:
        assert row["learner_s"] >= 0.02
        assert row["score_s"] >= 0.02
        assert row["bound_wait_s"] == 0
    assert sum(r["batch_wait_s"] for r in world.rows) > 0
    last = world.rows[-1]
    spent = sum(r[name] for r in world.rows for name in ("learner_s", "publish_s", "batch_wait_s", "bound_wait_s"))
    assert spent <= last["wall_s"]


def test_columns_of_a_hook_are_in_the_row(fakes):
    world = fakes.World(after_step=lambda step: {"heldout_reward": 0.5} if step % 2 == 0 else {})
    world.run_async(steps=4)
    assert [r.get("heldout_reward") for r in world.rows] == [None, 0.5, None, 0.5]


def test_prompts_that_run_out_end_the_run_with_a_short_batch(fakes):
    world = fakes.World(prompts=fakes.prompts(10))
    result = world.run_async(steps=50, groups_per_batch=4, max_policy_lag=1)
    assert [len(batch) for batch in world.trained_ids] == [4, 4, 2]
    assert result.steps == 3
    assert result.ended_early == "the prompts ran out after 3 of 50 steps: give more prompts or fewer steps"
    assert result.trained_prompt_histogram == {f"p/{i}": 1 for i in range(10)}


def test_a_skipped_step_is_trained_and_publishes_nothing(fakes):
    world = fakes.World(learner=fakes.Learner(skip=frozenset({2, 3})))
    result = world.run_async(steps=6, max_policy_lag=1)
    assert result.counts.trained == 24
    assert world.publisher.versions == [0, 1, 2, 3, 4]


def test_a_failure_after_the_last_batch_is_a_warning(fakes):
    """Everything was trained: the result stands, but the failure is not swallowed."""

    class BadEnd(fakes.Pool):
        def close(self):
            raise OSError("cannot end the samplers")

    world = fakes.World()
    world.pool = BadEnd(world.publisher)
    with pytest.warns(UserWarning, match="cannot end the samplers"):
        assert world.run_async(steps=3).steps == 3


def test_a_rollout_thread_that_hangs_is_left_behind_in_bounded_time(fakes):
    """A scorer that breaks its promise to be bounded cannot hold up the end of a run that has failed."""

    scoring, let_go = threading.Event(), threading.Event()

    class Stuck(fakes.Scorer):
        def score_group(self, group):
            if group.group_id == 4:
                scoring.set()
                let_go.wait(30)
            return super().score_group(group)

    class FailsMeanwhile(fakes.Learner):
        def update(self, batch):
            assert scoring.wait(20)
            return super().update(batch)

    world = fakes.World(scorer=Stuck(), learner=FailsMeanwhile(raise_at=1))
    began = time.monotonic()
    with (
        pytest.warns(UserWarning, match=r"did not end within 0\.1 s"),
        pytest.raises(FloatingPointError, match="the learner's own error"),
    ):
        world.run_async(steps=3, groups_per_batch=4, max_policy_lag=1, join_timeout_s=0.1)
    assert time.monotonic() - began < 20
    assert world.pool.closed > 0
    let_go.set()
    for thread in [t for t in threading.enumerate() if t.name == "vcpo rollout"]:
        thread.join(20)


def test_a_group_whose_every_sampler_logprob_is_missing_is_refused(fakes):
    world = fakes.World(pool_options={"logprobs": lambda group_id: float("nan") if group_id == 5 else -0.5})
    with pytest.raises(ValueError, match="group 5 came without sampler log-probs"):
        world.run_async(steps=5)


def test_silence_of_the_whole_pool_ends_the_run(fakes):
    world = fakes.World(pool_options={"length": lambda group_id: 10**9})
    with pytest.raises(RolloutError, match=r"for 0\.3 s while the learner waited for a batch of 4"):
        world.run_async(steps=3, stall_timeout_s=0.3)
    assert world.pool.closed > 0


def test_every_column_is_in_the_one_list_of_metric_names(fakes):
    for run, options in (("run_async", {"max_policy_lag": 1}), ("run_replay", {"policy_lag": 1})):
        world = fakes.World()
        getattr(world, run)(steps=2, **options)
        assert set(world.rows[-1]) <= set(METRICS)
