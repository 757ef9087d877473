"""One log ratio of +200 among zeros: loss, gradients and ess stay finite."""

from __future__ import annotations

import pytest
import torch

from vcpo import core


def huge_row() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    sampler = torch.full((4, 8), -1.0)
    learner = sampler.clone()
    sampler[2] -= 25.0  # 8 tokens of 25 nats
    return learner.requires_grad_(), sampler, torch.tensor([1.0, -1.0, 2.0, -0.5]), torch.ones(4, 8)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("aggregation", core.aggregations)
@pytest.mark.parametrize("name", core.policy_losses)
def test_case_01_loss_and_gradients_are_finite(name, aggregation, sign):
    learner, sampler, advantages, mask = huge_row()
    loss, metrics = core.policy_losses[name](
        learner, sampler, sign * advantages, mask, aggregation=aggregation, length=8
    )
    loss.backward()
    assert loss.isfinite()
    assert learner.grad is not None
    assert learner.grad.isfinite().all()
    assert (learner.grad != 0).any()
    assert all(value.isfinite() for value in metrics.values()), metrics


@pytest.mark.parametrize("treatment", core.weight_treatments)
def test_case_01_the_weight_is_bounded_and_the_ess_says_one(treatment):
    learner, sampler, _, mask = huge_row()
    lw = core.trajectory_log_weights(learner.detach(), sampler, mask)
    assert lw.tolist() == [0.0, 0.0, 200.0, 0.0]
    weights = core.weight_treatments[treatment](learner, sampler, mask)
    assert weights.isfinite().all()
    assert weights.max() <= 8.0
    assert float(core.effective_sample_size(lw)) == pytest.approx(1.0)
    assert core.lr_scale(core.ess_ratio(lw)) == pytest.approx(0.5)


def test_case_01_a_single_token_beyond_fp32_gives_the_same_picture():
    learner, sampler, advantages, mask = huge_row()
    sampler[2] = -1.0
    sampler[2, 3] = -201.0
    for name in core.policy_losses:
        learner.grad = None
        loss, _ = core.policy_losses[name](learner, sampler, advantages, mask)
        loss.backward()
        assert learner.grad is not None
        assert loss.isfinite()
        assert learner.grad.isfinite().all()
    assert float(core.ess_ratio(core.trajectory_log_weights(learner.detach(), sampler, mask))) == pytest.approx(0.25)
