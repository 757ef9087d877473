"""Rows 8, 9, 11: ratios that always read 1, a denominator recomputed by the learner, a token ess that sees no collapse."""

from __future__ import annotations

import math

import pytest
import torch

from vcpo import Batch, VarianceControl
from vcpo.learner.learner import Learner


def learner_for(model, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return Learner(model, optimizer, VarianceControl(model, optimizer, score_norms="length", **settings))


def test_case_08_shifted_sampler_logprobs_move_the_reported_ratio(make_toy_policy, make_toy_batch):
    model = make_toy_policy()
    batch = make_toy_batch(model, spread=0.0)
    at_zero = learner_for(model).update(batch)
    assert at_zero.log_ratio_abs_mean == pytest.approx(0.0, abs=1e-12)
    shifted = Batch(**{**batch.__dict__, "sampler_logprobs": batch.sampler_logprobs - 0.7})
    moved = learner_for(make_toy_policy()).update(shifted)
    assert moved.log_ratio_abs_mean == pytest.approx(0.7, rel=1e-9)
    assert moved.log_weight_max == pytest.approx(0.7 * int(batch.action_lengths.max()), rel=1e-9)


def test_case_09_after_updates_the_ratio_is_against_the_recorded_logprobs(make_toy_policy, make_toy_batch):
    model = make_toy_policy()
    old = make_toy_batch(model, spread=0.0)
    learner = learner_for(model)
    reports = [learner.update(old) for _ in range(4)]
    assert reports[0].log_ratio_abs_mean == pytest.approx(0.0, abs=1e-12)
    assert reports[3].log_ratio_abs_mean > 1e-4
    assert reports[3].ess_ratio < 1.0


def test_case_11_sequence_ess_sees_what_token_ess_does_not(make_toy_policy):
    """Per-token ratio 1.01 over 2,000 tokens in half of the rows."""
    n, s = 8, 2001
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 11, (n, s), generator=generator)
    attention = torch.ones(n, s, dtype=torch.bool)
    action = attention.clone()
    action[:, 0] = False
    model = make_toy_policy()
    with torch.no_grad():
        from vcpo.core import token_logprobs

        sampler = token_logprobs(model(ids, attention), ids)
    sampler[::2] -= math.log(1.01)
    batch = Batch(ids, attention, action, sampler, torch.rand(n, generator=generator).double(), torch.arange(n) // 4)
    report = learner_for(model).update(batch)
    assert report.ess_ratio_token > 0.98
    assert report.ess_ratio == pytest.approx(0.5, rel=1e-3)


def test_case_10_raw_and_truncated_ess_stand_side_by_side(make_toy_policy, make_toy_batch):
    model = make_toy_policy()
    batch = make_toy_batch(model, groups=16, spread=0.0)
    sampler = batch.sampler_logprobs.clone()
    sampler[0, int(batch.action_mask[0].int().argmax())] -= 30.0
    report = learner_for(model).update(Batch(**{**batch.__dict__, "sampler_logprobs": sampler}))
    assert report.ess_ratio == pytest.approx(1 / 64, rel=1e-6)
    assert report.ess_ratio_truncated > 0.5
    assert report.truncated_share == pytest.approx(1 / 64)
