"""A tiny Llama model, its engine, and requests for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from vcpo.rollout import EmbeddedEngine, GroupRequest, GroupResult, SamplingParams

VOCAB, EOS = 13, 2


def _tiny_model(
    seed: int = 0, dtype: torch.dtype = torch.float64, *, spread: float = 8.0, vocab: int = VOCAB
) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=EOS,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        with torch.no_grad():  # random weights give almost uniform logits: spread them, so that context matters
            for name, p in model.named_parameters():
                if p.ndim > 1:
                    p.mul_(spread if "lm_head" in name or "embed" in name else spread / 2)
    return model.to(dtype).eval()


def _engine(
    model: nn.Module, *, max_new_tokens: int = 12, temperature: float = 1.0, **kwargs: object
) -> EmbeddedEngine:
    stop = kwargs.pop("stop_token_ids", (EOS,))
    params = SamplingParams(max_new_tokens, temperature, stop)  # type: ignore[arg-type]
    return EmbeddedEngine(model, params, pad_token_id=0, **kwargs)  # type: ignore[arg-type]


def _request(group_id: int, prompt: Sequence[int] | None = None, *, n: int = 3, seed: int = 0) -> GroupRequest:
    """Without a prompt: one whose length and tokens depend on the group's number."""
    ids = prompt if prompt is not None else [3 + (group_id * 7 + i * 5) % 10 for i in range(2 + group_id % 4)]
    return GroupRequest(group_id=group_id, prompt_token_ids=tuple(ids), num_generations=n, seed=seed)


def _drain(engine: EmbeddedEngine) -> dict[int, GroupResult]:
    results: dict[int, GroupResult] = {}
    for _ in range(10_000):
        if not engine.num_active:
            return results
        for result in engine.step():
            assert result.group_id not in results
            results[result.group_id] = result
    raise AssertionError(f"{engine.num_active} trajectories never ended")


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., LlamaForCausalLM]:
    """tiny_model(seed=0, dtype=float64): two layers, 13 tokens, EOS 2, 64 positions, grouped-query attention."""
    return _tiny_model


@pytest.fixture(scope="session")
def make_engine() -> Callable[..., EmbeddedEngine]:
    """make_engine(model, max_new_tokens=12, temperature=1.0, stop_token_ids=(2,))."""
    return _engine


@pytest.fixture(scope="session")
def make_request() -> Callable[..., GroupRequest]:
    """make_request(group_id, prompt=None, n=3, seed=0)."""
    return _request


@pytest.fixture(scope="session")
def drain() -> Callable[[EmbeddedEngine], dict[int, GroupResult]]:
    """Step until nothing is active; results by group id."""
    return _drain
