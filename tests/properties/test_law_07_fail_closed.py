"""Law 7: a bad number never raises the step: it is quarantined, counted, and still counts in B."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vcpo import core

NAN, INF = math.nan, math.inf
finite_log_weights = st.lists(st.floats(-500, 500) | st.just(-INF), min_size=1, max_size=20)
bad_log_weights = st.lists(st.sampled_from([NAN, INF]), min_size=1, max_size=6)


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def mixed(good: list[float], bad: list[float], seed: int) -> tuple[Tensor, Tensor]:
    """Both lists in random order, and where the bad ones ended up."""
    order = torch.randperm(len(good) + len(bad), generator=torch.Generator().manual_seed(seed))
    return tensor([*good, *bad])[order], order >= len(good)


@given(finite_log_weights, bad_log_weights, st.integers(0, 99))
def test_bad_log_weights_leave_the_ess_and_shrink_its_ratio(good, bad, seed):
    lw, is_bad = mixed(good, bad, seed)
    alone = tensor(good)
    assert float(core.effective_sample_size(lw)) == pytest.approx(float(core.effective_sample_size(alone)), rel=1e-9)
    ratio, before = float(core.ess_ratio(lw)), float(core.ess_ratio(alone))
    assert ratio == pytest.approx(before * len(good) / len(lw), rel=1e-9)
    assert ratio <= 1 - len(bad) / len(lw) + 1e-12
    for rule in ("sqrt", "linear"):
        assert core.lr_scale(ratio, rule=rule) <= core.lr_scale(before, rule=rule)
    assert torch.equal(core.quarantined(lw), is_bad)
    assert core.WeightMoments.from_log_weights(lw).count == len(lw)


@given(bad_log_weights)
def test_nothing_but_bad_numbers_is_no_step(bad):
    assert core.lr_scale(core.ess_ratio(tensor(bad))) == 0.0


@given(finite_log_weights, bad_log_weights, st.integers(0, 99))
def test_weights_are_finite_and_zero_at_bad_rows(good, bad, seed):
    lw, is_bad = mixed(good, bad, seed)
    weights = core.truncated_weights(lw, 8.0)
    assert ((weights >= 0) & (weights <= 8.0)).all()
    assert (weights[is_bad] == 0).all()
    assert torch.equal(weights[~is_bad], core.truncated_weights(lw[~is_bad], 8.0))


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_the_step_is_never_above_one(ess_ratio):
    if 0 <= ess_ratio <= 1:
        assert 0 <= core.lr_scale(ess_ratio, reference=0.55) <= 1
    elif not ess_ratio > 1 or ess_ratio > 1.01:
        with pytest.raises(ValueError, match="ess_ratio must be in"):
            core.lr_scale(ess_ratio)


@given(finite_log_weights, bad_log_weights, st.integers(0, 99))
def test_bad_log_weights_do_not_move_the_optimal_baseline_of_the_others(good, bad, seed):
    lw, is_bad = mixed(good, bad, seed)
    rewards = torch.rand(len(lw), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def baseline(keep: Tensor) -> Tensor:
        norms, groups = torch.ones_like(lw), torch.zeros(len(lw), dtype=torch.int64)
        return core.optimal_baseline(rewards[keep], lw[keep], norms[keep], groups[keep])

    everyone = torch.ones_like(is_bad)
    assert baseline(everyone).isfinite().all()
    if len(good) > 1:  # a lone survivor's baseline is its own reward
        torch.testing.assert_close(baseline(everyone)[~is_bad], baseline(~is_bad), rtol=1e-9, atol=1e-12)


def one_bad_token(kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Learner, sampler, advantages and mask of four rows; row 1 has one bad number."""
    g = torch.Generator().manual_seed(3)
    learner, sampler = (-torch.rand(4, 5, generator=g, dtype=torch.float64) for _ in range(2))
    advantages = torch.tensor([1.0, -2.0, 0.5, -0.5], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 1]]).bool()
    table, value = {
        "learner is NaN": (learner, NAN),
        "learner is +inf": (learner, INF),
        "sampler is NaN": (sampler, NAN),
        "sampler is -inf": (sampler, -INF),
        "advantage is NaN": (advantages[:, None], NAN),
        "advantage is inf": (advantages[:, None], INF),
        "advantage is -inf": (advantages[:, None], -INF),
    }[kind]
    table[1, table.shape[1] // 2] = value
    return learner, sampler, advantages, mask


KINDS = ["learner is NaN", "learner is +inf", "sampler is NaN", "sampler is -inf"]
KINDS += ["advantage is NaN", "advantage is inf", "advantage is -inf"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("aggregation", core.aggregations)
@pytest.mark.parametrize("name", core.policy_losses)
def test_a_bad_row_is_out_of_the_loss_but_counts_in_its_normalizer(name, aggregation, kind):
    learner, sampler, advantages, mask = one_bad_token(kind)
    normalizer = mask.sum() if aggregation == "token_mean" else len(mask)
    options = {"aggregation": aggregation, "length": 5.0}

    def gradient(rows: list[int], **more) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        x = learner[rows].clone().requires_grad_()
        loss, metrics = core.policy_losses[name](x, sampler[rows], advantages[rows], mask[rows], **options, **more)
        loss.backward()
        assert x.grad is not None
        return loss.detach(), x.grad, metrics

    loss, grad, metrics = gradient([0, 1, 2, 3])
    expected_loss, expected_grad, _ = gradient([0, 2, 3], normalizer=float(normalizer))
    assert (grad[1] == 0).all()
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(grad[[0, 2, 3]], expected_grad, rtol=1e-12, atol=1e-15)
    assert (grad[[0, 2, 3]] != 0).any()
    assert all(value.isfinite() for value in metrics.values()), metrics


@pytest.mark.parametrize("aggregation", core.aggregations)
@pytest.mark.parametrize("treatment", core.weight_treatments)
@pytest.mark.parametrize("name", core.policy_losses)
def test_a_token_the_learner_calls_impossible_gives_a_finite_gradient(name, treatment, aggregation):
    """lw = -inf is an ordinary weight of 0, not a bad number; 0 * inf must not become NaN."""
    learner, sampler, advantages, mask = one_bad_token("learner is NaN")
    learner[1, 2] = -INF
    learner.requires_grad_()
    options: dict = {"aggregation": aggregation, "length": 5.0}
    loss_function = core.policy_losses[name]
    if loss_function.linear_in_coefficients and "weight_treatment" in inspect.signature(loss_function).parameters:
        options["weight_treatment"] = treatment
    loss, metrics = loss_function(learner, sampler, advantages, mask, **options)
    loss.backward()
    assert learner.grad is not None
    assert loss.isfinite()
    assert learner.grad.isfinite().all()
    assert all(value.isfinite() for value in metrics.values()), metrics
