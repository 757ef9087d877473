"""Sampler log-probs shifted by 0.7: the reported ratio moves; it is not built from the learner alone."""

from __future__ import annotations

import math

import pytest
import torch

from vcpo import core

SHIFT = 0.7


def test_case_08_log_ratios_and_weights_move_by_the_shift():
    learner = -torch.rand(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.ones(3, 5)
    moved = core.trajectory_log_weights(learner, learner - SHIFT, mask)
    torch.testing.assert_close(moved, torch.full((3,), 5 * SHIFT, dtype=torch.float64))
    assert core.trajectory_log_weights(learner, learner, mask).abs().max() == 0
    for name in ("token_truncate", "geometric_truncate"):
        weights = core.weight_treatments[name](learner, learner - SHIFT, mask)
        torch.testing.assert_close(weights, torch.full_like(weights, math.exp(SHIFT)))
    assert (core.weight_treatments["sequence_truncate"](learner, learner - SHIFT, mask) == 8.0).all()


@pytest.mark.parametrize("name", core.policy_losses)
def test_case_08_the_reported_ratio_moves(name):
    learner = -torch.rand(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    advantages, mask = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64), torch.ones(3, 5)
    reported = [core.policy_losses[name](learner, learner - shift, advantages, mask)[1] for shift in (0.0, SHIFT)]
    assert float(reported[0]["ratio_mean"]) == pytest.approx(1.0)
    assert float(reported[1]["ratio_mean"]) == pytest.approx(math.exp(SHIFT))
    assert float(reported[1]["log_ratio_abs_mean"]) == pytest.approx(SHIFT)
