"""Row 12: the version was stamped when generation ended. Tokens carry the version that sampled them."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vcpo.batch import collate
from vcpo.rollout import EmbeddedEngine, GroupRequest, SamplingParams
from vcpo.types import Prompt, TrajectoryGroup


def test_case_12_a_version_that_moves_in_mid_generation_is_on_the_tokens_and_lag_counts_from_the_oldest():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    engine = EmbeddedEngine(model, SamplingParams(6), pad_token_id=0, policy_version=2)
    engine.submit([GroupRequest(group_id=0, prompt_token_ids=(3, 4), num_generations=2, seed=0)])
    results = []
    for version in (2, 2, 3, 5, 5, 5):
        if version != engine.policy_version:
            engine.load_weights(dict(model.named_parameters()), version)
        results += engine.step()
    (result,) = results
    assert engine.started() == [(0, 2)]
    assert [t.policy_versions for t in result.trajectories] == [(2, 2, 3, 5, 5, 5)] * 2
    assert (result.started_version, result.completed_version) == (2, 5)
    group = TrajectoryGroup(0, Prompt("p", ""), result.prompt_token_ids, result.trajectories, result.completed_version)
    assert group.oldest_version == 2
    lags = collate([group], pad_token_id=0, policy_version=6).policy_lags
    assert lags is not None
    assert lags.tolist() == [4, 4]
