from __future__ import annotations

import math
from decimal import Decimal, getcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vcpo import core

NAN, INF = math.nan, math.inf
getcontext().prec = 120
ONE = torch.ones(1, 1)


def k3(d: float, dtype: torch.dtype = torch.float64) -> float:
    return core.kl_k3(torch.tensor([[d]], dtype=dtype), torch.zeros(1, 1, dtype=dtype), ONE).item()


@given(st.floats(-600, 600) | st.floats(-1e-3, 1e-3) | st.floats(-0.2, 0.2))
def test_k3_keeps_all_its_digits(d):
    truth = (-Decimal(d)).exp() - 1 + Decimal(d)
    assert k3(d) == pytest.approx(float(truth), rel=1e-14, abs=1e-60)


@given(st.floats(-80, 80, width=32))
def test_k3_is_never_negative_in_fp32(d):
    assert k3(d, torch.float32) >= 0


def test_by_hand():
    log_prob = torch.tensor([[math.log(0.5), math.log(0.25), NAN]], dtype=torch.float64)
    ref = torch.tensor([[math.log(0.25), math.log(0.5), INF]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0]])
    log2 = math.log(2)
    expected = {"k1": [log2, -log2, 0.0], "k2": [log2**2 / 2] * 2 + [0.0], "k3": [log2 - 0.5, 1 - log2, 0.0]}
    assert set(core.divergences) == set(expected)
    for name, values in expected.items():
        per_token = core.divergences[name](log_prob, ref, mask)
        torch.testing.assert_close(per_token, torch.tensor([values], dtype=torch.float64), rtol=1e-14, atol=0)
        assert per_token[0, 2] == 0


@pytest.mark.parametrize("name", core.divergences)
def test_gradients(name):
    d = torch.tensor([[-2.0, -0.05, 0.0, 0.05, 2.0, 60.0, NAN]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0]])
    core.divergences[name](d, torch.zeros_like(d), mask).sum().backward()
    assert d.grad is not None
    x = d.detach()[0, :6]
    expected = {"k1": torch.ones(6, dtype=torch.float64), "k2": x, "k3": -torch.expm1(-x)}[name]
    torch.testing.assert_close(d.grad[0, :6], expected, rtol=1e-12, atol=1e-15)
    assert d.grad[0, 6] == 0


def test_k3_beyond_the_range_is_inf_and_every_finite_value_has_a_finite_gradient():
    d = torch.tensor([[-1000.0, 1000.0, -INF, INF, -80.0, NAN]], requires_grad=True)
    per_token = core.kl_k3(d, torch.zeros_like(d), torch.ones_like(d))
    assert per_token[0, :4].tolist() == [INF, 999.0, INF, INF]
    assert per_token[0, 5].isnan()
    per_token.sum().backward()
    assert d.grad is not None
    finite = per_token.isfinite()
    assert d.grad[finite].isfinite().all()
    assert not d.grad[0, :5].isnan().any()


def test_a_masked_inf_does_not_reach_a_neighbours_gradient():
    d = torch.tensor([[-1000.0, 0.5]], requires_grad=True)
    per_token = core.kl_k3(d, torch.zeros_like(d), torch.tensor([[0, 1]]))
    core.masked_mean(per_token, torch.tensor([[0, 1]])).sum().backward()
    assert d.grad is not None
    assert d.grad[0, 0] == 0
    assert d.grad[0, 1].isfinite()


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="ref_log_prob must have the mask's shape"):
        core.kl_k3(torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2))
