"""A masked position whose sampler log-prob is -1e4 or -inf: identical to dropping the column."""

from __future__ import annotations

import math

import pytest
import torch

from vcpo import core

DROPPED = 3


@pytest.fixture
def tables() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    learner, sampler = (-torch.rand(4, 6, generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[:, DROPPED] = False
    return learner, sampler, torch.tensor([1.0, -1.0, 2.0, -0.5], dtype=torch.float64), mask


def without(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[:, :DROPPED], x[:, DROPPED + 1 :]], 1)


@pytest.mark.parametrize("value", [-1e4, -math.inf])
@pytest.mark.parametrize("aggregation", core.aggregations)
@pytest.mark.parametrize("name", core.policy_losses)
def test_case_02_loss_and_gradient_equal_those_without_the_column(tables, name, aggregation, value):
    learner, sampler, advantages, mask = tables
    sampler[:, DROPPED] = value
    results = []
    for cut in (lambda x: x, without):
        x = cut(learner).clone().requires_grad_()
        loss, metrics = core.policy_losses[name](
            x, cut(sampler), advantages, cut(mask), aggregation=aggregation, length=5
        )
        loss.backward()
        assert x.grad is not None
        results.append((loss.detach(), x.grad, metrics))
    (loss, grad, metrics), (short_loss, short_grad, short_metrics) = results
    torch.testing.assert_close(loss, short_loss, rtol=1e-14, atol=1e-16)
    torch.testing.assert_close(without(grad), short_grad, rtol=1e-14, atol=1e-16)
    assert (grad[:, DROPPED] == 0).all()
    torch.testing.assert_close(metrics, short_metrics, rtol=1e-14, atol=1e-16)


@pytest.mark.parametrize("value", [-1e4, -math.inf])
def test_case_02_weights_and_ess_equal_those_without_the_column(tables, value):
    learner, sampler, _, mask = tables
    sampler[:, DROPPED] = value
    lw = core.trajectory_log_weights(learner, sampler, mask)
    short = core.trajectory_log_weights(without(learner), without(sampler), without(mask))
    torch.testing.assert_close(lw, short, rtol=1e-14, atol=1e-16)
    assert lw.abs().max() < 10
    for name, treatment in core.weight_treatments.items():
        weights = treatment(learner, sampler, mask)
        weights = without(weights) if weights.shape == mask.shape else weights
        expected = treatment(without(learner), without(sampler), without(mask))
        torch.testing.assert_close(weights, expected, rtol=1e-14, atol=1e-16, msg=name)
