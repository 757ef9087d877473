"""Sums of gradients are wide while they grow and are rounded once."""

from __future__ import annotations

import torch
from torch import nn

from vcpo.score_norms.gradient_sum import GradientSum, ParameterGradients


def small_steps(sums: GradientSum) -> None:
    """1 + 100 x 0.001, where one 0.001 beside 1 is nothing to bf16."""
    sums.slot("w").add_(1.0)
    for _ in range(100):
        sums.add({"w": torch.full((2,), 0.001), "absent": None})


def test_half_precision_gradients_are_summed_wide_and_rounded_once():
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    sums = ParameterGradients({"w": parameter})
    small_steps(sums)
    assert parameter.grad is None
    sums.flush()
    assert parameter.grad.dtype == torch.bfloat16
    assert parameter.grad.tolist() == torch.full((2,), 1.1).bfloat16().tolist()


def test_what_autograd_left_in_grad_is_kept():
    for dtype in (torch.bfloat16, torch.float32):
        parameter = nn.Parameter(torch.zeros(2, dtype=dtype))
        parameter.grad = torch.full((2,), 0.5, dtype=dtype)
        sums = ParameterGradients({"w": parameter})
        sums.slot("w").add_(0.25)
        sums.flush()
        sums.flush()  # nothing is left to add
        assert parameter.grad.tolist() == [0.75, 0.75]


def test_wide_parameters_are_added_to_in_place():
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    sums = ParameterGradients({"w": parameter})
    sums.slot("w").add_(1.0)
    assert parameter.grad.tolist() == [1.0, 1.0]


def test_one_sum_into_another():
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    first, second = GradientSum({"w": parameter}), GradientSum({"w": parameter})
    first.slot("w").add_(2.0)
    first.add_to(second, -0.5)
    first.add_to(second, -0.5)
    assert second.slot("w").tolist() == [-2.0, -2.0]
    assert parameter.grad is None
