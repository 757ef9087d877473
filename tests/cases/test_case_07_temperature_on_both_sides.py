"""Row 7: sampler log-probs not temperature-scaled as the learner scales them. At lag 0 every log ratio is 0."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from vcpo import core
from vcpo.batch import collate
from vcpo.policy import forward_logits
from vcpo.rollout import EmbeddedEngine, GroupRequest, SamplingParams
from vcpo.types import Prompt, TrajectoryGroup

SIZES = {"vocab_size": 20, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "head_dim": 32}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0}


def sharp(model):
    """Random weights give nearly uniform probabilities, at which any temperature would agree."""
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(8)
    return model.eval()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_case_07_at_lag_zero_sampler_and_learner_agree_at_every_temperature(kind, temperature):
    torch.manual_seed(0)
    configs = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    config_class, model_class = configs[kind]
    model = sharp(model_class(config_class(**SIZES, **HEADS)))
    engine = EmbeddedEngine(model, SamplingParams(40, temperature, (1, 2)), pad_token_id=0)
    engine.submit(
        [GroupRequest(group_id=g, prompt_token_ids=tuple(range(3, 5 + g)), num_generations=8, seed=1) for g in range(6)]
    )
    groups = []
    while engine.num_active:
        groups += [
            TrajectoryGroup(r.group_id, Prompt("p", ""), r.prompt_token_ids, r.trajectories) for r in engine.step()
        ]
    batch = collate(groups, pad_token_id=0)
    with torch.no_grad():
        logits = forward_logits(model, batch.input_ids, batch.attention_mask)
    learner = core.token_logprobs(logits, batch.input_ids, temperature=temperature)
    ratios = core.log_ratios(learner, batch.sampler_logprobs, batch.action_mask)
    assert ratios.abs().max() < 1e-5
    other = core.token_logprobs(logits, batch.input_ids, temperature=temperature * 1.1)
    assert core.log_ratios(other, batch.sampler_logprobs, batch.action_mask).abs().max() > 0.01
