"""Comparing baselines on real gradients: the bookkeeping against gradients written out, on a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from vcpo import core, score_norms
from vcpo.bench import proxies
from vcpo.bench.evidence import provenance
from vcpo.bench.proxies import Sketch, measure
from vcpo.bench.proxies_page import proxies_page
from vcpo.bench.proxies_summary import CAP, agreement, baselines, moments, noise_over_signal, summarise
from vcpo.errors import ConfigError
from vcpo.policy import load_policy

TINY = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def rows(make_toy_policy, make_toy_batch):
    """Two prompts of three groups of four, with sketches that keep every coordinate."""
    model = make_toy_policy()
    size = sum(p.numel() for p in model.parameters())
    found = []
    for seed in (0, 1):
        batch = make_toy_batch(model, seed=seed, spread=1.0)
        found.append((model, batch, measure(model, batch, Sketch(size, 0, dimensions=size))))
    return found


def test_norms_and_products_are_the_gradients_own(rows):
    for model, batch, row in rows:
        torch.testing.assert_close(row["exact"], score_norms.loop(model, batch))
        gradients = [score_norms.trajectory_gradient(model, batch, i) for i in range(len(batch))]
        flat = torch.stack([torch.cat([g.flatten() for g in own.values()]) for own in gradients])
        torch.testing.assert_close(row["products"], flat @ flat.t(), rtol=1e-9, atol=1e-9)


def test_moments_of_a_groups_gradient_written_out(rows):
    model, batch, row = rows[0]
    gradients = [score_norms.trajectory_gradient(model, batch, i) for i in range(len(batch))]
    flat = torch.stack([torch.cat([g.flatten() for g in own.values()]) for own in gradients])
    weights = row["log_weights"].exp().clamp(max=CAP)
    groups = batch.group_ids.unique()
    for name, (variance, mean_square) in moments(row).items():
        advantage = weights * (batch.rewards - baselines(row)[name])
        of_groups = torch.stack(
            [(advantage[batch.group_ids == g, None] * flat[batch.group_ids == g]).mean(0) for g in groups]
        )
        assert variance == pytest.approx(float(of_groups.var(0, correction=1).sum()), rel=1e-9), name
        crossed = [float(a @ b) for i, a in enumerate(of_groups) for j, b in enumerate(of_groups) if i != j]
        assert mean_square == pytest.approx(sum(crossed) / len(crossed), rel=1e-9), name


def test_the_baseline_without_the_own_member(rows):
    _, batch, row = rows[0]
    v = (row["log_weights"].exp() * row["exact"]) ** 2
    others = (batch.group_ids == batch.group_ids[0]) & (torch.arange(len(batch)) != 0)
    expected = (v[others] * batch.rewards[others]).sum() / v[others].sum()
    assert float(baselines(row)["exact, leave one out"][0]) == pytest.approx(float(expected))


def test_the_summary(rows):
    own = [row for _, _, row in rows]
    found = summarise(own, draws=50)["summary"]
    ratios = found["variance_over_exact"]
    assert ratios["exact"] == {"ratio": 1.0, "low": 1.0, "high": 1.0}
    total = {name: sum(moments(row)[name][0] for row in own) for name in ratios}
    assert ratios["group mean"]["ratio"] == pytest.approx(total["group mean"] / total["exact"])
    assert ratios["none"]["low"] <= ratios["none"]["ratio"] <= ratios["none"]["high"]
    assert found["sketch_error"] < 1e-9
    lw = torch.cat([row["log_weights"] for row in own])
    assert found["ess_ratio"] == pytest.approx(float(core.ess_ratio(lw)))
    assert agreement(own, "exact")["correlation_of_ranks"] == pytest.approx(1)
    assert agreement(own, "exact")["baseline_moved_mean"] == 0
    assert agreement(own, "weights alone").keys() == {"baseline_moved_mean", "baseline_moved_p95"}


def test_noise_is_variance_over_squared_mean():
    found = noise_over_signal([{"exact": (2.0, 1.0), "other": (3.0, 3.0)}, {"exact": (4.0, 2.0), "other": (9.0, 1.0)}])
    assert found["exact"] == {"ratio": 1.0, "low": 1.0, "high": 1.0}
    assert found["other"]["ratio"] == pytest.approx((12 / 4) / (6 / 3))
    assert found["other"]["low"] == pytest.approx((3 / 3) / 2)
    assert found["other"]["high"] == pytest.approx((9 / 1) / 2)


def test_groups_without_reward_cost_nothing_and_change_nothing(rows, make_toy_batch):
    model, batch, _ = rows[0]
    silent = batch.group_ids == batch.group_ids[0]
    batch = replace(batch, rewards=torch.where(silent, 0.0, batch.rewards))
    size = sum(p.numel() for p in model.parameters())
    found = measure(model, batch, Sketch(size, 0, dimensions=size))
    gradients = [score_norms.trajectory_gradient(model, batch, i) for i in range(len(batch))]
    flat = torch.stack([torch.cat([g.flatten() for g in own.values()]) for own in gradients])
    full = {**found, "exact": flat.norm(dim=1), "products": flat @ flat.t()}
    assert found["exact"].isnan().equal(silent)
    for name, of_full in moments(full).items():
        assert moments(found)[name] == pytest.approx(of_full, rel=1e-9), name
    json.dumps(summarise([found, rows[1][2]], draws=20), allow_nan=False)


def test_a_whole_run_on_a_tiny_model(tmp_path, monkeypatch):
    """Sampling, updates and measuring together; the page holds every baseline at every lag."""
    policy = load_policy(architecture=TINY, tokenizer="characters", alphabet="0123456789+=? ", dtype="float64")
    monkeypatch.setattr(proxies, "load_policy", lambda **_: policy)
    monkeypatch.setattr(proxies, "addition", lambda count, seed: [(f"{i}+1=", str(i % 5 + 1)) for i in range(count)])
    monkeypatch.setattr(proxies, "SKETCH", 64)
    sampled, sample = [], proxies.sample
    monkeypatch.setattr(proxies, "sample", lambda p, own, **how: sampled.append(own) or sample(p, own, **how))
    policy.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    before = {k: v.clone() for k, v in policy.model.state_dict().items()}
    asked = {"prompts": 4, "groups": 3, "members": 4, "lag": (2, 1), "lr": 0.01, "max_new_tokens": 6}
    found = proxies.bench_proxies(tmp_path, **asked, report=lambda _: None)
    every = proxies.addition(8, 0)
    assert sampled == [every[:4], every[4:6], every[6:8]]  # no update sees a prompt that is measured, or one twice
    assert [part["lag"] for part in found["lags"]] == [1, 2]
    assert [len(part["updates"]) for part in found["lags"]] == [1, 2]
    assert any(not torch.equal(v, before[k]) for k, v in policy.model.state_dict().items())
    first, second = (torch.tensor([p["log_weights"] for p in part["prompts"]]) for part in found["lags"])
    assert first.abs().max() > 1e-4
    assert not torch.equal(first, second)
    assert found["lags"][0]["prompts"][0]["rewards"] == found["lags"][1]["prompts"][0]["rewards"]
    page = proxies_page({**provenance("bench"), "model": "tiny", **found})
    assert page.count("| group mean, leave one out |") == 2


def test_rewards_that_never_differ_are_refused(tmp_path, monkeypatch):
    policy = load_policy(architecture=TINY, tokenizer="characters", alphabet="0123456789+=? ", dtype="float64")
    policy.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    monkeypatch.setattr(proxies, "load_policy", lambda **_: policy)
    monkeypatch.setattr(proxies, "addition", lambda count, seed: [("1+1=", "never")] * count)
    with pytest.raises(ConfigError, match="rewards that differ"):
        proxies.bench_proxies(tmp_path, prompts=2, groups=2, members=2, max_new_tokens=3, report=lambda _: None)


def test_only_additions_are_asked():
    found = proxies.addition(20, seed=0)
    assert len(found) == 20
    for question, answer in found:
        a, b = question.removesuffix(" =").split(": ")[1].split(" + ")
        assert int(a) + int(b) == int(answer)
        assert max(int(a), int(b)) < 10


def test_sketches_keep_inner_products_on_average():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 5000, generator=generator)
    found = torch.tensor(
        [
            float(Sketch(5000, seed, dimensions=500)({"a": a}) @ Sketch(5000, seed, dimensions=500)({"a": b}))
            for seed in range(60)
        ]
    )
    standard_error = float(found.std() / 60**0.5)
    assert abs(float(found.mean()) - float(a @ b)) < 4 * standard_error
    assert standard_error < 0.01 * float(a.norm() * b.norm())
