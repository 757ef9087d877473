"""One token per row from logits and given uniforms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vcpo import core
from vcpo.rollout.requests import trajectory_seed
from vcpo.rollout.sampling import sample_tokens, uniforms

LARGEST = 1 - 2.0**-52


def test_uniforms_are_a_fixed_stream_with_prefixes():
    assert uniforms(5, 3).tolist() == uniforms(5, 50)[:3].tolist()
    assert uniforms(5, 3).tolist() != uniforms(6, 3).tolist()
    # Golden numbers: another numpy or machine must give the same trajectories.
    assert uniforms(trajectory_seed(0, 0, 0), 3).tolist() == GOLDEN
    many = uniforms(1, 100_000)
    assert many.min() >= 0
    assert many.max() <= LARGEST
    assert abs(many.mean() - 0.5) < 0.005


GOLDEN = [0.26331325121359317, 0.9787709845246537, 0.6106819995499024]


def test_seeds_differ_in_every_argument_and_fit_63_bits():
    seeds = {trajectory_seed(r, g, m) for r in range(3) for g in range(40) for m in range(8)}
    assert len(seeds) == 3 * 40 * 8
    assert all(0 <= s < 2**63 for s in seeds)
    assert trajectory_seed(1, 23, 4) != trajectory_seed(12, 3, 4)
    assert trajectory_seed(0, 0, 0) == SEED


SEED = 759540517790923586


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0])
    n = 40_000
    tokens, _ = sample_tokens(logits.expand(n, 4), torch.from_numpy(uniforms(9, n)), temperature=temperature)
    observed = torch.bincount(tokens, minlength=4) / n
    torch.testing.assert_close(observed, (logits / temperature).softmax(0), atol=0.01, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_are_those_of_core(dtype, temperature):
    torch.manual_seed(0)
    logits = (torch.randn(50, 20) * 5).to(dtype)
    tokens, logprobs = sample_tokens(logits, torch.rand(50, dtype=torch.float64), temperature=temperature)
    assert logprobs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    ids = torch.stack([torch.zeros_like(tokens), tokens], 1)
    both = torch.stack([logits, logits], 1)
    want = core.token_logprobs(both, ids, temperature=temperature)[:, 1]
    torch.testing.assert_close(logprobs, want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("u", [0.0, 0.3, LARGEST])
def test_tokens_of_probability_zero_are_never_chosen(u):
    inf = math.inf
    logits = torch.tensor(
        [[-inf, 1.0, -inf, 1.0, -inf], [-inf, -inf, 0.0, -inf, -inf], [0.0, -900.0, 0.0, 0.0, -900.0]]
    )
    tokens, logprobs = sample_tokens(logits, torch.full((3,), u, dtype=torch.float64), temperature=1.0)
    assert logprobs.isfinite().all()
    assert tokens[1] == 2
    assert tokens[0] in (1, 3)
    assert tokens[2] in (0, 2, 3)


def test_the_largest_uniform_stays_below_every_total():
    """Totals of the cumulative distribution are 1 up to rounding, on either side."""
    totals = 1 + (np.arange(-2000, 2000) * 2.0**-53)
    assert (LARGEST * totals < totals).all()


def test_a_small_temperature_does_not_overflow():
    logits = torch.tensor([[3e38, 0.0, 2.9e38]])
    tokens, logprobs = sample_tokens(logits, torch.tensor([0.99], dtype=torch.float64), temperature=0.01)
    assert tokens.tolist() == [0]
    assert logprobs.tolist() == [0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_numbers_show_in_the_logprob(bad):
    logits = torch.tensor([[0.0, bad, 0.0], [0.0, 0.0, 0.0]])
    for temperature in (1.0, 0.5):
        _, logprobs = sample_tokens(logits, torch.tensor([0.5, 0.5], dtype=torch.float64), temperature=temperature)
        assert logprobs.isfinite().tolist() == [False, True]
