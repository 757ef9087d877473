"""Fixtures of the oracles: tiny language models of several families in fp64, ragged batches, fp64 all the way down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from vcpo import Batch

VOCAB = 23
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}
_EXPERTS = {"num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SHAPE,
    "qwen2": {name: size for name, size in _SHAPE.items() if name != "head_dim"},
    "qwen3": _SHAPE,
    "gemma3_text": {**_SHAPE, "sliding_window": 4},
    "gpt2": {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "mixtral": {**_SHAPE, **_EXPERTS, "num_local_experts": 4},
    "qwen3_moe": {**_SHAPE, **_EXPERTS, "num_experts": 4, "moe_intermediate_size": 12},
}


def _model(family: str, *, tied: bool, seed: int = 0) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    config = AutoConfig.for_model(family, tie_word_embeddings=tied, **FAMILIES[family], **tokens)
    # The default kernel for stacked experts knows no fp64.
    experts = {"experts_implementation": "eager"} if "experts" in " ".join(FAMILIES[family]) else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, **experts)
        for parameter in model.parameters():  # far from the initial values, where norms are 1 and biases 0
            nn.init.normal_(parameter, std=0.3)
    return model


def _batch(side: str, *, seed: int = 0, temperature: float = 0.8) -> Batch:
    """Five ragged rows of width 9, the same on either side: one full, one without actions; ids at padding are no token's."""
    generator = torch.Generator().manual_seed(seed)
    lengths, prompts, width = [9, 6, 7, 4, 5], [3, 2, 4, 3, 5], 9
    n = len(lengths)
    columns = torch.arange(width).expand(n, width)
    start = torch.tensor([0 if side == "right" else width - length for length in lengths])[:, None]
    end, first_action = start + torch.tensor(lengths)[:, None], start + torch.tensor(prompts)[:, None]
    attention = (columns >= start) & (columns < end)
    tokens = torch.randint(3, VOCAB, (n, width), generator=generator)
    tokens[:, ::3] = 7  # comes more than once in a trajectory
    ids = tokens.gather(1, (columns - start).clamp(0, width - 1))
    return Batch(
        input_ids=torch.where(attention, ids, 10**6),
        attention_mask=attention,
        action_mask=attention & (columns >= first_action),
        sampler_logprobs=torch.zeros(n, width),
        rewards=torch.zeros(n),
        group_ids=torch.zeros(n, dtype=torch.int64),
        temperature=temperature,
    )


@pytest.fixture(scope="session")
def make_tiny_model() -> Callable[..., nn.Module]:
    """make_tiny_model(family, tied=): a randomly initialised causal language model in fp64, about 10k parameters."""
    return _model


@pytest.fixture(scope="session")
def make_ragged_batch() -> Callable[..., Batch]:
    """make_ragged_batch(side, seed=, temperature=): ragged trajectories, padded on that side."""
    return _batch


def widen_internals(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers casts norms, rotary tables and router probabilities to fp32 inside; here these stay in fp64.

    Without it a fault of 1e-8 hides behind their rounding.
    """

    def widened(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    def widening(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*map(widened, args), **{name: widened(value) for name, value in kwargs.items()})

        return call

    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch.Tensor, "to", widening(torch.Tensor.to))
    monkeypatch.setattr(torch.nn.functional, "softmax", widening(torch.nn.functional.softmax))


@pytest.fixture
def fp64_internals(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers does in fp32 inside is done in fp64."""
    widen_internals(monkeypatch)
