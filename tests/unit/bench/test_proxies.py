"""Comparing baselines on real gradients: the bookkeeping against gradients written out, on a tiny model."""

from __future__ import annotations

import pytest
import torch

from vcpo import core, score_norms
from vcpo.bench.proxies import CAP, Sketch, agreement, baselines, measure, summarise, variances


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


def test_variance_of_a_groups_gradient_written_out(rows):
    model, batch, row = rows[0]
    gradients = [score_norms.trajectory_gradient(model, batch, i) for i in range(len(batch))]
    flat = torch.stack([torch.cat([g.flatten() for g in own.values()]) for own in gradients])
    weights = row["log_weights"].exp().clamp(max=CAP)
    groups = batch.group_ids.unique()
    for name, found in variances(row).items():
        advantage = weights * (batch.rewards - baselines(row)[name])
        of_groups = torch.stack(
            [(advantage[batch.group_ids == g, None] * flat[batch.group_ids == g]).mean(0) for g in groups]
        )
        assert found == pytest.approx(float(of_groups.var(0, correction=1).sum()), rel=1e-9), name


def test_the_baseline_without_the_own_member(rows):
    _, batch, row = rows[0]
    v = (row["log_weights"].exp() * row["exact"]) ** 2
    others = (batch.group_ids == batch.group_ids[0]) & (torch.arange(len(batch)) != 0)
    expected = (v[others] * batch.rewards[others]).sum() / v[others].sum()
    assert float(baselines(row)["exact, leave one out"][0]) == pytest.approx(float(expected))


def test_the_summary(rows):
    own = [row for _, _, row in rows]
    found = summarise(own, draws=50)
    ratios = found["variance_over_exact"]
    assert ratios["exact"] == {"ratio": 1.0, "low": 1.0, "high": 1.0}
    total = {name: sum(variances(row)[name] for row in own) for name in ratios}
    assert ratios["group mean"]["ratio"] == pytest.approx(total["group mean"] / total["exact"])
    assert ratios["none"]["low"] <= ratios["none"]["ratio"] <= ratios["none"]["high"]
    assert found["sketch_error"] < 1e-9
    lw = torch.cat([row["log_weights"] for row in own])
    assert found["ess_ratio"] == pytest.approx(float(core.ess_ratio(lw)))
    assert -1 <= agreement(own, "length")["correlation_of_log_norms"] <= 1


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
