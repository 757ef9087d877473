"""evaluate: a mean over prompts with its standard error."""

from __future__ import annotations

import math
import statistics

import pytest

from vcpo.pipeline import evaluate


class Rewards:
    """Gives out rewards from a list, group by group."""

    def __init__(self, *groups):
        self.groups = list(groups)

    def score_group(self, group):
        return group.with_rewards(self.groups.pop(0))


@pytest.fixture
def collect(fakes):
    publisher = fakes.Publisher()
    publisher.publish({"weights": "some"}, 0)
    return fakes.collect_with(publisher, num_generations=2)


def test_mean_and_standard_error_are_over_prompts(fakes, collect):
    """Trajectories of one prompt are not independent: each prompt gives one number."""
    done = evaluate(collect, list(fakes.prompts(3)), Rewards([1.0, 1.0], [0.0, 1.0], [0.0, 0.0]))
    assert done.reward_mean == 0.5
    assert done.standard_error == pytest.approx(statistics.stdev([1.0, 0.5, 0.0]) / math.sqrt(3))
    assert (done.n, done.unscorable) == (3, 0)


def test_what_cannot_be_scored_is_left_out_and_counted(fakes, collect):
    done = evaluate(collect, list(fakes.prompts(3)), Rewards([None, 1.0], [None, None], [0.0, 0.0]))
    assert (done.reward_mean, done.n, done.unscorable) == (0.5, 2, 3)
    assert done.standard_error == pytest.approx(statistics.stdev([1.0, 0.0]) / math.sqrt(2))


@pytest.mark.parametrize(("count", "rewards"), [(0, []), (1, [[1.0, 0.0]]), (1, [[None, None]])])
def test_too_few_prompts_have_no_standard_error(fakes, collect, count, rewards):
    done = evaluate(collect, list(fakes.prompts(count)), Rewards(*rewards))
    assert done.standard_error is None
    assert done.reward_mean == (0.5 if rewards == [[1.0, 0.0]] else None)
