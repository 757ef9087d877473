"""Law 4: 1, 2, 4, 8 micro-batches and 1 or 2 ranks give the same ess, baselines, loss and gradient."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from vcpo import Batch, VarianceControl, core
from vcpo.score_norms import parts as parts_of_layers

N = 16
AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
SETTINGS = [
    {"score_norms": norms, "baseline": baseline, "weights": weights, "max_grad_norm": None}
    for norms, baseline, weights in [
        ("logit", "optimal", "paper"),
        ("length", "optimal", "estimator"),
        ("loop", "optimal", "reference"),
        ("two_pass", "optimal", "paper"),
        ("exact", "optimal", "estimator"),
        ("exact", "optimal", "paper"),
        ("length", "group_mean", "paper"),
        ("length", "leave_one_out", "paper"),
        ("length", "length_weighted", "paper"),
    ]
]


def run(model, batch, parts, **settings):
    """Report and gradient of one optimizer batch handed in as `parts`."""
    caught = {}

    class Catch(torch.optim.SGD):
        def step(self, closure=None):
            caught.update({n: p.grad.clone() for n, p in model.named_parameters()})
            return super().step(closure)

    vc = VarianceControl(model, Catch(model.parameters(), lr=0.0), **settings)
    with vc.batch(batch.rewards, batch.group_ids, batch.action_lengths):
        for part in parts:
            micro = batch.rows(part)
            with vc.forward():
                logits = model(micro.input_ids, micro.attention_mask)
            lp, score_sq = core.token_logprobs(logits, micro.input_ids, with_score_sq=True)
            vc.backward(lp, micro.sampler_logprobs, micro.action_mask, rows=part, score_sq=score_sq)
    return vc.step(), caught


def close(a, b, rtol):
    """Within rtol of the gradient's own size: entries that cancel to nothing have no relative error of their own."""
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=rtol * float(a[name].abs().max()))


def same_report(a, b, rtol):
    for key, value in a.to_dict().items():
        other = b.to_dict()[key]
        if isinstance(value, float):
            assert other == pytest.approx(value, rel=rtol, abs=rtol), key
        else:
            assert other == value, key


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"{s['baseline']}-{s['score_norms']}-{s['weights']}")
@examples(max_examples=8)
@given(order=st.permutations(range(N)), pieces=st.sampled_from([1, 2, 4, 8]))
def test_micro_batches_in_any_order(make_toy_policy, make_toy_batch, settings, aggregation, order, pieces):
    model = make_toy_policy()
    batch = make_toy_batch(model, groups=4, spread=1.5)
    settings = {**settings, "aggregation": aggregation, "constant_length": 9, "cap": 2.0}
    whole = run(model, batch, [torch.arange(N)], **settings)
    cut = run(model, batch, torch.tensor(order).chunk(pieces), **settings)
    close(whole[1], cut[1], 1e-12)
    same_report(whole[0], cut[0], 1e-12)


@pytest.mark.parametrize("kappa", [0.0, 1e9], ids=["fused", "retain"])
@examples(max_examples=8)
@given(order=st.permutations(range(N)), pieces=st.sampled_from([1, 2, 4, 8]))
def test_a_single_pass_in_either_way(make_toy_policy, make_toy_batch, kappa, order, pieces):
    """Exact norms, every layer kept or every layer written out: the gradient of the two passes."""
    model = make_toy_policy()
    batch = make_toy_batch(model, groups=4, spread=1.5)
    two = run(model, batch, [torch.arange(N)], score_norms="two_pass", max_grad_norm=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts_of_layers, "KAPPA", kappa)
        one = run(model, batch, torch.tensor(order).chunk(pieces), score_norms="exact", max_grad_norm=None)
    close(two[1], one[1], 1e-12)
    same_report(two[0], one[0], 1e-12)


@pytest.mark.parametrize("pieces", [2, 4, 8])
def test_in_single_precision(make_toy_policy, make_toy_batch, pieces):
    batch = make_toy_batch(make_toy_policy(dtype=torch.float32), groups=4, dtype=torch.float32)
    shuffled = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    whole = run(make_toy_policy(dtype=torch.float32), batch, [torch.arange(N)], score_norms="logit")
    cut = run(make_toy_policy(dtype=torch.float32), batch, shuffled.chunk(pieces), score_norms="logit")
    close(whole[1], cut[1], 1e-6)
    same_report(whole[0], cut[0], 2e-6)


def test_half_precision_weights_get_the_gradient_of_wide_sums(make_toy_policy, make_toy_batch):
    """bf16: up to the rounding of the forward, whether groups are whole or cut."""
    policy = make_toy_policy(dtype=torch.bfloat16)
    batch = make_toy_batch(policy, groups=4, dtype=torch.float32)
    wide = run(make_toy_policy(dtype=torch.bfloat16).float(), batch, [torch.arange(N)], score_norms="exact")[1]
    for parts in ([torch.arange(N)], torch.arange(N).roll(3).chunk(8)):
        half = run(policy, batch, parts, score_norms="exact")[1]
        for name, g in half.items():
            assert g.dtype == torch.bfloat16
            assert float((g.float() - wide[name]).norm()) < 0.03 * float(wide[name].norm()), name


@pytest.mark.parametrize("norms", ["logit", "exact"])
@examples(max_examples=40)
@example(cut=[1])  # what is left of the first group begins with a row that carries no gradient
@given(cut=st.lists(st.integers(1, N - 1), max_size=5, unique=True))
def test_any_contiguous_cut_with_hard_rows(make_toy_policy, make_toy_batch, norms, cut):
    """Unscorable, quarantined and zero-variance rows among them: the whole and the parts still agree."""
    model = make_toy_policy()
    plain = make_toy_batch(model, groups=4)
    rewards, sampler = plain.rewards.clone(), plain.sampler_logprobs.clone()
    rewards[1] = torch.nan
    rewards[4:8] = 0.5
    first_action = int(plain.action_mask[9].int().argmax())
    sampler[9, first_action] = -torch.inf
    sampler[13, int(plain.action_mask[13].int().argmax())] = torch.nan
    batch = Batch(**{**plain.__dict__, "rewards": rewards, "sampler_logprobs": sampler})
    bounds = [0, *sorted(cut), N]
    parts = [torch.arange(a, b) for a, b in itertools.pairwise(bounds)]
    whole = run(model, batch, [torch.arange(N)], score_norms=norms)
    pieces = run(model, batch, parts, score_norms=norms)
    close(whole[1], pieces[1], 1e-12)
    same_report(whole[0], pieces[0], 1e-12)
    assert (whole[0].quarantined, whole[0].unscorable, whole[0].zero_variance_groups) == (2, 1, 1)


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]], 2),
        ([[0, 1, 2], [3, 4, 5, 6, 7, 8, 9, 10, 11]], 3),
        ([list(range(12)), []], 1),
    ],
    ids=["interleaved", "uneven", "one-rank-idle"],
)
def test_two_ranks(make_toy_policy, make_toy_batch, run_on_two_ranks, rows, parts):
    one = [run(make_toy_policy(), make_toy_batch(make_toy_policy()), [torch.arange(12)], **s) for s in SETTINGS]
    ranks = run_on_two_ranks({"settings": SETTINGS, "rows": rows, "parts": parts})
    for i, (report, gradient) in enumerate(one):
        for rank in ranks:
            close(gradient, {n: torch.tensor(g, dtype=torch.float64) for n, g in rank[i]["gradient"].items()}, 1e-12)
            assert rank[i]["report"]["ess_ratio"] == pytest.approx(report.ess_ratio, rel=1e-12)
            assert rank[i]["report"]["loss"] == pytest.approx(report.loss, rel=1e-11)
            assert rank[i]["report"]["lr_scale"] == pytest.approx(report.lr_scale, rel=1e-12)
        assert ranks[0][i]["parameters"] == ranks[1][i]["parameters"]
