"""Row 19: None or NaN rewards, groups of one, all-masked batches: finite, counted, and the step stays sound."""

from __future__ import annotations

import pytest
import torch

from vcpo import Batch, VarianceControl
from vcpo.batch import collate
from vcpo.learner.learner import Learner
from vcpo.types import Prompt, Trajectory, TrajectoryGroup

BASELINES = ["optimal", "group_mean", "leave_one_out", "length_weighted"]


def group(group_id: int, rewards: list[float | None], tokens: int = 3) -> TrajectoryGroup:
    return TrajectoryGroup(
        group_id=group_id,
        prompt=Prompt(prompt_id=f"p{group_id}", text="?"),
        prompt_token_ids=(1, 2),
        trajectories=tuple(
            Trajectory(
                member=i,
                token_ids=tuple((3 + i + t) % 11 for t in range(tokens)),
                sampler_logprobs=(-2.4,) * tokens,
                policy_versions=(0,) * tokens,
                finish_reason="stop",
                reward=r,
            )
            for i, r in enumerate(rewards)
        ),
    )


def update(model, groups: list[TrajectoryGroup], **settings):
    batch = collate(groups, pad_token_id=0, policy_version=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Learner(model, optimizer, VarianceControl(model, optimizer, score_norms="length", **settings)).update(batch)


def finite(model) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("baseline", BASELINES)
def test_case_19_none_and_nan_rewards(make_toy_policy, baseline):
    model = make_toy_policy(dtype=torch.float32)
    report = update(
        model, [group(0, [1.0, None, 0.0, float("nan")]), group(1, [1.0, 0.0, 0.0, 1.0])], baseline=baseline
    )
    assert report.unscorable == 2
    assert report.n_trajectories == 8
    assert report.reward_mean == pytest.approx(0.5)
    assert report.skipped is None
    assert report.grad_norm > 0
    assert finite(model)


@pytest.mark.parametrize("baseline", BASELINES)
def test_case_19_a_group_of_one_teaches_nothing(make_toy_policy, baseline):
    model = make_toy_policy(dtype=torch.float32)
    before = [p.clone() for p in model.parameters()]
    report = update(model, [group(0, [1.0])], baseline=baseline)
    assert report.grad_norm == 0.0
    assert report.advantage_abs_mean == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("baseline", BASELINES)
def test_case_19_a_zero_variance_group_is_counted(make_toy_policy, baseline):
    model = make_toy_policy(dtype=torch.float32)
    report = update(model, [group(0, [1.0, 1.0, 1.0]), group(1, [0.0, 1.0, None])], baseline=baseline)
    assert report.zero_variance_groups == 1
    assert report.n_groups == 2
    assert finite(model)


@pytest.mark.parametrize("baseline", BASELINES)
def test_case_19_an_all_masked_batch_skips_the_step_with_a_reason(make_toy_policy, baseline):
    model = make_toy_policy(dtype=torch.float32)
    before = [p.clone() for p in model.parameters()]
    batch = collate([group(0, [1.0, 0.0])], pad_token_id=0)
    batch = Batch(**{**batch.__dict__, "action_mask": torch.zeros_like(batch.action_mask)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    vc = VarianceControl(model, optimizer, score_norms="length", baseline=baseline)
    report = Learner(model, optimizer, vc).update(batch)
    assert report.empty == 2
    assert report.grad_norm == 0.0
    assert report.skipped == "the batch has no action token"
    assert report.policy_version == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
