"""Case 9: with lag above 0, sampler log-probs are needed and never made up from the current learner."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from vcpo.errors import ConfigError
from vcpo.pipeline.parts import require_sampler_logprobs
from vcpo.types import Prompt, Trajectory, TrajectoryGroup

pytestmark = pytest.mark.timeout(60)
NAN = float("nan")


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


def group(*logprobs: tuple[float, ...]) -> TrajectoryGroup:
    members = tuple(Trajectory(i, (7, 8), given, (0, 0), "stop", reward=1.0) for i, given in enumerate(logprobs))
    return TrajectoryGroup(3, Prompt("p/3", "x"), (1,), members)


@pytest.mark.parametrize("nothing", [(), (NAN, NAN), (float("-inf"), NAN)])
def test_case_09_lag_above_zero_without_sampler_logprobs_is_refused(nothing):
    with pytest.raises(
        ConfigError, match="group 3 came without sampler log-probs, which max_policy_lag = 2 needs"
    ) as e:
        require_sampler_logprobs(group(nothing, nothing), max_policy_lag=2)
    assert "\n" not in str(e.value)
    require_sampler_logprobs(group(nothing, nothing), max_policy_lag=0)  # there the learner's own are the sampler's


def test_case_09_a_single_missing_number_is_for_the_quarantine():
    require_sampler_logprobs(group((-0.1, NAN), (NAN, NAN)), max_policy_lag=2)


def test_case_09_a_group_without_tokens_has_none_to_miss():
    empty = Trajectory(0, (), (), (), "stop")
    require_sampler_logprobs(TrajectoryGroup(0, Prompt("p", "x"), (1,), (empty,)), max_policy_lag=2)


def test_case_09_every_mode_refuses(fakes):
    def no_logprobs():
        return fakes.World(pool_options={"logprobs": lambda group_id: NAN})

    with pytest.raises(ConfigError, match="max_policy_lag = 1 needs"):
        no_logprobs().run_async(max_policy_lag=1)
    assert no_logprobs().run_async(max_policy_lag=0).steps == 5

    world = fakes.World()
    collect = fakes.collect_with(world.publisher, num_generations=2, logprobs=lambda group_id: NAN)
    with pytest.raises(ConfigError, match="max_policy_lag = 3 needs"):
        world.run_replay(policy_lag=3, collect=collect)
    assert fakes.World().run_replay(policy_lag=0).steps == 5
