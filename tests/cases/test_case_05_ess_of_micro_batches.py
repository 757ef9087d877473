"""Weights [1,1,1,1] and [2,2,2,2] in two micro-batches: ess 7.2 and ratio 0.90, however the batch is cut."""

from __future__ import annotations

import math

import pytest
import torch

from vcpo import core
from vcpo.core import WeightMoments

LOG_WEIGHTS = torch.tensor([0.0] * 4 + [math.log(2)] * 4, dtype=torch.float64)


@pytest.mark.parametrize("cuts", [1, 2, 4, 8])
def test_case_05_merged_moments_give_the_ess_of_the_batch(cuts):
    moments = WeightMoments.empty()
    for part in LOG_WEIGHTS.chunk(cuts):
        moments = moments.merge(WeightMoments.from_log_weights(part))
    assert moments.count == 8
    assert float(moments.ess) == pytest.approx(7.2, rel=1e-12)
    assert float(moments.ess_ratio) == pytest.approx(0.90, rel=1e-12)


def test_case_05_the_mean_of_the_micro_batches_ratios_is_another_number():
    means = [float(core.ess_ratio(part)) for part in LOG_WEIGHTS.chunk(2)]
    assert sum(means) / 2 == pytest.approx(1.0)


def test_case_05_ranks_may_hold_different_numbers_of_rows_or_none():
    ranks = [LOG_WEIGHTS[:3], LOG_WEIGHTS[3:3], LOG_WEIGHTS[3:]]
    left, middle, right = (WeightMoments.from_log_weights(rank) for rank in ranks)
    for merged in (left.merge(middle).merge(right), right.merge(left.merge(middle))):
        assert float(merged.ess_ratio) == pytest.approx(0.90, rel=1e-12)
