"""Aggregations: plain averages, and micro-batches that add up to the whole."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vcpo.core.aggregation import aggregate, aggregation_factors, aggregations

NAN, INF = math.nan, math.inf
AGGREGATIONS = {name: {"length": 10.0} if name.endswith("norm") else {} for name in aggregations}


def table(n: int = 4, s: int = 6) -> tuple[Tensor, Tensor]:
    """Random numbers, and a ragged mask with a hole and an empty row."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, s, generator=generator, dtype=torch.float64)
    mask = torch.arange(s) < torch.randint(1, s + 1, (n, 1), generator=generator)
    mask[0] = torch.arange(s) % 2 == 0
    mask[3] = False
    return x, mask


def naive_aggregate(x: Tensor, mask: Tensor, aggregation: str, length: float | None = None) -> Tensor:
    rows = [x[i][mask[i]] for i in range(len(x))]
    if aggregation == "token_mean":
        return torch.cat(rows).mean()
    per_row = {"seq_mean_token_mean": lambda r: r.mean(), "seq_mean_token_sum": lambda r: r.sum()}
    f = per_row.get(aggregation, lambda r: r.sum() / (length or NAN))
    return torch.stack([f(r) if len(r) else x.new_zeros(()) for r in rows]).mean()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_equals_the_plain_average(aggregation: str) -> None:
    x, mask = table()
    params = AGGREGATIONS[aggregation]
    got = aggregate(x, mask, aggregation=aggregation, **params)
    torch.testing.assert_close(got, naive_aggregate(x, mask, aggregation, **params))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("pieces", [1, 2, 4, 8])
def test_micro_batches_add_up(aggregation: str, pieces: int) -> None:
    x, mask = table(8)
    params = AGGREGATIONS[aggregation]
    whole = aggregate(x, mask, aggregation=aggregation, **params)
    size = float(mask.sum()) if aggregation == "token_mean" else 8
    parts = [
        aggregate(part, m, aggregation=aggregation, normalizer=size, **params)
        for part, m in zip(x.chunk(pieces), mask.chunk(pieces), strict=True)
    ]
    torch.testing.assert_close(torch.stack(parts).sum(), whole, rtol=1e-13, atol=0)


def test_factors_are_the_gradient() -> None:
    _, mask = table()
    for aggregation, params in AGGREGATIONS.items():
        x = torch.randn(mask.shape, dtype=torch.float64, requires_grad=True)
        aggregate(x, mask, aggregation=aggregation, **params).backward()
        factors = aggregation_factors(mask.sum(1), aggregation=aggregation, **params)
        assert torch.equal(x.grad, torch.where(mask, factors[:, None], 0.0))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("normalizer", [None, 0, 3])
def test_without_any_token_it_is_0(aggregation: str, normalizer: float | None) -> None:
    x = torch.full((2, 3), NAN, requires_grad=True)
    loss = aggregate(x, torch.zeros(2, 3), aggregation=aggregation, normalizer=normalizer, **AGGREGATIONS[aggregation])
    loss.backward()
    assert loss == 0
    assert not x.grad.any()


def test_normalizer_may_be_a_tensor() -> None:
    x, mask = torch.ones(2, 3), torch.ones(2, 3)
    assert aggregate(x, mask, aggregation="token_mean", normalizer=torch.tensor(12)) == 0.5


def test_errors_name_what_is_right() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match="unknown aggregation 'mean': use one of token_mean, seq_mean_token_mean"):
        aggregate(x, x, aggregation="mean")
    with pytest.raises(ValueError, match="seq_mean_token_sum_norm needs length, the positive number it divides by"):
        aggregate(x, x, aggregation="seq_mean_token_sum_norm")
    for bad in (-1.0, NAN, INF):
        with pytest.raises(ValueError, match="normalizer must be a count"):
            aggregate(x, x, aggregation="token_mean", normalizer=bad)
    with pytest.raises(ValueError, match=r"per_token must have the mask's shape \(2, 4\), got \(2, 3\)"):
        aggregate(x, torch.ones(2, 4), aggregation="token_mean")
