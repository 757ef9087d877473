"""Law 10: after every step and in every checkpoint the base learning rate equals the schedule's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

import vcpo
from vcpo import Batch, VarianceControl, core
from vcpo.learner.learner import Learner
from vcpo.learner.optimizer import make_optimizer, make_schedule, schedule_factor


def learner_for(model, kind="cosine", **settings):
    optimizer = make_optimizer(model, lr=2e-3, weight_decay=0.1)
    schedule = make_schedule(optimizer, kind, warmup_steps=3, total_steps=10)
    vc = VarianceControl(model, optimizer, score_norms="length", **settings)
    return Learner(model, optimizer, vc, schedule=schedule)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("apply", ["lr", "gradient"])
def test_base_lr_equals_the_schedule_after_every_step_and_in_every_checkpoint(
    make_toy_policy, make_toy_batch, kind, apply
):
    model = make_toy_policy()
    learner = learner_for(model, kind, apply=apply)
    factor = schedule_factor(kind, warmup_steps=3, total_steps=10)
    scales = []
    for step in range(10):
        report = learner.update(make_toy_batch(model, seed=step, spread=2.0))
        scales.append(report.lr_scale)
        assert report.lr == pytest.approx(2e-3 * factor(step), rel=1e-12)
        saved = learner.state_dict()["optimizer"]["param_groups"]
        for group in (*learner.optimizer.param_groups, *saved):
            assert group["lr"] == pytest.approx(2e-3 * factor(step + 1), rel=1e-12)
    assert max(scales) < 1.0


def test_a_skipped_step_and_an_exception_inside_restore_it(make_toy_policy, make_toy_batch):
    model = make_toy_policy()
    learner = learner_for(model, "constant")
    batch = make_toy_batch(model)
    lost = Batch(**{**batch.__dict__, "sampler_logprobs": torch.full_like(batch.sampler_logprobs, torch.nan)})
    before = [p.clone() for p in model.parameters()]
    report = learner.update(lost)
    assert report.skipped == "ess_ratio is 0: no trajectory carries weight"
    assert report.lr_effective == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    with pytest.raises(RuntimeError, match="inside"), vcpo.scaled_lr(optimizer, 0.5):
        assert optimizer.param_groups[0]["lr"] == 0.15
        raise RuntimeError("inside")
    assert optimizer.param_groups[0]["lr"] == 0.3


@examples(max_examples=30)
@given(scale=st.floats(0.0, 1.0), lr=st.floats(1e-8, 10.0), tensor=st.booleans())
def test_scaled_lr_restores_exactly_what_stood_there(make_toy_policy, scale, lr, tensor):
    model = make_toy_policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(lr, dtype=torch.float64) if tensor else lr)
    held = optimizer.param_groups[0]["lr"]
    with vcpo.scaled_lr(optimizer, scale):
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(lr * scale, rel=1e-12)
    assert float(optimizer.param_groups[0]["lr"]) == lr
    assert not tensor or optimizer.param_groups[0]["lr"] is held


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -0.1, 1.0001])
def test_scaled_lr_refuses_what_would_enlarge_a_step(make_toy_policy, scale):
    optimizer = torch.optim.SGD(make_toy_policy().parameters(), lr=0.3)
    with pytest.raises(ValueError, match=r"scale must be a number in \[0, 1\]"), vcpo.scaled_lr(optimizer, scale):
        pass
    assert optimizer.param_groups[0]["lr"] == 0.3


def test_lr_scaling_scales_decoupled_decay_and_gradient_scaling_does_not(make_toy_policy, make_toy_batch):
    """apply="lr" is the paper's: AdamW's decay multiplies the lr, so it shrinks with it."""
    moved = {}
    for apply in ("lr", "gradient"):
        model = make_toy_policy()
        batch = make_toy_batch(model, spread=3.0)
        flat = Batch(**{**batch.__dict__, "rewards": torch.ones_like(batch.rewards)})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        learner = Learner(model, optimizer, VarianceControl(model, optimizer, score_norms="length", apply=apply))
        start = model.head.weight.detach().clone()
        report = learner.update(flat)
        moved[apply] = 1 - float((model.head.weight.detach() / start).mean())
        assert report.grad_norm == 0.0
    assert moved["gradient"] == pytest.approx(0.05, rel=1e-6)
    assert moved["lr"] == pytest.approx(0.05 * report.lr_scale, rel=1e-6)
    assert core.lr_scale(report.ess_ratio) == report.lr_scale
