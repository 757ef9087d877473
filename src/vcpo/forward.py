"""One causal-LM forward: token ids and an attention mask in, logits out, for left and right padding alike."""

from __future__ import annotations

import inspect
from typing import Any

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
    output = _run(model, innermost(model), input_ids, attention_mask)
    if isinstance(output, Tensor):
        return output
    return output.logits if hasattr(output, "logits") else output[0]


def forward_hidden(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, nn.Linear]:
    """The last hidden states [n, s, p], and the plain linear head that would make logits of them.

    For a transformers causal language model, PEFT around it or not. ValueError for one whose logits are more than
    head(hidden): a bias, a scale or a soft cap behind the head, or a head that an adapter wraps.
    """
    whole = innermost(model)
    body, head = getattr(whole, "base_model", whole), getattr(whole, "get_output_embeddings", lambda: None)()
    if body is whole or type(head) is not nn.Linear or head.bias is not None:
        raise ValueError(
            f"{type(whole).__name__} has no body with a plain linear head behind it: take its logits whole"
        )
    changed = [name for name in LOGIT_CHANGES if getattr(whole.config, name, None) not in (None, 1, 1.0)]
    if changed:
        raise ValueError(f"{type(whole).__name__} changes its logits ({', '.join(changed)}): take them whole")
    output = _run(body, body, input_ids, attention_mask)
    return output if isinstance(output, Tensor) else output[0], head


LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
"""Names under which transformers' configs keep what is done to logits behind the head."""


def _run(model: nn.Module, names_arguments: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Any:
    real = attention_mask.bool()
    given = {"attention_mask": real.long(), "position_ids": position_ids(real), "use_cache": False}
    accepted = inspect.signature(names_arguments.forward).parameters
    return model(torch.where(real, input_ids, 0), **{k: v for k, v in given.items() if k in accepted})


def innermost(model: nn.Module) -> nn.Module:
    """The model whose forward names its arguments: PEFT, DistributedDataParallel and torch.compile only pass them on."""
    while True:
        base = getattr(model, "get_base_model", None)
        inner = base() if callable(base) else getattr(model, "_orig_mod", getattr(model, "module", None))
        if not isinstance(inner, nn.Module) or inner is model:
            return model
        model = inner
