"""One causal-LM forward: token ids and an attention mask in, logits out, for left and right padding alike."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn


def position_ids(attention_mask: Tensor) -> Tensor:
    """[n, s] -> [n, s] int64: each row's real tokens counted from 0; padding before them also sits at 0."""
    return (attention_mask.long().cumsum(1) - 1).clamp(min=0)


def forward_logits(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Next-token logits [n, s, V] of [n, s] token ids; column j predicts token j + 1.

    Ids at padding never reach the model, so they may be any number. Position ids are given per trajectory (a
    position embedding broadcast over the batch would mix trajectories), and no key-value cache is kept.
    """
    real = attention_mask.bool()
    given = {"attention_mask": real.long(), "position_ids": position_ids(real), "use_cache": False}
    accepted = inspect.signature(innermost(model).forward).parameters
    output = model(torch.where(real, input_ids, 0), **{k: v for k, v in given.items() if k in accepted})
    if isinstance(output, Tensor):
        return output
    return output.logits if hasattr(output, "logits") else output[0]


def innermost(model: nn.Module) -> nn.Module:
    """The model whose forward names its arguments: PEFT, DistributedDataParallel and torch.compile only pass them on."""
    while True:
        base = getattr(model, "get_base_model", None)
        inner = base() if callable(base) else getattr(model, "_orig_mod", getattr(model, "module", None))
        if not isinstance(inner, nn.Module) or inner is model:
            return model
        model = inner
