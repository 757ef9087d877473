"""Case 13: a lag bound of 0 once scheduled no work at all. Here it is the synchronous loop."""

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


def test_case_13_three_steps_at_bound_zero_finish_and_equal_the_sync_loop(fakes):
    sync, bound_zero = fakes.World(), fakes.World()
    sync.run_sync(steps=3)
    result = bound_zero.run_async(steps=3, max_policy_lag=0)
    assert result.steps == 3
    assert result.counts.trained == result.counts.dispatched == 12
    assert bound_zero.learner.weights == sync.learner.weights


def test_case_13_nothing_is_in_flight_during_an_update(fakes):
    world = fakes.World()
    outstanding = []

    class Watching(fakes.Learner):
        def update(self, batch):
            outstanding.append(world.pool.num_outstanding)
            return super().update(batch)

    world.learner = Watching()
    world.run_async(steps=3, max_policy_lag=0)
    assert outstanding == [0, 0, 0]
