"""Baselines: hand-computed values, the exceptions, and what may not matter."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vcpo.core.advantages import advantages, group_scale, zero_variance
from vcpo.core.baselines import (
    baselines,
    batch_mean,
    group_mean,
    leave_one_out,
    length_weighted,
    log_baseline_weights,
    optimal_baseline,
    second_best,
    weighted_baseline,
)

NAN, INF = math.nan, math.inf
ONES = torch.ones(4, dtype=torch.float64)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


REWARDS = f64(1, 0, 3, 5, 2)
GROUPS = ids(7, -2, 7, -2, 7)  # unsorted, arbitrary ids: {1, 3, 2} and {0, 5}


def test_group_mean_of_interleaved_groups() -> None:
    assert group_mean(REWARDS, GROUPS).tolist() == [2, 2.5, 2, 2.5, 2]


def test_batch_mean_ignores_the_groups() -> None:
    torch.testing.assert_close(batch_mean(REWARDS, GROUPS), torch.full((5,), 2.2, dtype=torch.float64))


def test_leave_one_out_is_the_mean_of_the_others() -> None:
    assert leave_one_out(REWARDS, GROUPS).tolist() == [2.5, 5, 1.5, 0, 2]


def test_length_weighted() -> None:
    b = length_weighted(REWARDS, GROUPS, lengths=ids(1, 10, 3, 30, 0))
    torch.testing.assert_close(b, f64(2.5, 3.75, 2.5, 3.75, 2.5))


def test_second_best_only_a_clear_winner_differs_from_its_reward() -> None:
    assert second_best(f64(1, 4, 4, 0, 9, 2, NAN), ids(0, 0, 0, 1, 1, 2, 1)).tolist() == [1, 4, 4, 0, 0, 2, 0]


def test_optimal_baseline_by_hand() -> None:
    # w = 1, 2; s = 3, 1: v = 9, 4 and b = (9 * 1 + 4 * 0) / 13.
    b = optimal_baseline(f64(1, 0), f64(0, math.log(2)), f64(3, 1), ids(5, 5))
    torch.testing.assert_close(b, f64(9 / 13, 9 / 13))


def test_each_weights_mode_by_hand() -> None:
    rewards, lw, s, g, lengths = f64(1, 0), f64(0, math.log(4)), f64(1, 1), ids(0, 0), ids(1, 2)

    def share(v: float) -> Tensor:  # v of the second row; the first has 1
        return f64(1 / (1 + v), 1 / (1 + v))

    torch.testing.assert_close(optimal_baseline(rewards, lw, s, g), share(16))
    torch.testing.assert_close(optimal_baseline(rewards, lw, s, g, weights="estimator", cap=2.0), share(4))
    torch.testing.assert_close(optimal_baseline(rewards, lw, s, g, weights="reference", cap=2.0), share(64))
    torch.testing.assert_close(optimal_baseline(rewards, lw, s, g, lengths=lengths), share(4))
    torch.testing.assert_close(
        optimal_baseline(rewards, lw, s, g, weights="estimator", cap=2.0, lengths=lengths), share(1)
    )


@pytest.mark.parametrize("mode", ["estimator", "reference"])
def test_modes_that_truncate_need_a_cap_and_say_so(mode: str) -> None:
    with pytest.raises(ValueError, match=rf"weights='{mode}' needs cap, the truncation of the loss weight") as error:
        optimal_baseline(f64(1, 0), f64(0, 0), f64(1, 1), ids(0, 0), weights=mode)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="cap must be a positive, finite number, got -1"):
        optimal_baseline(f64(1, 0), f64(0, 0), f64(1, 1), ids(0, 0), weights=mode, cap=-1)


def test_unknown_weights_lists_the_known() -> None:
    with pytest.raises(ValueError, match="unknown weights 'papper': use one of paper, estimator, reference"):
        log_baseline_weights(f64(0), f64(1), weights="papper")


@pytest.mark.parametrize(
    ("log_weight", "norm", "length"),
    [(NAN, 1, 1), (INF, 1, 1), (-INF, 1, 1), (0, 0, 1), (0, NAN, 1), (0, INF, 1), (0, -1, 1), (0, 1, 0)],
)
def test_a_row_that_carries_nothing_leaves_the_baseline_to_the_others(
    log_weight: float, norm: float, length: int
) -> None:
    rewards, g = f64(1, 0, 100), ids(0, 0, 0)
    log_v = log_baseline_weights(f64(0, 0, log_weight), f64(1, 3, norm), lengths=ids(1, 1, length))
    assert log_v[2] == -INF
    b = optimal_baseline(rewards, f64(0, 0, log_weight), f64(1, 3, norm), g, lengths=ids(1, 1, length))
    torch.testing.assert_close(b, f64(0.1, 0.1, 0.1))
    without = optimal_baseline(
        rewards, f64(0, 0, log_weight), f64(1, 3, norm), g, lengths=ids(1, 1, length), leave_one_out=True
    )
    torch.testing.assert_close(without, f64(0, 1, 0.1))


def test_unscorable_rows_are_out_of_the_statistics_and_have_no_nan() -> None:
    rewards, g = f64(1, NAN, 0, INF), ids(0, 0, 0, 0)
    for b in (
        optimal_baseline(rewards, 0 * ONES, ONES, g),
        group_mean(rewards, g),
        length_weighted(rewards, g, lengths=ids(2, 9, 2, 9)),
    ):
        torch.testing.assert_close(b, f64(0.5, 0, 0.5, 0))
    assert leave_one_out(rewards, g).tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("leave_own_out", [False, True])
def test_groups_that_cannot_compare_get_their_own_rewards(leave_own_out: bool) -> None:
    rewards = f64(0.1, 0.7, 0.3, 0.1, 0.1, 0.1, 0.9)
    groups = ids(0, 0, 1, 2, 2, 2, 1)
    lw = f64(-INF, NAN, 0, 0, 1, 2, -INF)  # nobody carries weight; one survivor (two rows of group 1); equal rewards
    rewards[6] = NAN
    b = optimal_baseline(rewards, lw, torch.ones(7), groups, leave_one_out=leave_own_out)
    known = rewards.isfinite()
    assert torch.equal(b[known], rewards[known])
    assert not advantages(rewards, b, torch.ones_like(rewards)).any()


def test_weights_that_are_no_numbers_carry_nothing() -> None:
    b = weighted_baseline(f64(1, 0, 100, 100, 100), f64(0, 0, NAN, INF, -INF), ids(0, 0, 0, 0, 0))
    assert b.tolist() == [0.5] * 5


def test_a_single_row_with_weight_gets_its_own_reward() -> None:
    b = optimal_baseline(f64(0.3, 0.9), f64(0, -INF), f64(1, 1), ids(0, 0))
    assert b[0] == 0.3


def test_equal_rewards_give_exactly_themselves_whatever_the_weights() -> None:
    rewards = torch.full((7,), 0.1, dtype=torch.float64)
    lw = torch.linspace(-3, 5, 7, dtype=torch.float64)
    assert torch.equal(optimal_baseline(rewards, lw, lw.exp(), ids(*[3] * 7)), rewards)


finite_lw = st.lists(st.floats(-400, 400), min_size=2, max_size=6)


@given(lw=finite_lw, offset=st.floats(-500, 500), seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_a_common_factor_of_all_weights_changes_nothing(lw: list[float], offset: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    n = len(lw)
    rewards, norms = torch.randn(n, generator=generator).double(), torch.rand(n, generator=generator).double() + 0.1
    groups = torch.randint(0, 2, (n,), generator=generator)
    for loo in (False, True):
        base = optimal_baseline(rewards, f64(*lw), norms, groups, leave_one_out=loo)
        shifted = optimal_baseline(rewards, f64(*lw) + offset, norms, groups, leave_one_out=loo)
        torch.testing.assert_close(shifted, base, rtol=1e-11, atol=1e-11)
        assert base.isfinite().all()


def test_a_common_factor_of_one_group_alone_changes_nothing_either() -> None:
    lw, s = f64(0.3, -1, 2, 0, 1), f64(1, 2, 3, 4, 5)
    shifted = lw + torch.where(ids(7, -2, 7, -2, 7) == 7, 300.0, -250.0)
    torch.testing.assert_close(
        optimal_baseline(REWARDS, shifted, s, GROUPS), optimal_baseline(REWARDS, lw, s, GROUPS), rtol=1e-12, atol=1e-12
    )


@given(seed=st.integers(0, 10**6), loo=st.booleans())
@settings(deadline=None, max_examples=40)
def test_order_and_names_of_groups_do_not_matter(seed: int, loo: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    n = 12
    rewards = torch.randn(n, generator=generator, dtype=torch.float64)
    lw, s = torch.randn(n, generator=generator).double(), torch.rand(n, generator=generator).double()
    groups = torch.randint(0, 4, (n,), generator=generator)
    order = torch.randperm(n, generator=generator)
    names = ids(2**62, -5, 0, 17)[groups]
    expected = optimal_baseline(rewards, lw, s, groups, leave_one_out=loo)
    got = optimal_baseline(rewards[order], lw[order], s[order], names[order], leave_one_out=loo)
    torch.testing.assert_close(got, expected[order], rtol=1e-12, atol=1e-12)


def test_leave_one_out_survives_a_dominant_member() -> None:
    # Subtracting the dominant row's share from the total would leave nothing of the others.
    rewards, lw, s, g = f64(1, 5, 2), f64(300, 0, 0), f64(1, 1, 1), ids(0, 0, 0)
    b = optimal_baseline(rewards, lw, s, g, leave_one_out=True)
    torch.testing.assert_close(b, f64(3.5, 1, 1), rtol=1e-14, atol=0)


def test_groups_cut_over_micro_batches_are_joined_by_concatenation() -> None:
    generator = torch.Generator().manual_seed(3)
    rewards, lw, s = (torch.randn(20, generator=generator, dtype=torch.float64) for _ in range(3))
    groups = torch.randint(0, 5, (20,), generator=generator)
    whole = optimal_baseline(rewards, lw, s.abs(), groups, weights="estimator", cap=2.0)
    parts = [log_baseline_weights(lw[i], s.abs()[i], weights="estimator", cap=2.0) for i in torch.arange(20).split(7)]
    torch.testing.assert_close(weighted_baseline(rewards, torch.cat(parts), groups), whole, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_results_have_the_rewards_type_and_are_computed_in_fp64(dtype: torch.dtype) -> None:
    rewards = torch.tensor([1, 0, 1], dtype=dtype)
    b = optimal_baseline(rewards, torch.zeros(3), torch.ones(3), ids(0, 0, 0))
    assert b.dtype == dtype
    assert torch.equal(b, torch.full((3,), 2 / 3, dtype=torch.float64).to(dtype))
    assert group_scale(rewards, ids(0, 0, 0)).dtype == dtype
    assert advantages(rewards, b, b).dtype == dtype
    assert group_mean(torch.tensor([1, 0, 1]), ids(0, 0, 0)).dtype == torch.float64


def test_nothing_carries_gradient() -> None:
    r, lw, s = (f64(1.0, 2.0).requires_grad_() for _ in range(3))
    b = optimal_baseline(r, lw, s, ids(0, 0))
    assert not b.requires_grad
    assert not advantages(r, b, group_scale(r, ids(0, 0))).requires_grad


def test_a_hundred_thousand_groups_agree_with_the_closed_form_of_pairs() -> None:
    n = 100_000
    generator = torch.Generator().manual_seed(0)
    r, v = (torch.rand(2, n // 2, generator=generator, dtype=torch.float64) for _ in range(2))
    groups = torch.randperm(n // 2, generator=generator) * 1_000_003 - 5
    b = weighted_baseline(r.flatten(), v.log().flatten(), groups.repeat(2))
    torch.testing.assert_close(b, ((v * r).sum(0) / v.sum(0)).repeat(2), rtol=1e-12, atol=0)


def test_empty_input_gives_empty_output() -> None:
    none, no_ids = f64(), ids()
    assert optimal_baseline(none, none, none, no_ids).shape == (0,)
    assert leave_one_out(none, no_ids).shape == (0,)
    assert group_scale(none, no_ids, scale_rewards="batch").shape == (0,)
    assert zero_variance(none, no_ids).shape == (0,)
    assert second_best(none, no_ids).shape == (0,)


def test_shapes_are_checked_and_named() -> None:
    with pytest.raises(ValueError, match=r"score_norms must be \[n\], one number per trajectory, got shape \(2, 1\)"):
        optimal_baseline(f64(1, 0), f64(0, 0), torch.ones(2, 1), ids(0, 0))
    with pytest.raises(ValueError, match=r"log_weights \[3\]"):
        optimal_baseline(f64(1, 0), f64(0, 0, 0), f64(1, 1), ids(0, 0))
    with pytest.raises(ValueError, match=r"group_ids must be integers, one per trajectory, got torch.float32"):
        group_mean(f64(1, 0), torch.zeros(2))


class TestTable:
    """`baselines`: one signature."""

    def test_every_entry_takes_everything_and_equals_its_function(self) -> None:
        lw, s, lengths = f64(0, 1, 2, 0, 1), f64(1, 2, 1, 2, 1), ids(1, 2, 3, 4, 5)
        everything = {"log_weights": lw, "score_norms": s, "lengths": lengths}
        expected = {
            "optimal": optimal_baseline(REWARDS, lw, s, GROUPS, lengths=lengths),
            "group_mean": group_mean(REWARDS, GROUPS),
            "leave_one_out": leave_one_out(REWARDS, GROUPS),
            "length_weighted": length_weighted(REWARDS, GROUPS, lengths=lengths),
            "batch_mean": batch_mean(REWARDS, GROUPS),
            "second_best": second_best(REWARDS, GROUPS),
        }
        assert set(baselines) == set(expected)
        for name, f in baselines.items():
            assert torch.equal(f(REWARDS, GROUPS, **everything), expected[name]), name

    def test_optimal_passes_its_parameters_on(self) -> None:
        lw, s = f64(0, 1, 2, 0, 1), f64(1, 2, 1, 2, 1)
        got = baselines["optimal"](
            REWARDS, GROUPS, log_weights=lw, score_norms=s, weights="estimator", cap=1.5, leave_one_out=True
        )
        want = optimal_baseline(REWARDS, lw, s, GROUPS, weights="estimator", cap=1.5, leave_one_out=True)
        assert torch.equal(got, want)
        assert not torch.equal(got, optimal_baseline(REWARDS, lw, s, GROUPS))

    @pytest.mark.parametrize(
        ("name", "missing"), [("optimal", "log_weights"), ("optimal", "score_norms"), ("length_weighted", "lengths")]
    )
    def test_what_is_missing_is_named(self, name: str, missing: str) -> None:
        given_all = {"log_weights": f64(0, 0), "score_norms": f64(1, 1), "lengths": ids(1, 1)}
        given_all.pop(missing)
        with pytest.raises(ValueError, match=f"'{name}' needs {missing}, one number per trajectory"):
            baselines[name](f64(1, 0), ids(0, 0), **given_all)

    def test_a_parameter_nobody_reads_is_refused(self) -> None:
        with pytest.raises(TypeError, match="cap"):
            baselines["group_mean"](f64(1, 0), ids(0, 0), cap=8.0)
