from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vcpo import core
from vcpo.core import WeightMoments

NAN, INF = math.nan, math.inf
log_weights = st.lists(st.floats(-700, 700) | st.just(-INF), min_size=1, max_size=40)


def plain(lw: Tensor) -> float:
    """The definition, in weights relative to the largest."""
    if lw.isneginf().all():
        return 0.0
    w = (lw - lw.max()).exp()
    return float(w.sum() ** 2 / w.square().sum())


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@given(log_weights)
def test_ess_is_its_definition(values):
    lw = tensor(values)
    assert float(core.effective_sample_size(lw)) == pytest.approx(plain(lw), rel=1e-10)
    assert float(core.ess_ratio(lw)) == pytest.approx(plain(lw) / len(lw), rel=1e-10)


@given(log_weights)
def test_ess_lies_between_one_and_n(values):
    ess = float(core.effective_sample_size(tensor(values)))
    assert ess == 0 or 1 <= ess <= len(values)
    assert (ess == 0) == all(v == -INF for v in values)


@pytest.mark.parametrize(("n", "value"), [(2, 333.3), (3, -5.0), (2, -77.7)])
def test_rounding_does_not_lift_the_ess_above_n(n, value):
    """2 logsumexp(lw) - logsumexp(2 lw) of equal weights comes out an ulp above log n here."""
    assert float(core.effective_sample_size(torch.full((n,), value, dtype=torch.float64))) <= n
    assert float(core.ess_ratio(torch.full((n,), value, dtype=torch.float64))) <= 1.0


@pytest.mark.parametrize(
    ("values", "ess"),
    [
        ([0.0] * 4 + [math.log(2)] * 4, 7.2),
        ([500.0, -500.0], 1.0),
        ([500.0] * 3, 3.0),
        ([-500.0] * 3, 3.0),
        ([NAN, NAN, NAN], 0.0),
        ([INF, INF], 0.0),
        ([-INF, -INF], 0.0),
        ([NAN, 0.0, INF, 0.0, -INF], 2.0),
        ([-15.0] * 64, 64.0),
        ([1e308, 1e308], 1.0),
        ([-1e308, NAN], 1.0),
    ],
)
def test_ess_of_extreme_and_missing_numbers(values, ess):
    assert float(core.effective_sample_size(tensor(values))) == pytest.approx(ess, rel=1e-12)
    assert float(core.ess_ratio(tensor(values))) == pytest.approx(ess / len(values), rel=1e-12)


def test_result_is_fp64_and_detached_whatever_comes_in():
    lw = torch.zeros(3, dtype=torch.float16, requires_grad=True)
    ess = core.effective_sample_size(lw)
    assert ess.dtype == torch.float64
    assert ess.shape == ()
    assert not ess.requires_grad


@pytest.mark.parametrize("f", [core.effective_sample_size, core.ess_ratio])
def test_nothing_given_is_an_error(f):
    with pytest.raises(ValueError, match="at least one trajectory"):
        f(torch.empty(0))
    with pytest.raises(ValueError, match=r"log_weights must be \[n\]"):
        f(torch.zeros(2, 2))


@given(log_weights, st.lists(st.integers(0, 40), max_size=6))
def test_merging_in_any_cut_equals_the_whole(values, cuts):
    lw = tensor(values)
    edges = [0, *sorted(min(c, len(values)) for c in cuts), len(values)]
    merged = WeightMoments.empty()
    for a, b in pairwise(edges):
        merged = merged.merge(WeightMoments.from_log_weights(lw[a:b]))
    whole = WeightMoments.from_log_weights(lw)
    assert merged.count == whole.count == len(values)
    torch.testing.assert_close(merged.ess_ratio, whole.ess_ratio, rtol=1e-12, atol=0)


@given(log_weights, log_weights)
def test_merge_commutes_and_has_a_neutral_element(a, b):
    left, right = WeightMoments.from_log_weights(tensor(a)), WeightMoments.from_log_weights(tensor(b))
    assert left.merge(right).ess == right.merge(left).ess
    assert left.merge(WeightMoments.empty()).ess == left.ess
    assert left.merge(WeightMoments.empty()).count == left.count


def test_invalid_rows_count_but_weigh_nothing():
    moments = WeightMoments.from_log_weights(tensor([0.0, 0.0, 50.0, NAN]), valid=torch.tensor([1, 1, 0, 0]))
    assert moments.count == 4
    assert float(moments.ess) == pytest.approx(2.0)
    assert float(moments.ess_ratio) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="one number per trajectory"):
        WeightMoments.from_log_weights(torch.zeros(3), valid=torch.ones(2))


def test_no_trajectories_at_all_have_no_ess():
    assert WeightMoments.empty().count == 0
    assert float(WeightMoments.empty().ess) == 0.0
    assert float(WeightMoments.empty().ess_ratio) == 0.0
