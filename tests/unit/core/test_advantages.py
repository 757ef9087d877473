"""Advantages, what they are divided by, and whitening."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vcpo.core.advantages import advantages, group_scale, whiten, zero_variance
from vcpo.core.baselines import group_mean

NAN, INF = math.nan, math.inf


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


REWARDS = f64(1, 0, 3, 5, 2)
GROUPS = ids(7, -2, 7, -2, 7)  # unsorted, arbitrary ids: {1, 3, 2} and {0, 5}


class TestScale:
    def test_population_std_of_the_group(self) -> None:
        torch.testing.assert_close(
            group_scale(REWARDS, GROUPS), f64(*[(2 / 3) ** 0.5, 2.5, (2 / 3) ** 0.5, 2.5, (2 / 3) ** 0.5])
        )

    def test_sample_std_and_epsilon_are_options(self) -> None:
        scale = group_scale(REWARDS, GROUPS, std_eps=0.25, ddof=1)
        torch.testing.assert_close(scale, f64(1.25, 2.5 * 2**0.5 + 0.25, 1.25, 2.5 * 2**0.5 + 0.25, 1.25))

    def test_batch_and_none(self) -> None:
        torch.testing.assert_close(
            group_scale(REWARDS, GROUPS, scale_rewards="batch"),
            torch.full((5,), REWARDS.std(correction=0).item()).double(),
        )
        assert group_scale(REWARDS, GROUPS, scale_rewards="none").tolist() == [1] * 5

    def test_mean_gives_no_step_where_the_mean_is_not_positive(self) -> None:
        rewards, groups = f64(1, 0, 0, 0, -1, -3), ids(0, 0, 0, 0, 1, 1)
        scale = group_scale(rewards, groups, scale_rewards="mean")
        assert scale.tolist() == [0.25] * 4 + [INF] * 2
        assert advantages(rewards, group_mean(rewards, groups), scale).tolist() == [3, -1, -1, -1, 0, 0]

    def test_unscorable_rows_are_out_and_have_scale_1(self) -> None:
        scale = group_scale(f64(1, NAN, 3, -INF), ids(0, 0, 0, 0))
        assert scale.tolist() == [1, 1, 1, 1]
        assert group_scale(f64(1, NAN, 5, -INF), ids(0, 0, 0, 0)).tolist() == [2, 1, 2, 1]

    @pytest.mark.parametrize("value", [0.1, 1 / 3, 1e16 + 2])
    @pytest.mark.parametrize("mode", ["group", "batch", "mean"])
    def test_equal_rewards_are_not_divided_by_rounding_noise(self, value: float, mode: str) -> None:
        rewards = torch.full((7,), value, dtype=torch.float64)
        assert group_scale(rewards, ids(*[0] * 7), scale_rewards=mode).tolist() == [1] * 7

    def test_wrong_options_are_named(self) -> None:
        with pytest.raises(ValueError, match="unknown scale_rewards 'std': use one of group, batch, mean, none"):
            group_scale(REWARDS, GROUPS, scale_rewards="std")
        with pytest.raises(ValueError, match="std_eps must be a finite number >= 0, got -1"):
            group_scale(REWARDS, GROUPS, std_eps=-1)
        with pytest.raises(ValueError, match=r"ddof must be 0 .* or 1"):
            group_scale(REWARDS, GROUPS, ddof=2)


class TestAdvantages:
    def test_centred_and_scaled(self) -> None:
        assert advantages(f64(3, 0), f64(1, 1), f64(2, 4)).tolist() == [1, -0.25]

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    def test_a_bad_number_anywhere_gives_no_step(self, bad: float) -> None:
        assert advantages(f64(bad, 1), f64(0, 0), f64(1, 1)).tolist() == [0, 1]
        assert advantages(f64(5, 1), f64(bad, 0), f64(1, 1)).tolist() == [0, 1]
        assert advantages(f64(5, 1), f64(0, 0), f64(bad, 1)).tolist() == [0, 1]

    def test_scale_0_gives_no_step(self) -> None:
        assert advantages(f64(5, 5), f64(0, 5), f64(0, 0)).tolist() == [0, 0]

    def test_zero_variance_names_groups_that_cannot_teach(self) -> None:
        rewards = f64(1, 1, 0.5, 0, 1, NAN, NAN, NAN)
        groups = ids(0, 0, 1, 2, 2, 1, 3, 0)
        assert zero_variance(rewards, groups).tolist() == [True, True, True, False, False, True, True, True]


class TestWhiten:
    def test_mean_0_and_sample_variance_1_over_the_mask(self) -> None:
        x = torch.arange(12, dtype=torch.float64).view(3, 4)
        x[0, 3] = NAN
        mask = torch.ones(3, 4, dtype=torch.bool)
        mask[0, 3] = mask[2, 0] = False
        white = whiten(x, mask)
        assert white[0, 3] == white[2, 0] == 0
        torch.testing.assert_close(white[mask].mean(), f64(0)[0], rtol=0, atol=1e-14)
        torch.testing.assert_close(white[mask].var(), f64(1)[0])

    def test_nothing_to_compare_gives_0(self) -> None:
        assert not whiten(torch.full((2, 2), 0.1), torch.ones(2, 2)).any()
        assert not whiten(f64(4, 5), torch.tensor([True, False])).any()
        assert not whiten(f64(4, 5), torch.zeros(2)).any()
