"""Law 8: nothing waits for ever. Whatever part dies or falls silent, the run ends, with that part's own traceback."""

from __future__ import annotations

import importlib.util
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType

import pytest

from vcpo.errors import RolloutError

pytestmark = pytest.mark.timeout(60)  # the bound itself: a run that hangs fails here


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


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """After each of these ends, the rollout thread is gone."""
    yield
    assert not [t for t in threading.enumerate() if t.name == "vcpo rollout"]


def raise_at(n):
    def on_poll(pool, polls):
        if polls == n:
            raise RolloutError("sampler 0 died 3 times:\nTraceback ...\nMemoryError: out of memory")

    return on_poll


def broken_prompts(fakes, count):
    yield from fakes.prompts(count)
    raise LookupError("the data set's own error")


DEATHS = {
    "the pool": (lambda f: f.World(pool_options={"on_poll": raise_at(3)}), RolloutError, "on_poll"),
    "the pool, at once": (lambda f: f.World(pool_options={"on_poll": raise_at(1)}), RolloutError, "on_poll"),
    "the prompts": (lambda f: f.World(prompts=broken_prompts(f, 5)), LookupError, "broken_prompts"),
    "the prompts, at once": (lambda f: f.World(prompts=broken_prompts(f, 0)), LookupError, "broken_prompts"),
    "the reward function": (lambda f: f.World(scorer=f.Scorer(raise_at=6)), ZeroDivisionError, "score_group"),
    "the learner": (lambda f: f.World(learner=f.Learner(raise_at=2)), FloatingPointError, "update"),
    "an odd exception": (lambda f: f.World(prompts=map(exit_, f.prompts())), SystemExit, "exit_"),
}


def exit_(prompt):
    raise SystemExit(3)


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("part", DEATHS)
def test_the_death_of_a_part_ends_the_run_with_its_own_traceback(fakes, part, k):
    make, error, function = DEATHS[part]
    world = make(fakes)
    with pytest.raises(error) as caught:
        world.run_async(steps=10, groups_per_batch=4, max_policy_lag=k)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert function in frames  # where it happened, not where it was noticed
    assert world.pool.closed > 0


def test_a_failed_publication_ends_the_run(fakes):
    world = fakes.World()
    world.publisher.publish = lambda named, policy_version: 1 / 0
    with pytest.raises(ZeroDivisionError):
        world.run_async()
    assert world.pool.closed > 0
    assert world.pool.submits == []


def test_a_failed_sink_ends_the_run(fakes):
    world = fakes.World()
    world.sink.write = lambda row: 1 / 0
    with pytest.raises(ZeroDivisionError):
        world.run_async()
    assert world.pool.closed > 0


def test_silence_ends_the_run(fakes):
    """Samplers that live, take work and never finish any."""
    world = fakes.World(pool_options={"length": lambda group_id: 10**9 if group_id >= 8 else 4})
    with pytest.raises(RolloutError, match=r"no group started, completed or was dropped for 0\.4 s .* in flight"):
        world.run_async(steps=10, max_policy_lag=1, stall_timeout_s=0.4)
    assert world.pool.closed > 0


def test_an_interrupt_ends_the_run(fakes):
    class Interrupted(fakes.Learner):
        def update(self, batch):
            raise KeyboardInterrupt

    world = fakes.World(learner=Interrupted())
    with pytest.raises(KeyboardInterrupt):
        world.run_async()
    assert world.pool.closed > 0


def test_groups_that_always_fail_are_bounded_by_the_prompts(fakes):
    """Every group is dropped: the run spends its prompts and ends, it does not spin."""
    world = fakes.World(prompts=fakes.prompts(50), pool_options={"fate": lambda *_: "failed"})
    result = world.run_async(steps=3)
    assert result.steps == 0
    assert result.counts.dropped == {"no survivor of 2 members": 50}
    assert result.ended_early is not None
