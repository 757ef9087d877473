"""What every score norm starts from: a forward without dropout, and each trajectory's summed log-prob."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vcpo import core
from vcpo.batch import Batch
from vcpo.errors import ScoreNormError
from vcpo.forward import forward_logits


@contextmanager
def scoring_mode(model: nn.Module, *, gradients: bool) -> Iterator[None]:
    """Dropout and router jitter off, gradients on or off; every module's own mode is put back on exit."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.set_grad_enabled(gradients):
            yield
    finally:
        for module, training in modes:
            module.training = training


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter, those that take gradient; a shared one appears once, under its first name.

    ScoreNormError when there is none: a score norm would be 0 and say nothing.
    """
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise ScoreNormError(f"{type(model).__name__} has no trainable parameter: set requires_grad on those to train")
    return found


def trajectory_logprobs(model: nn.Module, batch: Batch) -> Tensor:
    """sum_t log pi(a_t) of each trajectory's action tokens, with its graph: [n], nats; a row without actions gives 0."""
    logits = forward_logits(model, batch.input_ids, batch.attention_mask)
    ids = torch.where(batch.attention_mask.bool(), batch.input_ids, 0)
    logprobs = core.token_logprobs(logits, ids, temperature=batch.temperature)
    return core.masked_sum(logprobs, batch.action_mask)
