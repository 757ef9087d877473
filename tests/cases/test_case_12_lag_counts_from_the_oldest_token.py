"""Case 12: a sampler takes new weights in the middle of a trajectory. Tokens carry both versions; the oldest counts."""

from __future__ import annotations

import importlib.util
import sys
import time
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


def test_case_12_tokens_carry_both_versions_and_the_oldest_one_counts(fakes):
    """Group 3 takes 40 decode steps, its neighbours 2, and goes on only after the learner has moved on."""

    def learner_first(pool, polls):
        give_up = time.monotonic() + 30
        while polls == 20 and world.publisher.version < 1 and time.monotonic() < give_up:
            time.sleep(0.001)

    world = fakes.World(pool_options={"length": lambda group_id: 40 if group_id == 3 else 2, "on_poll": learner_first})
    world.run_async(steps=6, groups_per_batch=2, max_policy_lag=3)
    version, slow = next((v, g) for v, batch in enumerate(world.learner.batches) for g in batch if g.group_id == 3)
    versions = slow.trajectories[0].policy_versions
    assert versions[0] == 0 < versions[-1] == slow.completed_version  # sampled under more than one version
    assert sorted(versions) == list(versions)
    assert slow.oldest_version == 0
    row = world.rows[version]
    # By the version at completion its lag would be smaller, and this group would not show at all.
    assert row["policy_lag_max"] == version - 0 > version - slow.completed_version
    assert row["policy_lag_in_flight_histogram"][str(slow.completed_version)] == 2  # both of its trajectories
    assert row["policy_lag_in_flight_mean"] > 0


def test_case_12_the_bound_holds_for_the_oldest_token(fakes):
    """With the bound counted from completion this run would train tokens of lag 2 and more."""
    world = fakes.World(pool_options={"length": lambda group_id: 60 if group_id % 4 == 3 else 2})
    world.run_async(steps=10, groups_per_batch=2, max_policy_lag=1)
    for version, batch in enumerate(world.learner.batches):
        for g in batch:
            assert min(v for t in g.trajectories for v in t.policy_versions) >= version - 1
