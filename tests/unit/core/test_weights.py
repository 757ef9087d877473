from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vcpo import core

NAN, INF = math.nan, math.inf


def rows(*log_ratios: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Learner, sampler and mask such that the log ratios are these; None-like NaN columns are written by the caller."""
    learner = torch.tensor(log_ratios, dtype=torch.float64)
    return learner, torch.zeros_like(learner), torch.ones_like(learner, dtype=torch.bool)


def test_log_weight_is_the_masked_sum_of_the_log_ratios():
    learner = torch.tensor([[-1.0, -2.0, NAN], [-1.0, -1.0, -1.0], [INF, NAN, -INF]])
    sampler = torch.tensor([[-1.5, -1.0, 7.0], [-2.0, NAN, -3.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])
    assert core.log_ratios(learner, sampler, mask).tolist() == [[0.5, -1.0, 0.0], [1.0, 0.0, 2.0], [0.0, 0.0, 0.0]]
    assert core.trajectory_log_weights(learner, sampler, mask).tolist() == [-0.5, 3.0, 0.0]


def test_log_weights_carry_the_learners_gradient_and_none_at_masked_positions():
    learner = torch.tensor([[-1.0, NAN, -INF]], requires_grad=True)
    mask = torch.tensor([[True, False, False]])
    core.trajectory_log_weights(learner, torch.zeros(1, 3), mask).sum().backward()
    assert learner.grad is not None
    assert learner.grad.tolist() == [[1.0, 0.0, 0.0]]


def test_half_precision_is_summed_in_fp32():
    learner = torch.full((1, 400), -0.5, dtype=torch.bfloat16)
    sampler = torch.full((1, 400), -0.5078125, dtype=torch.bfloat16)
    lw = core.trajectory_log_weights(learner, sampler, torch.ones(1, 400))
    assert lw.dtype == torch.float32
    assert lw.item() == 400 * 0.0078125


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_truncated_weights_of_extreme_and_missing_numbers(dtype):
    lw = torch.tensor([0.0, math.log(3), math.log(8), 500.0, 1e30, -500.0, NAN, INF, -INF], dtype=dtype)
    weights = core.truncated_weights(lw, 8.0)
    assert weights[[0, 2, 3, 4]].tolist() == [1.0, 8.0, 8.0, 8.0]
    torch.testing.assert_close(weights[1].item(), 3.0, rtol=1e-6, atol=0)
    assert weights[5] == torch.tensor(-500.0, dtype=dtype).exp()
    assert weights[6:].tolist() == [0.0, 0.0, 0.0]


def test_truncated_weights_are_detached():
    assert not core.truncated_weights(torch.zeros(2, requires_grad=True), 8.0).requires_grad


@pytest.mark.parametrize("cap", [0.0, -1.0, INF, NAN])
def test_a_cap_must_be_positive_and_finite(cap):
    with pytest.raises(ValueError, match="cap > 0"):
        core.truncated_weights(torch.zeros(2), cap)
    with pytest.raises(ValueError, match="cap > 0"):
        core.weight_treatments["token_mask"](*rows([0.0]), cap=cap)


def test_bounds_must_be_in_order():
    with pytest.raises(ValueError, match="low <= cap"):
        core.weight_treatments["sequence_truncate"](*rows([0.0]), cap=2.0, low=3.0)


def test_quarantine_is_nan_and_plus_inf():
    lw = torch.tensor([NAN, INF, -INF, 0.0, 1e30])
    assert core.quarantined(lw).tolist() == [True, True, False, False, False]
    learner, sampler, mask = rows([0.0, NAN], [INF, 1.0], [-INF, 1.0], [-INF, INF])
    assert core.row_is_quarantined(learner, sampler, mask).tolist() == [True, True, False, True]


LOG2 = math.log(2.0)
EXPECTED = {
    # rows: weights 1/4 x 2, 4 x 4, 2 x 1
    "none": [[1.0], [1.0], [1.0]],
    "sequence_truncate": [[0.5], [3.0], [2.0]],
    "sequence_mask": [[0.5], [0.0], [2.0]],
    "token_truncate": [[0.5, 2.0], [3.0, 3.0], [2.0, 1.0]],
    "token_mask": [[0.0, 2.0], [0.0, 0.0], [2.0, 1.0]],
    "geometric_truncate": [[0.5**0.5], [3.0], [2.0**0.5]],
    "geometric_mask": [[0.5**0.5], [0.0], [2.0**0.5]],
}


@pytest.mark.parametrize("name", core.weight_treatments)
def test_treatments_by_hand(name):
    learner, sampler, mask = rows([-2 * LOG2, LOG2], [2 * LOG2, 2 * LOG2], [LOG2, 0.0])
    weights = core.weight_treatments[name](learner, sampler, mask, cap=3.0, low=0.5)
    torch.testing.assert_close(weights, torch.tensor(EXPECTED[name], dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", core.weight_treatments)
@pytest.mark.parametrize("low", [0.0, 0.5])
def test_treatments_are_finite_detached_and_zero_for_bad_and_empty_rows(name, low):
    learner, sampler, mask = rows(
        [0.1, 0.2, NAN],
        [500.0, 500.0, NAN],
        [NAN, 0.0, NAN],
        [INF, 0.0, NAN],
        [INF, -INF, NAN],
        [-INF, 0.0, NAN],
        [NAN] * 3,
    )
    mask[:, 2] = False
    mask[6] = False
    learner.requires_grad_()
    weights = core.weight_treatments[name](learner, sampler, mask, low=low)
    assert weights.shape in ((7, 1), (7, 3))
    assert not weights.requires_grad
    assert weights.isfinite().all()
    assert ((weights >= 0) & (weights <= 8.0)).all()
    assert (weights[[2, 3, 4, 6]] == 0).all()
    assert weights[0, 0] > 0
    if weights.shape[1] == 3:
        assert (weights[:, 2] == 0).all()


@pytest.mark.parametrize("name", [name for name in core.weight_treatments if name != "none"])
def test_equal_policies_weigh_one(name):
    learner = -torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    weights = core.weight_treatments[name](learner, learner.clone(), torch.ones(3, 5))
    assert (weights == 1).all()


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="sampler_logprobs must have the mask's shape"):
        core.log_ratios(torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"log_weights must be \[n\]"):
        core.truncated_weights(torch.zeros(2, 1), 8.0)
