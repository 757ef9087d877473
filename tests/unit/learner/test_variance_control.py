"""VarianceControl against hand-written loops and closed forms."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from vcpo import Batch, VarianceControl, core
from vcpo.errors import BatchError, ConfigError

CUTS = {
    "whole": [range(12)],
    "two": [range(6), range(6, 12)],
    "cut": [range(0, 3), range(3, 7), range(7, 12)],
    "shuffled": [[11, 0, 5, 2], [7, 3, 9, 1], [4, 10, 8, 6]],
    "rows": [[i] for i in range(12)],
}


def reference_gradient(model, batch, *, weights="paper", norms="logit", cap=8.0):
    """The algorithm box in its plainest form: one trajectory at a time, exp space, no micro-batches."""
    parameters = list(model.parameters())
    logits = model(batch.input_ids, batch.attention_mask)
    lp, score_sq = core.token_logprobs(logits, batch.input_ids, with_score_sq=True)
    mask = batch.action_mask
    n = len(batch)
    sums = [lp[i][mask[i]].sum() for i in range(n)]
    grads = [torch.autograd.grad(s, parameters, retain_graph=True) for s in sums]
    w = torch.stack([(lp[i] - batch.sampler_logprobs[i])[mask[i]].sum().detach().exp() for i in range(n)])
    s2 = {
        "logit": torch.stack([score_sq[i][mask[i]].sum() for i in range(n)]),
        "length": mask.sum(1).double(),
        "loop": torch.stack([sum((g**2).sum() for g in gs) for gs in grads]),
        "two_pass": torch.stack([sum((g**2).sum() for g in gs) for gs in grads]),
        "exact": torch.stack([sum((g**2).sum() for g in gs) for gs in grads]),
    }[norms]
    total = [torch.zeros_like(p) for p in parameters]
    for group in batch.group_ids.unique():
        members = (batch.group_ids == group).nonzero().flatten().tolist()
        r = batch.rewards[members]
        lengths = mask[members].sum(1)
        a = {
            "paper": w[members],
            "estimator": w[members].clamp(max=cap) / lengths,
            "reference": w[members] * w[members].clamp(max=cap),
        }
        v = a[weights] ** 2 * s2[members]
        b = (v * r).sum() / v.sum()
        for i in members:
            c = min(float(w[i]), cap) * (batch.rewards[i] - b) / (r.std(correction=0) * mask[i].sum() * n)
            for t, g in zip(total, grads[i], strict=True):
                t -= c * g
    return dict(zip([name for name, _ in model.named_parameters()], total, strict=True))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("norms", ["logit", "length", "loop", "two_pass", "exact"])
def test_gradient_is_the_algorithm_box_however_the_batch_is_cut(make_toy_policy, make_toy_batch, one_step, norms, cut):
    model = make_toy_policy()
    batch = make_toy_batch(model)
    expected = reference_gradient(model, batch, norms=norms)
    report, got = one_step(model, batch, CUTS[cut], score_norms=norms)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-11, atol=1e-15)
    assert report.skipped is None
    assert report.n_trajectories == 12


@pytest.mark.parametrize("weights", ["paper", "estimator", "reference"])
@pytest.mark.parametrize("cut", ["whole", "shuffled"])
def test_the_three_weights_modes(make_toy_policy, make_toy_batch, one_step, weights, cut):
    model = make_toy_policy()
    batch = make_toy_batch(model, spread=3.0)
    expected = reference_gradient(model, batch, weights=weights, cap=1.5)
    _, got = one_step(model, batch, CUTS[cut], score_norms="logit", weights=weights, cap=1.5)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-14)


def test_equals_a_hand_written_loop_after_five_sgd_steps(make_toy_policy, make_toy_batch, clone, feed):
    model = make_toy_policy()
    other = clone(model)
    vc = VarianceControl(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        baseline="group_mean",
        weight_treatment="none",
        step_control="ess",
        reference=1e-9,
        max_grad_norm=None,
    )
    optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
    for step in range(5):
        batch = make_toy_batch(other, seed=step)
        feed(vc, model, batch, CUTS["shuffled"])
        assert vc.step().lr_scale == 1.0
        optimizer.zero_grad()
        lp = core.token_logprobs(other(batch.input_ids, batch.attention_mask), batch.input_ids)
        for group in batch.group_ids.unique():
            rows = batch.group_ids == group
            advantage = (batch.rewards[rows] - batch.rewards[rows].mean()) / batch.rewards[rows].std(correction=0)
            mean_lp = (lp[rows] * batch.action_mask[rows]).sum(1) / batch.action_mask[rows].sum(1)
            (-(advantage * mean_lp).sum() / len(batch)).backward(retain_graph=True)
        optimizer.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_the_step_is_lr_times_the_scale_and_the_lr_is_restored(make_toy_policy, make_toy_batch, clone, one_step):
    model = make_toy_policy()
    before = clone(model)
    batch = make_toy_batch(model, spread=2.0)
    report, gradient = one_step(model, batch, score_norms="length")
    with torch.no_grad():
        lp = core.token_logprobs(before(batch.input_ids, batch.attention_mask), batch.input_ids)
    ratio = float(core.ess_ratio(core.trajectory_log_weights(lp, batch.sampler_logprobs, batch.action_mask)))
    assert report.ess_ratio == pytest.approx(ratio, rel=1e-12)
    assert report.lr_scale == pytest.approx(math.sqrt(ratio), rel=1e-12)
    assert 0.0 < report.lr_scale < 0.95
    assert report.lr == 0.1
    assert report.lr_effective == pytest.approx(0.1 * report.lr_scale)
    for (name, p), q in zip(model.named_parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(q - p, 0.1 * report.lr_scale * gradient[name], rtol=1e-10, atol=1e-15)


def test_apply_gradient_scales_the_clipped_gradient_and_not_the_lr(make_toy_policy, make_toy_batch, one_step):
    model = make_toy_policy()
    batch = make_toy_batch(model, spread=2.0)
    report, gradient = one_step(model, batch, apply="gradient", max_grad_norm=0.01)
    norm = math.sqrt(sum(float((g**2).sum()) for g in gradient.values()))
    assert report.grad_clipped == 1
    assert norm == pytest.approx(0.01 * report.lr_scale, rel=1e-9)
    assert report.lr_effective == report.lr


def test_advantages_with_a_loss_of_your_own_give_the_same_step(make_toy_policy, make_toy_batch, clone, one_step):
    model = make_toy_policy()
    other = clone(model)
    batch = make_toy_batch(model)
    _, expected = one_step(model, batch, score_norms="logit")
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    vc = VarianceControl(other, optimizer, score_norms="logit", max_grad_norm=None)
    with vc.batch(batch.rewards, batch.group_ids, batch.action_lengths):
        for rows in (torch.arange(8), torch.arange(8, 12)):
            micro = batch.rows(rows)
            logits = other(micro.input_ids, micro.attention_mask)
            lp, score_sq = core.token_logprobs(logits, micro.input_ids, with_score_sq=True)
            adv = vc.advantages(lp, micro.sampler_logprobs, micro.action_mask, rows=rows, score_sq=score_sq)
            loss, _ = core.policy_losses["reinforce"](
                lp, micro.sampler_logprobs, adv, micro.action_mask, normalizer=vc.normalizer
            )
            loss.backward()
        got = {n: p.grad.clone() for n, p in other.named_parameters()}
    vc.step()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-11, atol=1e-15)


def test_advantages_refuse_a_cut_group_under_the_optimal_baseline(make_toy_policy, make_toy_batch):
    model = make_toy_policy()
    batch = make_toy_batch(model)
    vc = VarianceControl(model, torch.optim.SGD(model.parameters(), lr=0.1), score_norms="length")
    rows = torch.arange(3)
    micro = batch.rows(rows)
    with (
        pytest.raises(BatchError, match="every group must be whole"),
        vc.batch(batch.rewards, batch.group_ids, batch.action_lengths),
    ):
        lp = core.token_logprobs(model(micro.input_ids, micro.attention_mask), micro.input_ids)
        vc.advantages(lp, micro.sampler_logprobs, micro.action_mask, rows=rows)


def test_rows_that_are_missing_or_come_twice_are_refused(make_toy_policy, make_toy_batch, feed):
    model = make_toy_policy()
    batch = make_toy_batch(model)
    vc = VarianceControl(model, torch.optim.SGD(model.parameters(), lr=0.1), score_norms="length")
    feed(vc, model, batch, [range(11)])
    with pytest.raises(BatchError, match=r"never came: \[11\]"):
        vc.step()
    with pytest.raises(BatchError, match="came twice"):
        feed(vc, model, batch, [range(6), range(5, 12)])
    feed(vc, model, batch, [range(12)])
    assert vc.step().step == 1


def test_another_number_of_actions_than_announced_is_refused(make_toy_policy, make_toy_batch):
    model = make_toy_policy()
    batch = make_toy_batch(model)
    vc = VarianceControl(model, torch.optim.SGD(model.parameters(), lr=0.1), score_norms="length")
    with (
        pytest.raises(BatchError, match="announced"),
        vc.batch(batch.rewards, batch.group_ids, batch.action_lengths + 1),
    ):
        lp = core.token_logprobs(model(batch.input_ids, batch.attention_mask), batch.input_ids)
        vc.backward(lp, batch.sampler_logprobs, batch.action_mask, rows=range(12))


def test_batch_scope_shares_one_baseline(make_toy_policy, make_toy_batch, one_step):
    model = make_toy_policy()
    batch = make_toy_batch(model)
    one_group = Batch(**{**batch.__dict__, "group_ids": torch.zeros_like(batch.group_ids)})
    _, expected = one_step(make_toy_policy(), one_group, scale_rewards="batch")
    for cut in ("whole", "shuffled"):
        _, got = one_step(make_toy_policy(), batch, CUTS[cut], baseline_scope="batch", scale_rewards="batch")
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
)
def test_every_aggregation_is_normalised_by_the_whole_batch(make_toy_policy, make_toy_batch, one_step, aggregation):
    batch = make_toy_batch(make_toy_policy())
    settings = {"aggregation": aggregation, "constant_length": 9, "baseline": "group_mean", "step_control": "none"}
    model = make_toy_policy()
    lp = core.token_logprobs(model(batch.input_ids, batch.attention_mask), batch.input_ids)
    scale = core.group_scale(batch.rewards, batch.group_ids)
    advantage = (batch.rewards - core.group_mean(batch.rewards, batch.group_ids)) / scale
    options = {"length": 9} if aggregation == "seq_mean_token_sum_norm" else {}
    loss, _ = core.policy_losses["reinforce"](
        lp, batch.sampler_logprobs, advantage, batch.action_mask, aggregation=aggregation, **options
    )
    loss.backward()
    for cut in ("whole", "rows"):
        report, got = one_step(make_toy_policy(), batch, CUTS[cut], **settings)
        assert report.loss == pytest.approx(float(loss.detach()), rel=1e-10)
        for name, p in model.named_parameters():
            torch.testing.assert_close(got[name], p.grad, rtol=1e-11, atol=1e-15)


def test_extra_loss_is_added_as_it_is(make_toy_policy, make_toy_batch, clone):
    model = make_toy_policy()
    batch = make_toy_batch(model)
    plain = clone(model)
    for m, extra in ((plain, False), (model, True)):
        vc = VarianceControl(
            m, torch.optim.SGD(m.parameters(), lr=1.0), score_norms="two_pass", max_grad_norm=None, step_control="none"
        )
        with vc.batch(batch.rewards, batch.group_ids, batch.action_lengths):
            with vc.forward():
                logits = m(batch.input_ids, batch.attention_mask)
            lp = core.token_logprobs(logits, batch.input_ids)
            addition = 0.3 * (m.head.weight**2).sum() if extra else None
            vc.backward(lp, batch.sampler_logprobs, batch.action_mask, rows=range(12), extra_loss=addition)
        vc.step()
    start = make_toy_policy().head.weight
    torch.testing.assert_close(plain.head.weight - model.head.weight, 0.6 * start, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"baseline": "best"}, "baseline must be one of optimal"),
        ({"weights": "paper2"}, "weights must be one of"),
        ({"weight_treatment": "tis"}, "weight_treatment must be one of"),
        ({"step_control": "closed"}, "step_control must be one of"),
        ({"reference": 0.0}, "reference must be"),
        ({"max_grad_norm": 0}, "max_grad_norm must be"),
        ({"baseline_scope": "batch"}, "goes with scale_rewards"),
        ({"aggregation": "seq_mean_token_sum_norm"}, "needs constant_length"),
        ({"weights": "estimator", "weight_treatment": "token_truncate"}, "one factor per trajectory"),
    ],
)
def test_settings_that_do_not_exist_or_do_not_go_together(make_toy_policy, settings, message):
    model = make_toy_policy()
    with pytest.raises(ValueError, match=message):
        VarianceControl(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)


def test_state_survives_a_round_trip(make_toy_policy, make_toy_batch, feed):
    model = make_toy_policy()
    batch = make_toy_batch(model)

    def control():
        return VarianceControl(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            reference="auto",
            max_grad_norm="running_median",
            scale_rewards="none",
        )

    vc = control()
    lags = torch.zeros(12, dtype=torch.int64)
    lagged = Batch(**{**batch.__dict__, "policy_lags": lags})
    with pytest.warns(UserWarning, match="sampler and learner compute different"):
        for _ in range(7):
            feed(
                vc,
                model,
                Batch(
                    **{
                        **lagged.__dict__,
                        "sampler_logprobs": batch.sampler_logprobs * 1.6,
                        "rewards": batch.rewards / 9,
                    }
                ),
                [range(12)],
            )
            vc.step()
    other = control()
    other.load_state_dict(vc.state_dict())
    assert other.state_dict() == vc.state_dict()
    assert other.policy_version == 7
    feed(vc, model, lagged, [range(12)])
    a = vc.step()
    feed(other, model, lagged, [range(12)])
    b = other.step()
    assert a == b
    assert a.reference < 0.99
    assert a.grad_clip == pytest.approx(1.5 * statistics.median(vc.state_dict()["clip"]["norms"][:-1]))
    assert a.grad_clip < 1.0


def test_config_error_is_a_value_error_and_names_ddp():
    assert issubclass(ConfigError, ValueError)
