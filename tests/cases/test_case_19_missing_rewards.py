"""Missing rewards, groups of one, groups without difference and batches without a token, in the core: finite, and counted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from vcpo.core.advantages import advantages, group_scale, zero_variance
from vcpo.core.aggregation import aggregations
from vcpo.core.baselines import baselines
from vcpo.core.losses import policy_losses

NAN = math.nan


def estimate(
    name: str, rewards: Tensor, groups: Tensor, lw: Tensor | None = None, scale_rewards: str = "group"
) -> Tensor:
    n = len(rewards)
    baseline = baselines[name](
        rewards,
        groups,
        log_weights=torch.zeros(n) if lw is None else lw,
        score_norms=torch.arange(1.0, n + 1),
        lengths=torch.arange(1, n + 1),
    )
    assert baseline.isfinite().all()
    scale = group_scale(rewards, groups, scale_rewards=scale_rewards)
    assert (scale > 0).all()
    return advantages(rewards, baseline, scale)


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "mean", "none"])
@pytest.mark.parametrize("name", baselines)
class TestEveryBaseline:
    def test_case_19_missing_rewards_are_unscorable(self, name: str, scale_rewards: str) -> None:
        # rewards [1, None, 0, NaN]: None travels as NaN
        rewards, groups = torch.tensor([1, NAN, 0, NAN]), torch.tensor([3, 3, 3, 3])
        adv = estimate(name, rewards, groups, scale_rewards=scale_rewards)
        assert adv.isfinite().all()
        assert adv[1] == adv[3] == 0
        alone = estimate(name, rewards[[0, 2]], groups[[0, 2]], scale_rewards=scale_rewards)
        if name in ("group_mean", "leave_one_out", "batch_mean", "second_best"):  # no per-row weights of the test's own
            torch.testing.assert_close(adv[[0, 2]], alone)
        assert adv[0] > 0 >= adv[2]
        assert int((~rewards.isfinite()).sum()) == 2

    def test_case_19_all_rewards_missing(self, name: str, scale_rewards: str) -> None:
        rewards, groups = torch.full((4,), NAN), torch.tensor([0, 0, 1, 1])
        assert not estimate(name, rewards, groups, scale_rewards=scale_rewards).any()
        assert zero_variance(rewards, groups).all()

    def test_case_19_group_of_one(self, name: str, scale_rewards: str) -> None:
        adv = estimate(name, torch.tensor([0.7]), torch.tensor([5]), scale_rewards=scale_rewards)
        assert adv.tolist() == [0]
        assert zero_variance(torch.tensor([0.7]), torch.tensor([5])).tolist() == [True]

    def test_case_19_zero_variance_group(self, name: str, scale_rewards: str) -> None:
        rewards, groups = torch.full((6,), 0.1), torch.tensor([2, 2, 2, 2, 2, 2])
        lw = torch.linspace(-4, 4, 6)
        assert not estimate(name, rewards, groups, lw, scale_rewards).any()
        assert zero_variance(rewards, groups).all()

    def test_case_19_group_of_one_beside_a_group_of_two(self, name: str, scale_rewards: str) -> None:
        rewards, groups = torch.tensor([0.7, 1, 0]), torch.tensor([5, 1, 1])
        adv = estimate(name, rewards, groups, scale_rewards=scale_rewards)
        assert adv.isfinite().all()
        if name != "batch_mean":
            assert adv[0] == 0
        assert adv[1] > adv[2]
        assert zero_variance(rewards, groups).tolist() == [True, False, False]


@pytest.mark.parametrize("aggregation", aggregations)
@pytest.mark.parametrize("name", policy_losses)
@pytest.mark.parametrize("normalizer", [None, 0, 4])
def test_case_19_all_false_mask(name: str, aggregation: str, normalizer: float | None) -> None:
    learner = torch.full((4, 3), NAN, requires_grad=True)
    params: dict[str, Any] = {"length": 7.0} if aggregation.endswith("norm") else {}
    loss, metrics = policy_losses[name](
        learner,
        torch.full((4, 3), -math.inf),
        torch.ones(4),
        torch.zeros(4, 3),
        aggregation=aggregation,
        normalizer=normalizer,
        **params,
    )
    loss.backward()
    assert loss == 0
    assert learner.grad is not None
    assert not learner.grad.any()
    assert all(m.isfinite() for m in metrics.values())
    assert metrics["quarantined_share"] == 0
