"""One outlier among 64: the raw ess says 1/64, the truncated one 0.985. Both are at hand, per trajectory."""

from __future__ import annotations

import pytest
import torch

from vcpo import core


@pytest.mark.parametrize("outlier", [90.0, 500.0])
def test_case_10_raw_and_truncated_ess_of_one_outlier(outlier):
    lw = torch.tensor([outlier] + [0.0] * 63, dtype=torch.float64)
    truncated = core.truncated_weights(lw, 2.0).log()
    assert float(core.ess_ratio(lw)) == pytest.approx(1 / 64, rel=1e-12)
    assert float(core.ess_ratio(truncated)) == pytest.approx(65**2 / (63 + 4) / 64, rel=1e-12)
    assert core.lr_scale(core.ess_ratio(lw)) == pytest.approx(0.125, rel=1e-12)


def test_case_10_rows_without_weight_stay_without_it_after_truncation():
    lw = torch.tensor([0.0, float("nan"), float("inf"), -float("inf")])
    truncated = core.truncated_weights(lw, 2.0).log()
    assert float(core.ess_ratio(truncated)) == pytest.approx(0.25)
