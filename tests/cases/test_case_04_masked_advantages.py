"""A sequence-level loss that summed advantages over padding: what stands at masked positions may not matter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vcpo.core.aggregation import aggregations
from vcpo.core.losses import policy_losses
from vcpo.core.weights import weight_treatments

LENGTH = {"length": 5.0}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *(("reinforce", {"weight_treatment": treatment, "cap": 1.1, "low": 0.9}) for treatment in weight_treatments),
    ("ppo_clip", {}),
    ("ppo_clip", {"dual_clip": 1.5, "clip_high": 0.28}),
    ("grpo", {"kl_coef": 0.1}),
]


def loss_and_grad(
    name: str, columns: dict[str, Tensor], mask: Tensor, **params: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    columns = dict(columns)
    learner = columns.pop("learner").clone().requires_grad_()
    loss, metrics = policy_losses[name](
        learner, columns.pop("sampler"), columns.pop("advantages"), mask, **columns, **params
    )
    (grad,) = torch.autograd.grad(loss, learner)
    return loss.detach(), grad, metrics


@pytest.mark.parametrize("aggregation", aggregations)
@pytest.mark.parametrize(("name", "params"), VARIANTS)
def test_case_04_advantages_over_padding(name: str, params: dict[str, Any], aggregation: str) -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    columns = {"learner": torch.full((2, 4), -1.0), "sampler": torch.full((2, 4), -1.02)}
    columns["reference_logprobs"] = columns["sampler"]
    right, wrong = torch.ones(2, 4), torch.ones(2, 4)
    right[0], wrong[0] = torch.tensor([1.0, 1, 0, 0]), torch.tensor([1.0, 1, 10, 10])
    params = {**params, "aggregation": aggregation, **(LENGTH if aggregation.endswith("norm") else {})}
    a = loss_and_grad(name, {**columns, "advantages": right}, mask, **params)
    b = loss_and_grad(name, {**columns, "advantages": wrong}, mask, **params)
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])
    assert a[1].any()


garbage = st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -1e4, 0.0])


@pytest.mark.parametrize("aggregation", aggregations)
@pytest.mark.parametrize(("name", "params"), VARIANTS)
@given(seed=st.integers(0, 10**6), fill=st.tuples(garbage, garbage, garbage, garbage, garbage))
@settings(deadline=None, max_examples=8)
def test_case_04_property_nothing_masked_matters(
    name: str, params: dict[str, Any], aggregation: str, seed: int, fill: tuple[float, ...]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    names = ("learner", "sampler", "advantages", "proximal_logprobs", "reference_logprobs")
    clean = {key: -torch.rand(3, 5, generator=generator) for key in names}
    clean["advantages"] = torch.randn(3, 5, generator=generator)
    mask = torch.rand(3, 5, generator=generator) < 0.6
    spoiled = {key: torch.where(mask, clean[key], bad) for key, bad in zip(names, fill, strict=True)}
    params = {**params, "aggregation": aggregation, **(LENGTH if aggregation.endswith("norm") else {})}
    expected, got = (loss_and_grad(name, columns, mask, **params) for columns in (clean, spoiled))
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert not got[1][~mask].any()
    assert {k: float(v) for k, v in got[2].items()} == {k: float(v) for k, v in expected[2].items()}
