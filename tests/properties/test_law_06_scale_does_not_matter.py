"""Law 6: a constant added to all log weights changes no ess and no baseline."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vcpo import core

offsets = st.floats(-600, 600)


@st.composite
def log_weights(draw: st.DrawFn, elements: st.SearchStrategy[float] | None = None) -> Tensor:
    """A spread that an optimizer batch may have, with weights of 0 and quarantined ones among them."""
    if elements is None:
        elements = st.floats(-30, 30) | st.sampled_from([-math.inf, math.nan, math.inf])
    return torch.tensor(draw(st.lists(elements, min_size=1, max_size=24)), dtype=torch.float64)


@given(log_weights(), offsets)
def test_ess_and_step(lw, offset):
    torch.testing.assert_close(
        core.effective_sample_size(lw + offset), core.effective_sample_size(lw), rtol=1e-11, atol=0
    )
    torch.testing.assert_close(core.ess_ratio(lw + offset), core.ess_ratio(lw), rtol=1e-11, atol=0)
    scale = core.lr_scale(core.ess_ratio(lw), reference=0.55)
    assert core.lr_scale(core.ess_ratio(lw + offset), reference=0.55) == pytest.approx(scale, rel=1e-11)


@given(log_weights(), log_weights(), offsets)
def test_merged_moments(a, b, offset):
    whole = core.WeightMoments.from_log_weights(a).merge(core.WeightMoments.from_log_weights(b))
    shifted = core.WeightMoments.from_log_weights(a + offset).merge(core.WeightMoments.from_log_weights(b + offset))
    torch.testing.assert_close(shifted.ess_ratio, whole.ess_ratio, rtol=1e-11, atol=0)


@pytest.mark.parametrize("leave_one_out", [False, True])
@given(lw=log_weights(), offset=offsets, seed=st.integers(0, 2**20))
def test_optimal_baseline(leave_one_out, lw, offset, seed):
    g = torch.Generator().manual_seed(seed)
    n = len(lw)
    rewards, norms = torch.rand(n, generator=g, dtype=torch.float64), torch.rand(n, generator=g, dtype=torch.float64)
    groups = torch.randint(0, 3, (n,), generator=g)

    def baseline(lw: Tensor, norms: Tensor) -> Tensor:
        return core.optimal_baseline(rewards, lw, norms, groups, leave_one_out=leave_one_out)

    torch.testing.assert_close(baseline(lw + offset, norms), baseline(lw, norms), rtol=1e-9, atol=1e-12)
    # The score norms' unit does not matter either.
    torch.testing.assert_close(baseline(lw, norms * 1e-30), baseline(lw, norms), rtol=1e-9, atol=1e-12)


@given(log_weights(st.floats(-0.5, 0.5)), st.sampled_from([-600.0, 600.0]))
def test_optimal_baseline_where_a_sum_of_weights_would_overflow(lw, offset):
    """exp(2 * 600) is no number; the baseline is one."""
    rewards = torch.arange(len(lw), dtype=torch.float64)
    norms, groups = torch.ones_like(lw), torch.zeros(len(lw), dtype=torch.int64)
    v = (2 * lw).exp()
    expected = (v * rewards).sum() / v.sum()
    baseline = core.optimal_baseline(rewards, lw + offset, norms, groups)
    torch.testing.assert_close(baseline, expected.expand(len(lw)), rtol=1e-9, atol=1e-12)
