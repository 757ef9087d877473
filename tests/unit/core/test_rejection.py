from __future__ import annotations

import math

import pytest
import torch

from vcpo import core

NAN, INF = math.nan, math.inf
LOG2 = math.log(2.0)
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1], [0, 0, 0]])
LEARNER = torch.tensor([[LOG2, -LOG2, NAN], [2 * LOG2, 0, 0], [0.1, 0.1, 0.1], [NAN, INF, 0]], dtype=torch.float64)
SAMPLER = torch.zeros_like(LEARNER)


def kept(**rule) -> list[list[int]]:
    return core.kept_actions(LEARNER, SAMPLER, MASK, **rule).int().tolist()


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"level": "token", "low": 0.6, "high": 3.0}, [[1, 0, 0], [0, 1, 1], [1, 1, 1], [0, 0, 0]]),
        ({"level": "sum", "low": 0.6, "high": 3.0}, [[1, 1, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0]]),
        ({"level": "mean", "low": 0.9, "high": 1.5}, [[1, 1, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0]]),
        ({"level": "max", "low": 0.6, "high": 5.0}, [[0, 0, 0], [1, 1, 1], [1, 1, 1], [0, 0, 0]]),
        ({"level": "max", "low": 1.05, "high": 5.0}, [[0, 0, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0]]),
        ({"level": "max", "measure": "k2", "high": 0.3}, [[1, 1, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0]]),
        ({"level": "sum", "measure": "k2", "high": 0.4}, [[0, 0, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0]]),
        # k3 of a ratio r is r - 1 - log r: 0.307 at 2, 0.193 at 1/2
        ({"level": "token", "measure": "k3", "high": 0.25}, [[0, 1, 0], [0, 1, 1], [1, 1, 1], [0, 0, 0]]),
        ({"level": "mean", "measure": "k3", "high": 0.24}, [[0, 0, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0]]),
        ({}, [[1, 1, 0], [1, 1, 1], [1, 1, 1], [0, 0, 0]]),
    ],
)
def test_rules_by_hand(rule, expected):
    assert kept(**rule) == expected


def test_a_masked_position_is_no_reason_to_drop_a_trajectory():
    """Its ratio of 1 lies outside of bounds that all actions keep."""
    learner = torch.tensor([[0.2, NAN], [0.2, 0.0]])
    mask = torch.tensor([[True, False], [True, True]])
    keep = core.kept_actions(learner, torch.zeros(2, 2), mask, level="max", low=1.1, high=1.5)
    assert keep.tolist() == [[True, False], [False, False]]


@pytest.mark.parametrize("level", ["token", "sum", "mean", "max"])
@pytest.mark.parametrize("measure", ["ratio", "k2", "k3"])
def test_a_quarantined_trajectory_is_dropped_whatever_the_bounds(level, measure):
    learner = torch.tensor([[NAN, 0.0], [INF, 0.0], [INF, -INF], [0.0, 0.0]])
    keep = core.kept_actions(learner, torch.zeros(4, 2), torch.ones(4, 2), level=level, measure=measure)
    assert keep.tolist() == [[False, False]] * 3 + [[True, True]]


def test_a_weight_of_zero_is_kept_only_by_a_bound_that_allows_it():
    learner = torch.tensor([[-INF, 0.0]])
    arguments = (learner, torch.zeros(1, 2), torch.ones(1, 2))
    assert core.kept_actions(*arguments, level="token", low=0.0, high=2.0).tolist() == [[True, True]]
    assert core.kept_actions(*arguments, level="token", low=0.1, high=2.0).tolist() == [[False, True]]
    assert core.kept_actions(*arguments, level="token", measure="k3").tolist() == [[False, True]]


def test_what_would_be_right_is_said():
    with pytest.raises(ValueError, match=r"level of token, sum, mean, max.*got 'row'"):
        kept(level="row")
    with pytest.raises(ValueError, match="measure of ratio, k2, k3"):
        kept(measure="k4")
    with pytest.raises(ValueError, match="low must not exceed high"):
        kept(low=2.0, high=1.0)


def test_batch_normalised_weights_have_mean_one_over_actions_or_trajectories():
    per_token = torch.tensor([[1.0, 3.0, NAN], [2.0, 2.0, 2.0], [0.0, 4.0, 0.0], [INF, NAN, 1.0]])
    weights = core.batch_normalized(per_token, MASK)
    torch.testing.assert_close(weights[MASK.bool()].mean(), torch.tensor(1.0))
    assert (weights[~MASK.bool()] == 0).all()
    per_trajectory = torch.tensor([[1.0], [2.0], [3.0], [NAN]])
    assert core.batch_normalized(per_trajectory, MASK).tolist() == [[0.5], [1.0], [1.5], [0.0]]


def test_micro_batches_share_the_mean_of_the_whole_batch():
    weights = torch.tensor([[1.0], [2.0], [6.0], [0.0]])
    whole = core.batch_normalized(weights, MASK)
    parts = [core.batch_normalized(weights[i : i + 2], MASK[i : i + 2], mean=3.0) for i in (0, 2)]
    assert torch.equal(torch.cat(parts), whole)


def test_batch_normalisation_of_nothing_stays_nothing():
    assert core.batch_normalized(torch.zeros(4, 1), MASK).tolist() == [[0.0]] * 4
    assert (core.batch_normalized(torch.ones(2, 3), torch.zeros(2, 3)) == 0).all()


def test_a_bad_mean_is_refused():
    with pytest.raises(ValueError, match="finite number >= 0, got nan"):
        core.batch_normalized(torch.tensor([[1.0], [NAN], [1.0], [1.0]]), MASK)
    with pytest.raises(ValueError, match="finite number >= 0, got -1"):
        core.batch_normalized(torch.ones(4, 1), MASK, mean=-1.0)
