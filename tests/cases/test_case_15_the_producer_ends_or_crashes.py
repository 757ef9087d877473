"""Case 15: the producer ends or crashes. The learner does not wait for ever, and the cause is the producer's own."""

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


def two_then_crash(fakes):
    yield from fakes.prompts(2)
    raise ConnectionError("the data source went away")


@pytest.mark.parametrize("k", [0, 2])
def test_case_15_a_producer_that_raises_after_two_groups(fakes, k):
    world = fakes.World(prompts=two_then_crash(fakes))
    with pytest.raises(ConnectionError, match="the data source went away") as caught:
        world.run_async(groups_per_batch=4, max_policy_lag=k)
    assert any(entry.name == "two_then_crash" for entry in caught.traceback)
    assert world.pool.closed > 0


def test_case_15_a_sampler_that_dies_after_two_groups(fakes):
    def die(pool, polls):
        if polls == 5:
            raise RuntimeError("sampler 1 died 3 times")

    world = fakes.World(pool_options={"on_poll": die, "length": lambda group_id: 2 if group_id < 2 else 50})
    with pytest.raises(RuntimeError, match="sampler 1 died 3 times"):
        world.run_async(groups_per_batch=4)


@pytest.mark.parametrize("count", [0, 2, 4, 6])
@pytest.mark.parametrize("k", [0, 2])
def test_case_15_a_producer_that_runs_out_of_prompts(fakes, k, count):
    """What there is gets trained, the last batch short, and the result says why there are fewer steps."""
    world = fakes.World(prompts=fakes.prompts(count))
    result = world.run_async(steps=9, groups_per_batch=4, max_policy_lag=k)
    assert result.counts.trained == count
    assert result.steps == -(-count // 4)
    assert result.ended_early == (
        f"the prompts ran out after {result.steps} of 9 steps: give more prompts or fewer steps"
    )
