"""The optimal token baseline: by hand, against the optimal baseline, and under other padding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vcpo.core.baselines import optimal_baseline
from vcpo.core.token_baseline import optimal_token_baseline

NAN, INF = math.nan, math.inf


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


REWARDS = f64(1, 0, 3, 5, 2)
GROUPS = ids(7, -2, 7, -2, 7)  # unsorted, arbitrary ids: {1, 3, 2} and {0, 5}


def test_by_hand() -> None:
    returns = f64(1, 1, 0, 0).view(2, 2)
    b = optimal_token_baseline(returns, f64(1, 2, 3, 3).view(2, 2), torch.ones(2, 2), ids(0, 0))
    torch.testing.assert_close(b, f64(1 / 4, 1 / 3).expand(2, 2))


def test_one_step_is_the_optimal_baseline() -> None:
    lw, s = f64(0, 1, -2, 0.5, 300), f64(1, 2, 3, 4, 5)
    b = optimal_token_baseline(REWARDS[:, None], s.square()[:, None], torch.ones(5, 1), GROUPS, log_weights=lw)
    torch.testing.assert_close(b[:, 0], optimal_baseline(REWARDS, lw, s, GROUPS), rtol=1e-13, atol=0)


def test_bad_numbers_leave_the_baseline_to_the_others() -> None:
    returns = f64(1, 0, NAN, 100, 100).view(5, 1)
    score_sq = f64(1, 3, 5, NAN, 5).view(5, 1)
    lw = f64(0, 0, 0, 0, INF)
    b = optimal_token_baseline(returns, score_sq, torch.ones(5, 1), ids(0, 0, 0, 0, 0), log_weights=lw)
    assert b.flatten().tolist() == [0.25] * 5
    alone = optimal_token_baseline(returns[2:], score_sq[2:], torch.ones(3, 1), ids(0, 0, 0), log_weights=lw[2:])
    assert alone.flatten().tolist() == [0, 100, 100]  # nobody carries weight: b is the return, no gradient


def test_padding_side_and_masked_values_do_not_matter() -> None:
    generator = torch.Generator().manual_seed(1)
    returns, score_sq = (torch.rand(3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    lw = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    right = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]], dtype=torch.bool)
    expected = optimal_token_baseline(returns, score_sq, right, ids(0, 0, 0), log_weights=lw)
    lengths = right.sum(1).tolist()
    left = torch.stack([m.roll(4 - k) for m, k in zip(right, lengths, strict=True)])
    moved = [torch.stack([r.roll(4 - k) for r, k in zip(x, lengths, strict=True)]) for x in (returns, score_sq, lw)]
    spoiled = [torch.where(left, x, bad) for x, bad in zip(moved, (NAN, INF, NAN), strict=True)]
    got = optimal_token_baseline(spoiled[0], spoiled[1], left, ids(0, 0, 0), log_weights=spoiled[2])
    torch.testing.assert_close(got[left], expected[right], rtol=0, atol=0)
    assert not got[~left].any()
