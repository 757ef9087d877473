"""Row 20: lr always 0 in asynchronous mode; a scaled lr saved into the checkpoint; a learning rate of 0 that nobody sees."""

from __future__ import annotations

import pytest
import torch

from vcpo import VarianceControl
from vcpo.learner.learner import Learner
from vcpo.learner.optimizer import make_optimizer, make_schedule, schedule_factor


def learner_for(model, lr=1e-2):
    optimizer = make_optimizer(model, lr=lr)
    schedule = make_schedule(optimizer, "linear", warmup_steps=4, total_steps=20)
    vc = VarianceControl(model, optimizer, score_norms="logit", max_grad_norm="running_median")
    return Learner(model, optimizer, vc, schedule=schedule)


def test_case_20_scheduler_and_scaling_for_ten_steps(make_toy_policy, make_toy_batch):
    model = make_toy_policy()
    learner = learner_for(model)
    factor = schedule_factor("linear", warmup_steps=4, total_steps=20)
    for step in range(10):
        report = learner.update(make_toy_batch(model, seed=step, spread=2.0))
        assert report.lr == pytest.approx(1e-2 * factor(step), rel=1e-12)
        assert 0 < report.lr_effective < report.lr
        assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * factor(step + 1), rel=1e-12)


def test_case_20_save_and_load_mid_run_give_the_same(make_toy_policy, make_toy_batch, clone):
    model = make_toy_policy()
    learner = learner_for(model)
    batches = [make_toy_batch(model, seed=s, spread=2.0) for s in range(10)]
    for batch in batches[:6]:
        learner.update(batch)
    twin_model = clone(model)
    twin = learner_for(twin_model)
    twin.load_state_dict(clone(learner.state_dict()))
    for batch in batches[6:]:
        a, b = learner.update(batch), twin.update(batch)
        assert a.lr_effective == b.lr_effective
        assert a.policy_version == b.policy_version
    for p, q in zip(model.parameters(), twin_model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_case_20_no_step_of_a_schedule_is_spent_at_zero():
    for kind in ("constant", "linear", "cosine"):
        for warmup in (0, 1, 5):
            factor = schedule_factor(kind, warmup_steps=warmup, total_steps=20)
            assert all(0 < factor(step) <= 1 for step in range(40)), (kind, warmup)


def test_case_20_a_learning_rate_of_zero_warns(make_toy_policy, make_toy_batch):
    model = make_toy_policy()
    with pytest.warns(UserWarning, match="the base learning rate is 0"):
        learner_for(model, lr=0.0).update(make_toy_batch(model))
