"""run_sync and run_replay: turns, lags, rows and ends."""

from __future__ import annotations

import pytest

from vcpo.errors import RolloutError
from vcpo.pipeline import VersionStamp, run_sync

pytestmark = pytest.mark.timeout(60)


def test_sync_trains_what_the_current_policy_wrote(fakes):
    world = fakes.World()
    result = world.run_sync(steps=3, groups_per_batch=4)
    assert world.trained_ids == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    for version, batch in enumerate(world.learner.batches):
        assert {v for g in batch for t in g.trajectories for v in t.policy_versions} == {version}
    assert world.publisher.versions == [0, 1, 2, 3]
    assert result.steps == len(world.rows) == 3
    assert result.ended_early is None
    assert result.counts.dispatched == result.counts.trained == 12
    assert [r["policy_lag_max"] for r in world.rows] == [0, 0, 0]
    assert [r["reward_current"] for r in world.rows] == [r["reward_mean"] for r in world.rows]


@pytest.mark.parametrize("k", [0, 1, 3])
def test_replay_trains_each_batch_exactly_k_updates_after_it_was_sampled(fakes, k):
    world = fakes.World()
    result = world.run_replay(steps=6, groups_per_batch=2, policy_lag=k)
    for step, batch in enumerate(world.learner.batches):
        assert [g.group_id for g in batch] == [2 * step, 2 * step + 1]  # first in, first out
        assert {v for g in batch for t in g.trajectories for v in t.policy_versions} == {max(step - k, 0)}
    lags = [min(step, k) for step in range(6)]  # the first k + 1 batches all come from the first weights
    assert [r["policy_lag_histogram"] for r in world.rows] == [{str(lag): 4} for lag in lags]
    assert [r["policy_lag_in_queue_mean"] for r in world.rows] == lags
    assert (result.counts.trained, result.counts.queued, result.counts.in_flight) == (12, 2 * k, 0)


def test_replay_logs_the_reward_of_the_current_policy(fakes):
    """The batch whose mean is `reward_current` now is trained, and is `reward_mean`, k steps later."""
    world = fakes.World(num_generations=8)
    world.run_replay(steps=10, policy_lag=3)
    assert [r["reward_mean"] for r in world.rows[3:]] == [r["reward_current"] for r in world.rows[:-3]]
    assert len({r["reward_current"] for r in world.rows}) > 3  # else the line above would say little


def test_replay_is_deterministic(fakes):
    first, second = fakes.World(), fakes.World()
    for world in (first, second):
        world.run_replay(steps=8, policy_lag=2)
    assert first.learner.weights == second.learner.weights


def test_a_skipped_step_does_not_raise_the_version(fakes):
    world = fakes.World(learner=fakes.Learner(skip=frozenset({2})))
    result = world.run_sync(steps=3)
    assert result.steps == 3
    assert world.publisher.versions == [0, 1, 2]  # nothing to publish after the skipped one
    assert [r["policy_version"] for r in world.rows] == [1, 1, 2]
    assert result.counts.trained == 12


def test_when_prompts_run_out_the_last_batch_is_short_and_the_run_says_so(fakes):
    for run, options in (("run_sync", {}), ("run_replay", {"policy_lag": 2})):
        world = fakes.World(prompts=fakes.prompts(6))
        result = getattr(world, run)(steps=5, groups_per_batch=4, **options)
        assert world.trained_ids == [[0, 1, 2, 3], [4, 5]]
        assert result.steps == 2
        assert result.ended_early == "the prompts ran out after 2 of 5 steps: give more prompts or fewer steps"
        assert result.counts.trained == 6
        assert result.trained_prompt_histogram == result.dispatched_prompt_histogram


@pytest.mark.parametrize(("count", "steps"), [(0, 0), (8, 2)])
def test_prompts_that_end_with_a_batch(fakes, count, steps):
    world = fakes.World(prompts=fakes.prompts(count))
    assert world.run_sync(steps=5, groups_per_batch=4).steps == steps


def test_errors_of_parts_come_through(fakes):
    with pytest.raises(ZeroDivisionError, match="the reward function's own error"):
        fakes.World(scorer=fakes.Scorer(raise_at=5)).run_sync()
    with pytest.raises(FloatingPointError, match="the learner's own error"):
        fakes.World(learner=fakes.Learner(raise_at=2)).run_sync()


def test_collect_must_return_one_group_per_prompt(fakes):
    world = fakes.World()
    collect = fakes.collect_with(world.publisher, num_generations=2)
    with pytest.raises(RolloutError, match="one group per prompt is needed"):
        run_sync(
            world.parts(),
            lambda prompts, first_group_id: collect(prompts[1:], first_group_id=0),
            steps=1,
            groups_per_batch=2,
        )


def test_version_stamp_moves_the_engines_number():
    class Engine:
        policy_version = 0

    engine = Engine()
    VersionStamp(engine).publish({}, 7)
    assert engine.policy_version == 7
