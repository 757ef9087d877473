"""One optimizer batch through VarianceControl, cut into micro-batches in any way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from vcpo import Batch, UpdateReport, VarianceControl, core


def _feed(vc: VarianceControl, model: nn.Module, batch: Batch, parts: Sequence[Sequence[int]]) -> None:
    with vc.batch(batch.rewards, batch.group_ids, batch.action_lengths, policy_lags=batch.policy_lags):
        for part in parts:
            rows = torch.tensor(list(part))
            micro = batch.rows(rows)
            with vc.forward():
                logits = model(micro.input_ids, micro.attention_mask)
            lp, score_sq = core.token_logprobs(
                logits, micro.input_ids, temperature=micro.temperature, with_score_sq=True
            )
            vc.backward(lp, micro.sampler_logprobs, micro.action_mask, rows=rows, score_sq=score_sq)


@pytest.fixture
def feed() -> Callable[..., None]:
    """feed(vc, model, batch, parts): every micro-batch handed in, no step yet."""
    return _feed


@pytest.fixture
def one_step() -> Callable[..., tuple[UpdateReport, dict[str, torch.Tensor]]]:
    """one_step(model, batch, parts, optimizer=None, **settings) -> report and the gradients before the step."""

    def run(
        model: nn.Module, batch: Batch, parts: Sequence[Sequence[int]] | None = None, **settings: Any
    ) -> tuple[UpdateReport, dict[str, torch.Tensor]]:
        caught: dict[str, torch.Tensor] = {}

        class Catch(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                caught.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
                return super().step(closure)

        vc = VarianceControl(model, Catch(model.parameters(), lr=0.1), **{"max_grad_norm": None, **settings})
        _feed(vc, model, batch, parts or [range(len(batch))])
        return vc.step(), caught

    return run
