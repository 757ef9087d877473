from __future__ import annotations

import math

import pytest
import torch

from vcpo import core

X = torch.tensor([[1.0, math.nan, 3.0], [math.inf, -math.inf, math.nan]])
MASK = torch.tensor([[1, 0, 1], [0, 0, 0]])


def test_sum_and_mean_leave_masked_values_out():
    assert core.masked_sum(X, MASK).tolist() == [4.0, 0.0]
    assert core.masked_mean(X, MASK).tolist() == [2.0, 0.0]
    assert core.masked_sum(X, MASK, dim=0).tolist() == [1.0, 0.0, 3.0]


def test_gradient_is_exactly_zero_where_masked():
    x = X.clone().requires_grad_()
    (core.masked_mean(x, MASK) * torch.tensor([2.0, 5.0])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]


def test_fill_is_what_stands_at_masked_positions():
    assert core.masked_fill(X, MASK, -math.inf).tolist() == [[1.0, -math.inf, 3.0], [-math.inf] * 3]


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"learner_logprobs must have the mask's shape \(2, 3\), got \(3, 2\)"):
        core.check_rows(MASK, learner_logprobs=X.T)
    with pytest.raises(ValueError, match=r"mask must be \[n, s\].*\(3,\)"):
        core.check_rows(MASK[0])
    with pytest.raises(ValueError, match=r"rewards must be \[n\].*\(2, 3\)"):
        core.check_vector(rewards=X)
    with pytest.raises(ValueError, match=r"rewards \[3\], lengths \[2\]"):
        core.check_vector(rewards=X[0], lengths=X[:, 0])
