"""Log ratios of +500 and -500, all NaN, no valid token: the step is at its floor or none at all, never full."""

from __future__ import annotations

import math

import pytest
import torch

from vcpo import core


def step(lw: torch.Tensor) -> float:
    return core.lr_scale(core.ess_ratio(lw), rule="linear")


def log_weights(*log_ratios: float) -> torch.Tensor:
    learner = torch.tensor([[x] for x in log_ratios])
    return core.trajectory_log_weights(learner, torch.zeros_like(learner), torch.ones_like(learner))


def test_case_06_one_row_of_plus_500_takes_everything():
    assert step(log_weights(500.0, -500.0, 0.0, 0.0)) == pytest.approx(0.25)
    assert step(log_weights(500.0, 0.0, 0.0, 0.0)) == pytest.approx(0.25)


def test_case_06_one_row_of_minus_500_costs_its_own_share():
    assert step(log_weights(-500.0, 0.0, 0.0, 0.0)) == pytest.approx(0.75)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_case_06_bad_numbers_alone_are_no_step(bad):
    lw = log_weights(bad, bad, bad)
    assert step(lw) == 0.0
    assert (core.truncated_weights(lw, 8.0) == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_case_06_a_bad_row_among_good_ones_costs_its_share(bad):
    assert step(log_weights(bad, 0.0, 0.0, 0.0)) == pytest.approx(0.75)


def test_case_06_no_valid_token_is_no_step():
    learner = torch.full((3, 4), math.nan)
    mask = torch.zeros(3, 4)
    lw = core.trajectory_log_weights(learner, learner, mask)
    moments = core.WeightMoments.from_log_weights(lw, valid=mask.any(1))
    assert core.lr_scale(moments.ess_ratio) == 0.0


def test_case_06_a_ratio_that_is_not_a_number_is_refused():
    with pytest.raises(ValueError, match="got nan"):
        core.lr_scale(math.nan)
