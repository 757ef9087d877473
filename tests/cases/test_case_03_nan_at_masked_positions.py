"""NaN wherever the mask is 0: loss, KL, ess and baseline are unchanged."""

from __future__ import annotations

import math

import pytest
import torch

from vcpo import core

MASK = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()


def tables(filler: float) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    names = ("learner", "sampler", "reference")
    rows = {name: -torch.rand(4, 4, generator=g, dtype=torch.float64) for name in names}
    return {name: torch.where(MASK, x, filler) for name, x in rows.items()}


@pytest.mark.parametrize("name", core.divergences)
def test_case_03_kl(name):
    results = []
    for filler in (0.0, math.nan):
        t = tables(filler)
        learner = t["learner"].requires_grad_()
        per_token = core.divergences[name](learner, t["reference"], MASK)
        mean = core.masked_mean(per_token.flatten(), MASK.flatten())
        mean.backward()
        assert learner.grad is not None
        results.append((per_token.detach(), mean.detach(), learner.grad))
    for clean, with_nan in zip(*results, strict=True):
        assert torch.equal(clean, with_nan)
        assert with_nan.isfinite().all()


@pytest.mark.parametrize("aggregation", core.aggregations)
@pytest.mark.parametrize("name", core.policy_losses)
def test_case_03_loss(name, aggregation):
    results = []
    for filler in (0.0, math.nan):
        t = tables(filler)
        learner = t["learner"].requires_grad_()
        advantages = torch.where(MASK, torch.tensor([[1.0], [-1.0], [0.5], [2.0]], dtype=torch.float64), filler)
        loss, metrics = core.policy_losses[name](
            learner,
            t["sampler"],
            advantages,
            MASK,
            reference_logprobs=t["reference"],
            aggregation=aggregation,
            length=4,
        )
        loss.backward()
        assert learner.grad is not None
        results.append((loss.detach(), learner.grad, *(metrics[k] for k in sorted(metrics))))
    for clean, with_nan in zip(*results, strict=True):
        assert torch.equal(clean, with_nan)
        assert with_nan.isfinite().all()


def test_case_03_ess_and_baseline():
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 0.25], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    results = []
    for filler in (0.0, math.nan):
        t = tables(filler)
        lw = core.trajectory_log_weights(t["learner"], t["sampler"], MASK)
        norms = core.masked_sum(t["learner"].square(), MASK).sqrt()
        results.append((lw, core.ess_ratio(lw), core.optimal_baseline(rewards, lw, norms, groups)))
    for clean, with_nan in zip(*results, strict=True):
        assert torch.equal(clean, with_nan)
        assert with_nan.isfinite().all()
