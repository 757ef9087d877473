"""The calibrated reference, and figures of the report that no gradient shows."""

from __future__ import annotations

import math

import pytest
import torch

from vcpo import Batch, VarianceControl, core
from vcpo.learner.reference import Reference


def moments(*log_weights):
    found = core.WeightMoments.from_log_weights(torch.tensor(log_weights, dtype=torch.float64))
    return float(found.log_m1), float(found.log_m2), found.count


def test_the_pool_forgets_by_nine_tenths_a_step():
    reference = Reference("auto")
    spread, even = moments(1.5, 0.0, 0.0, 0.0), moments(0.0, 0.0, 0.0, 0.0)
    reference.observe(*spread, batch_size=4)
    first = reference.value
    assert first == pytest.approx(math.exp(2 * spread[0] - spread[1]) / 4)
    reference.observe(*even, batch_size=4)
    m1 = 0.9 * math.exp(spread[0]) + 4
    m2 = 0.9 * math.exp(spread[1]) + 4
    assert reference.value == pytest.approx(m1**2 / m2 / (0.9 * 4 + 4))
    assert first < reference.value < 1.0


def test_it_is_one_until_a_whole_batch_was_seen_and_stays_within_its_bounds():
    reference = Reference("auto")
    reference.observe(*moments(3.0, 0.0), batch_size=4)
    assert reference.value == 1.0
    with pytest.warns(UserWarning, match="at lag 0"):
        reference.observe(*moments(9.0, 0.0, 0.0, 0.0), batch_size=4)
    assert reference.value == 0.5
    fixed = Reference(0.55)
    fixed.observe(*moments(9.0, 0.0), batch_size=2)
    assert fixed.value == 0.55


def test_score_bias_is_the_share_that_truncation_cuts_away(make_toy_policy, make_toy_batch, one_step):
    model = make_toy_policy()
    batch = make_toy_batch(model, spread=3.0)
    with torch.no_grad():
        lp = core.token_logprobs(model(batch.input_ids, batch.attention_mask), batch.input_ids)
    w = core.trajectory_log_weights(lp, batch.sampler_logprobs, batch.action_mask).exp()
    s = batch.action_lengths.double().sqrt()
    report, _ = one_step(model, batch, score_norms="length", cap=1.2)
    assert report.score_bias == pytest.approx(float(((w - w.clamp(max=1.2)) * s).sum() / (w * s).sum()), rel=1e-10)
    assert report.score_bias > 0.01
    untouched, _ = one_step(make_toy_policy(), batch, score_norms="length", cap=1e9)
    assert untouched.score_bias == pytest.approx(0.0, abs=1e-12)


def test_a_row_of_weight_zero_has_no_part_in_the_gradient_of_a_token_treatment(
    make_toy_policy, make_toy_batch, one_step
):
    """Its other tokens have ordinary ratios, but the trajectory as a whole cannot happen under the learner's view."""
    batch = make_toy_batch(make_toy_policy())
    row = int(batch.action_lengths.argmax())
    sampler = batch.sampler_logprobs.clone()
    sampler[row, int(batch.action_mask[row].int().argmax())] = torch.inf
    zero = Batch(**{**batch.__dict__, "sampler_logprobs": sampler})
    lost = sampler.clone()
    lost[row] = torch.nan
    settings = {"weight_treatment": "token_truncate", "baseline": "group_mean", "step_control": "none"}
    report, with_zero = one_step(make_toy_policy(), zero, **settings)
    _, without = one_step(make_toy_policy(), Batch(**{**batch.__dict__, "sampler_logprobs": lost}), **settings)
    assert report.quarantined == 0
    for name, value in without.items():
        torch.testing.assert_close(with_zero[name], value, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "length_weighted"])
def test_rounding_gives_a_zero_variance_group_no_gradient(make_toy_policy, make_toy_batch, one_step, baseline):
    batch = make_toy_batch(make_toy_policy(), groups=2, members=7)
    flat = Batch(**{**batch.__dict__, "rewards": torch.full_like(batch.rewards, 0.1)})
    report, gradient = one_step(make_toy_policy(), flat, baseline=baseline)
    assert report.zero_variance_groups == 2
    assert all(not bool(g.any()) for g in gradient.values())


def test_the_drop_in_names_what_it_needs(make_toy_policy):
    model = make_toy_policy()
    vc = VarianceControl(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="no batch is open"):
        vc.step()
