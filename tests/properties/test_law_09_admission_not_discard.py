"""Law 9: admission, not discard. Slow prompts are not thrown away: the trained prompts are the dispatched ones."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
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


def length(group_id: int) -> int:
    """One prompt in five is hard: its group takes 20 times as long."""
    return 60 if group_id % 5 == 2 else 3


@pytest.mark.parametrize("k", [0, 1, 4])
def test_the_trained_prompts_are_the_dispatched_ones(fakes, k):
    world = fakes.World(pool_options={"length": length, "slots": 6})
    result = world.run_async(steps=15, groups_per_batch=4, max_policy_lag=k)
    assert result.counts.trained == result.counts.dispatched == 60
    assert result.trained_prompt_histogram == result.dispatched_prompt_histogram
    # What the learner saw, counted apart from the pipeline's own books: the hard prompts, in their true share.
    seen = Counter(g.prompt.prompt_id for batch in world.learner.batches for g in batch)
    assert seen == {f"p/{i}": 1 for i in range(60)}


def test_no_more_is_dispatched_than_can_be_trained(fakes):
    """The run ends with nothing in flight: no prompt was spent on a group that nobody trains."""
    result = fakes.World().run_async(steps=3, groups_per_batch=4, max_policy_lag=8)
    assert (result.counts.dispatched, result.counts.in_flight, result.counts.queued) == (12, 0, 0)


def test_at_the_end_of_a_data_set_nothing_is_left_over(fakes):
    world = fakes.World(prompts=fakes.prompts(23), pool_options={"length": length})
    result = world.run_async(steps=100, groups_per_batch=4, max_policy_lag=2)
    assert result.trained_prompt_histogram == result.dispatched_prompt_histogram == {f"p/{i}": 1 for i in range(23)}


def test_discarding_is_an_option_that_counts_and_shows_in_the_histograms(fakes):
    """With "drop" the hard prompts go missing, which is why it is not the default; each loss is counted."""
    world = fakes.World(pool_options={"length": lambda group_id: 800 if group_id % 5 == 2 else 3})
    result = world.run_async(steps=15, groups_per_batch=4, max_policy_lag=1, on_bound="drop")
    missing = Counter(result.dispatched_prompt_histogram) - Counter(result.trained_prompt_histogram)
    assert missing
    assert {int(p.split("/")[1]) % 5 for p in missing} == {2}
    assert missing.total() == result.counts.dropped["lag_bound"]
    assert result.counts.trained == 60  # what was dropped was replaced
