"""Law 5: whatever stands at a masked position (inf and NaN too) changes nothing, in no value and in no gradient."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vcpo import core

FEW = settings(max_examples=30)  # for tests that are already repeated over a table of functions
GARBAGE = [math.nan, math.inf, -math.inf, 1e30, -1e30, -1e4, 0.0]


@dataclass(frozen=True)
class Tables:
    """Everything the core takes per token; n trajectories in groups of two."""

    mask: Tensor
    learner: Tensor
    sampler: Tensor
    proximal: Tensor
    reference: Tensor
    advantages: Tensor

    @property
    def pair(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.learner, self.sampler, self.mask

    @property
    def group_ids(self) -> Tensor:
        return torch.arange(len(self.mask)) // 2

    @property
    def rewards(self) -> Tensor:
        return torch.arange(len(self.mask), dtype=torch.float64).cos()


def poisoned(x: Tensor, mask: Tensor, g: torch.Generator) -> Tensor:
    """`x` with a garbage number at every masked position."""
    garbage = torch.tensor(GARBAGE, dtype=x.dtype)[torch.randint(0, len(GARBAGE), x.shape, generator=g)]
    return torch.where(mask, x, garbage)


@st.composite
def clean_and_poisoned(draw: st.DrawFn) -> tuple[Tables, Tables]:
    n, s = 2 * draw(st.integers(1, 3)), draw(st.integers(1, 6))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    mask = torch.tensor(draw(st.lists(st.lists(st.booleans(), min_size=s, max_size=s), min_size=n, max_size=n)))
    tables = {
        name: -torch.rand(n, s, generator=g, dtype=torch.float64)
        for name in ("learner", "sampler", "proximal", "reference")
    }
    clean = Tables(mask=mask, advantages=torch.randn(n, s, generator=g, dtype=torch.float64), **tables)
    names = ("learner", "sampler", "proximal", "reference", "advantages")
    return clean, replace(clean, **{name: poisoned(getattr(clean, name), mask, g) for name in names})


def same(a: Tensor, b: Tensor) -> None:
    assert a.isfinite().all()
    assert torch.equal(a, b)


@given(clean_and_poisoned())
def test_log_ratios_log_weights_and_ess(tables):
    clean, bad = tables
    same(core.log_ratios(*clean.pair), core.log_ratios(*bad.pair))
    lw = core.trajectory_log_weights(*clean.pair)
    same(lw, core.trajectory_log_weights(*bad.pair))
    acts = clean.mask.any(1)
    moments = [core.WeightMoments.from_log_weights(core.trajectory_log_weights(*t.pair), acts) for t in tables]
    same(moments[0].ess_ratio, moments[1].ess_ratio)
    assert not core.row_is_quarantined(*bad.pair).any()


@pytest.mark.parametrize("name", core.weight_treatments)
@FEW
@given(tables=clean_and_poisoned())
def test_weight_treatments(name, tables):
    clean, bad = (core.weight_treatments[name](*t.pair) for t in tables)
    same(clean, bad)


@pytest.mark.parametrize("level", ["token", "sum", "mean", "max"])
@pytest.mark.parametrize("measure", ["ratio", "k2", "k3"])
@FEW
@given(tables=clean_and_poisoned())
def test_rejection_and_batch_normalisation(level, measure, tables):
    bounds = {"low": 0.8, "high": 1.4} if measure == "ratio" else {"high": 0.1}
    clean, bad = (core.kept_actions(*t.pair, level=level, measure=measure, **bounds) for t in tables)
    assert torch.equal(clean, bad)
    clean, bad = (core.batch_normalized(t.learner.exp(), t.mask) if t.mask.any() else torch.zeros(1) for t in tables)
    same(clean, bad)


@pytest.mark.parametrize("name", core.divergences)
@FEW
@given(tables=clean_and_poisoned())
def test_divergences(name, tables):
    results = []
    for t in tables:
        learner = t.learner.clone().requires_grad_()
        per_token = core.divergences[name](learner, t.reference, t.mask)
        core.masked_mean(per_token, t.mask).sum().backward()
        assert learner.grad is not None
        assert (learner.grad[~t.mask] == 0).all()
        results.append((per_token.detach(), learner.grad))
    for clean, bad in zip(*results, strict=True):
        same(clean, bad)


@pytest.mark.parametrize("with_advantage_per", ["token", "trajectory"])
@pytest.mark.parametrize("aggregation", core.aggregations)
@pytest.mark.parametrize("name", core.policy_losses)
@FEW
@given(tables=clean_and_poisoned(), with_proximal=st.booleans(), treatment=st.sampled_from([*core.weight_treatments]))
def test_losses_and_aggregations(name, aggregation, with_advantage_per, tables, with_proximal, treatment):
    loss_function = core.policy_losses[name]
    options: dict = {"aggregation": aggregation, "length": 7.0}
    known = inspect.signature(loss_function).parameters
    if "kl_coef" in known:
        options["kl_coef"] = 0.1
    if "weight_treatment" in known and (with_proximal or core.policy_losses[name].linear_in_coefficients):
        options["weight_treatment"] = treatment
    results = []
    for t in tables:
        learner = t.learner.clone().requires_grad_()
        advantages = t.advantages if with_advantage_per == "token" else t.rewards
        loss, metrics = loss_function(
            learner,
            t.sampler,
            advantages,
            t.mask,
            proximal_logprobs=t.proximal if with_proximal else None,
            reference_logprobs=t.reference,
            **options,
        )
        loss.backward()
        assert learner.grad is not None
        assert (learner.grad[~t.mask] == 0).all()
        results.append([loss.detach(), learner.grad, *(metrics[key] for key in sorted(metrics))])
    for clean, bad in zip(*results, strict=True):
        same(clean, bad)


@pytest.mark.parametrize("name", core.baselines)
@FEW
@given(tables=clean_and_poisoned())
def test_baselines(name, tables):
    results = []
    for t in tables:
        lw = core.trajectory_log_weights(*t.pair)
        norms = core.masked_sum(t.learner.square(), t.mask).sqrt()
        lengths = t.mask.sum(1)
        b = core.baselines[name](t.rewards, t.group_ids, log_weights=lw, score_norms=norms, lengths=lengths)
        results.append(b)
    same(*results)


@given(seed=st.integers(0, 2**20), mask=st.lists(st.booleans(), min_size=5, max_size=5))
def test_token_logprobs_and_their_score_norms(seed, mask):
    """A masked token's logits stand one column before it."""
    g = torch.Generator().manual_seed(seed)
    action = torch.tensor([[False, *mask]])
    logits = torch.randn(1, 6, 4, generator=g, dtype=torch.float64)
    ids = torch.randint(0, 4, (1, 6), generator=g)
    unread = torch.cat([action[:, 1:], torch.tensor([[False]])], 1)[..., None].expand_as(logits)
    results = []
    for table in (logits, poisoned(logits, unread, g)):
        x = table.clone().requires_grad_()
        logprobs, score_sq = core.token_logprobs(x, ids, with_score_sq=True)
        core.masked_sum(logprobs, action).sum().backward()
        assert x.grad is not None
        results.append((core.masked_sum(logprobs, action).detach(), core.masked_sum(score_sq, action), x.grad))
    for clean, bad in zip(*results, strict=True):
        same(clean, bad)
