"""A per-token ratio of 1.01 over 2,000 tokens in half of the rows: the sequence ess is low although the token ess is 1."""

from __future__ import annotations

import math

import pytest
import torch

from vcpo import core


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_case_11_sequence_ess_is_low_where_token_ess_is_one(dtype):
    rows, tokens = 16, 2000
    sampler = torch.full((rows, tokens), -1.0, dtype=dtype)
    learner = sampler.clone()
    learner[: rows // 2] += math.log(1.01)
    mask = torch.ones(rows, tokens)
    token_ess = core.ess_ratio(core.log_ratios(learner, sampler, mask).flatten())
    sequence_ess = core.ess_ratio(core.trajectory_log_weights(learner, sampler, mask))
    assert float(token_ess) == pytest.approx(0.99997, abs=2e-5)
    assert float(sequence_ess) == pytest.approx(0.5, rel=1e-6)


def test_case_11_rows_that_drift_by_different_amounts_leave_one():
    sampler = torch.full((16, 2000), -1.0, dtype=torch.float64)
    learner = sampler + torch.linspace(0, 0.02, 16, dtype=torch.float64)[:, None]
    mask = torch.ones(16, 2000)
    assert float(core.ess_ratio(core.log_ratios(learner, sampler, mask).flatten())) > 0.999
    assert float(core.effective_sample_size(core.trajectory_log_weights(learner, sampler, mask))) < 1.2
