"""The optimal baseline against what it claims to be: minimised numerically, summed naively, enumerated, and in 50 digits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import mpmath
import pytest
import torch
from torch import Tensor

from vcpo.core.advantages import group_scale
from vcpo.core.baselines import group_mean, leave_one_out, length_weighted, optimal_baseline

CAP = 8.0
MODES: dict[str, Callable[[float], float]] = {
    "paper": lambda w: w,
    "estimator": lambda w: min(w, CAP),
    "reference": lambda w: w * min(w, CAP),
}


def random_batch(seed: int, n: int = 24, groups: int = 5, *, spread: float = 1.0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(n, generator=generator, dtype=torch.float64)
    lw = spread * torch.randn(n, generator=generator, dtype=torch.float64)
    scores = torch.randn(n, 7, generator=generator, dtype=torch.float64)  # one small gradient g_i per row
    scores = scores * torch.rand(n, 1, generator=generator, dtype=torch.float64) * 10
    lengths = torch.randint(1, 40, (n,), generator=generator)
    group_ids = torch.randint(-3, groups - 3, (n,), generator=generator) * 1_000_003
    return rewards, lw, scores, lengths, group_ids


def members(group_ids: Tensor) -> list[list[int]]:
    rows = defaultdict(list)
    for i, g in enumerate(group_ids.tolist()):
        rows[g].append(i)
    return list(rows.values())


def minimise(f: Callable[[float], float], low: float, high: float) -> float:
    """Golden-section search, to about 1e-8 of the interval: a quadratic is flat to rounding there."""
    golden = (5**0.5 - 1) / 2
    while high - low > 1e-9:
        a, b = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, b) if f(a) < f(b) else (a, high)
    return (low + high) / 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("by_length", [False, True])
def test_no_other_constant_gives_a_smaller_gradient_moment(mode: str, by_length: bool) -> None:
    """sum_i ||a_i (R_i - b) g_i||^2, minimised over b without knowing the formula."""
    rewards, lw, scores, lengths, group_ids = random_batch(1)
    got = optimal_baseline(
        rewards, lw, scores.norm(dim=1), group_ids, weights=mode, cap=CAP, lengths=lengths if by_length else None
    )
    for rows in members(group_ids):
        a = torch.tensor([MODES[mode](float(lw[i].exp())) / (int(lengths[i]) if by_length else 1) for i in rows])

        def moment(b: float, rows: list[int] = rows, a: Tensor = a) -> float:
            gradients = (a * (rewards[rows] - b))[:, None] * scores[rows]
            return float(gradients.square().sum())

        best = minimise(moment, float(rewards[rows].min()), float(rewards[rows].max()))
        assert got[rows].tolist() == pytest.approx([best] * len(rows), abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("by_length", [False, True])
@pytest.mark.parametrize("loo", [False, True])
def test_equals_the_naive_loop_in_exp_space(mode: str, by_length: bool, loo: bool) -> None:
    for seed in range(5):
        rewards, lw, scores, lengths, group_ids = random_batch(seed)
        norms = scores.norm(dim=1)
        got = optimal_baseline(
            rewards,
            lw,
            norms,
            group_ids,
            weights=mode,
            cap=CAP,
            lengths=lengths if by_length else None,
            leave_one_out=loo,
        )
        for rows in members(group_ids):
            for i in rows:
                used = [j for j in rows if not (loo and j == i)]
                v = {j: (MODES[mode](float(lw[j].exp())) * float(norms[j])) ** 2 for j in used}
                v = {j: x / int(lengths[j]) ** 2 if by_length else x for j, x in v.items()}
                expected = sum(v[j] * float(rewards[j]) for j in used) / sum(v.values()) if used else float(rewards[i])
                assert float(got[i]) == pytest.approx(expected, rel=1e-11, abs=1e-12)


@pytest.mark.parametrize("spread", [30.0, 300.0])
@pytest.mark.parametrize("loo", [False, True])
def test_equals_fifty_digit_arithmetic_where_exp_overflows(spread: float, loo: bool) -> None:
    rewards, lw, scores, _, group_ids = random_batch(7, spread=spread)
    norms = scores.norm(dim=1)
    got = optimal_baseline(rewards, lw, norms, group_ids, leave_one_out=loo)
    with mpmath.workdps(50):
        for rows in members(group_ids):
            for i in rows:
                used = [j for j in rows if not (loo and j == i)]
                v = {j: mpmath.exp(2 * mpmath.mpf(float(lw[j]))) * mpmath.mpf(float(norms[j])) ** 2 for j in used}
                total = mpmath.fsum(v.values())
                summed = mpmath.fsum(v[j] * mpmath.mpf(float(rewards[j])) for j in used)
                expected = float(summed / total) if used else float(rewards[i])
                assert float(got[i]) == pytest.approx(expected, rel=1e-11)


def test_it_minimises_the_variance_of_the_importance_weighted_gradient() -> None:
    """Every action of a small softmax policy enumerated: one row each, drawn uniformly by the sampler."""
    generator = torch.Generator().manual_seed(2)
    actions = 9
    logits = torch.randn(actions, generator=generator, dtype=torch.float64)
    rewards = torch.randn(actions, generator=generator, dtype=torch.float64)
    pi, mu = logits.softmax(0), torch.full((actions,), 1 / actions, dtype=torch.float64)
    scores = torch.eye(actions, dtype=torch.float64) - pi  # d log pi(a) / d logits
    w = pi / mu
    assert (mu[:, None] * w[:, None] * scores).sum(0).abs().max() < 1e-15  # E[w g] = 0: no baseline biases it

    def variance(b: float) -> float:
        estimates = (w * (rewards - b))[:, None] * scores
        mean = (mu[:, None] * estimates).sum(0)
        return float((mu[:, None] * (estimates - mean).square()).sum())

    one_group = torch.zeros(actions, dtype=torch.int64)
    best = float(optimal_baseline(rewards, w.log(), scores.norm(dim=1), one_group)[0])
    assert best == pytest.approx(minimise(variance, -5, 5), abs=1e-6)
    assert variance(best) < variance(float((pi * rewards).sum()))  # better than the value function
    assert variance(best) < variance(float(rewards.mean()))


def test_plain_baselines_and_scales_equal_their_loops() -> None:
    rewards, _, _, lengths, group_ids = random_batch(3, groups=3)
    rewards[5] = torch.nan
    mean, loo = group_mean(rewards, group_ids), leave_one_out(rewards, group_ids)
    opo = length_weighted(rewards, group_ids, lengths=lengths)
    std = group_scale(rewards, group_ids)
    sample = group_scale(rewards, group_ids, std_eps=0.01, ddof=1)
    for every in members(group_ids):
        rows = [i for i in every if i != 5]
        r = rewards[rows]
        for k, i in enumerate(rows):
            others = torch.cat([r[:k], r[k + 1 :]])
            assert float(mean[i]) == pytest.approx(float(r.mean()), rel=1e-12)
            assert float(loo[i]) == pytest.approx(float(others.mean()), rel=1e-12)
            assert float(opo[i]) == pytest.approx(float((lengths[rows] * r).sum() / lengths[rows].sum()), rel=1e-12)
            assert float(std[i]) == pytest.approx(float(r.std(correction=0)), rel=1e-12)
            assert float(sample[i]) == pytest.approx(float(r.std()) + 0.01, rel=1e-12)
