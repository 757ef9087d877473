"""Row 5: an ess averaged over micro-batches reads 1.0; merged moments read the truth, on any number of parts and ranks."""

from __future__ import annotations

import math

import pytest
import torch

from vcpo import Batch, VarianceControl, core


@pytest.mark.parametrize("pieces", [1, 2, 4, 8])
def test_case_05_one_ess_for_the_optimizer_batch(make_toy_policy, make_toy_batch, pieces):
    model = make_toy_policy()
    batch = make_toy_batch(model, groups=2, spread=0.0)
    # Weights [1,1,1,1] in the first half and [2,2,2,2] in the second, by shifting one action's sampler log-prob.
    sampler = batch.sampler_logprobs.clone()
    for row in range(4, 8):
        sampler[row, int(batch.action_mask[row].int().argmax())] -= math.log(2)
    batch = Batch(**{**batch.__dict__, "sampler_logprobs": sampler})
    vc = VarianceControl(model, torch.optim.SGD(model.parameters(), lr=0.1), score_norms="length")
    with vc.batch(batch.rewards, batch.group_ids, batch.action_lengths):
        for rows in torch.arange(8).chunk(pieces):
            micro = batch.rows(rows)
            lp = core.token_logprobs(model(micro.input_ids, micro.attention_mask), micro.input_ids)
            vc.backward(lp, micro.sampler_logprobs, micro.action_mask, rows=rows)
    report = vc.step()
    assert report.ess == pytest.approx(7.2, rel=1e-12)
    assert report.ess_ratio == pytest.approx(0.9, rel=1e-12)
