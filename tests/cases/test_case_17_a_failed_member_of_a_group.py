"""Case 17: one failed generation left its group short for ever. Now it is trained short or refilled, by setting."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def fakes() -> ModuleType:
    """The parts of tests/pipeline/fakes.py."""
    name = "vcpo_pipeline_fakes"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "pipeline" / "fakes.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def fails(member_of: dict[int, set[int]], attempts: int = 10**9):
    """Fates for groups whose members fail, in their first so many attempts."""

    def fate(group_id, member, attempt):
        return "failed" if member in member_of.get(group_id, ()) and attempt < attempts else "stop"

    return fate


def sizes(world) -> dict[int, list[int]]:
    return {g.group_id: [t.member for t in g.trajectories] for batch in world.learner.batches for g in batch}


def run(fakes, fate, short_groups):
    world = fakes.World(num_generations=4, pool_options={"fate": fate}, rollout_options={"short_groups": short_groups})
    return world, world.run_async(steps=4, groups_per_batch=2, max_policy_lag=1)


def test_case_17_a_group_of_four_is_trained_with_three(fakes):
    world, result = run(fakes, fails({1: {3}}), "train")
    assert result.steps == 4
    assert sizes(world)[1] == [0, 1, 2]
    assert result.counts.dropped_total == 0


def test_case_17_or_refilled(fakes):
    """The survivors are kept as they are, the missing member is sampled again, and the group keeps its number."""
    world, result = run(fakes, fails({1: {3}}, attempts=1), "refill")
    assert sizes(world)[1] == [0, 1, 2, 3]
    assert [ids for ids in world.pool.submits if 1 in ids] == [[0, 1, 2, 3], [1]]
    assert result.counts.dispatched == result.counts.trained == 8
    plain, _ = run(fakes, fails({}), "train")
    both = [next(g for b in w.learner.batches for g in b if g.group_id == 1).trajectories for w in (world, plain)]
    assert [t.token_ids for t in both[0][:3]] == [t.token_ids for t in both[1][:3]]


def test_case_17_a_member_that_fails_for_ever_ends(fakes):
    world, result = run(fakes, fails({1: {3}}), "refill")
    assert result.steps == 4
    assert sizes(world)[1] == [0, 1, 2]
    assert sum(1 in ids for ids in world.pool.submits) == 2


@pytest.mark.parametrize("short_groups", ["train", "refill"])
def test_case_17_a_lone_survivor_is_dropped_counted_and_replaced(fakes, short_groups):
    world, result = run(fakes, fails({1: {0, 1, 3}, 2: {0, 1, 2, 3}}), short_groups)
    assert not {1, 2} & set(sizes(world))
    assert result.counts.dropped == {"lone survivor of 4 members": 1, "no survivor of 4 members": 1}
    assert (result.counts.trained, result.counts.dispatched) == (8, 10)
    assert world.rows[-1]["groups_dropped"] == 2
