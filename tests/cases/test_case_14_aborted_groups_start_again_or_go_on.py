"""Row 14: aborted groups re-queued with their tokens although partial rollouts are off. Aborted twice, both ways."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vcpo.rollout import EmbeddedEngine, GroupRequest, SamplingParams


@pytest.fixture
def engine():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    return EmbeddedEngine(LlamaForCausalLM(config).double().eval(), SamplingParams(8), pad_token_id=0)


def abort_twice(engine, *, partial_rollouts):
    """Three steps under version 0, abort; two under 1, abort; to the end under 2. Returns the result and the last steps."""
    request = GroupRequest(group_id=4, prompt_token_ids=(3, 4), num_generations=2, seed=0)
    for version, steps in ((0, 3), (1, 2)):
        engine.policy_version = version
        engine.submit([request if partial_rollouts else request.from_prompt()])
        assert [engine.step() for _ in range(steps)] == [[]] * steps
        (request,) = engine.abort([4])
        assert engine.num_active == 0
    engine.policy_version = 2
    engine.submit([request if partial_rollouts else request.from_prompt()])
    results, steps = [], 0
    while engine.num_active:
        results += engine.step()
        steps += 1
    (result,) = results
    return result, steps


def undisturbed(engine):
    engine.submit([GroupRequest(group_id=4, prompt_token_ids=(3, 4), num_generations=2, seed=0)])
    results = []
    while engine.num_active:
        results += engine.step()
    return results[0]


def test_case_14_off_an_aborted_group_starts_again_from_the_prompt(engine):
    result, steps = abort_twice(engine, partial_rollouts=False)
    assert steps == 8
    assert [t.policy_versions for t in result.trajectories] == [(2,) * 8] * 2
    assert result.started_version == 2


def test_case_14_on_the_tokens_keep_the_versions_and_logprobs_they_were_sampled_with(engine):
    result, steps = abort_twice(engine, partial_rollouts=True)
    assert steps == 3
    assert [t.policy_versions for t in result.trajectories] == [(0, 0, 0, 1, 1, 2, 2, 2)] * 2
    assert (result.started_version, result.completed_version) == (0, 2)
    assert engine.started() == [(4, 0), (4, 0), (4, 0)]
    engine.policy_version = 0
    plain = undisturbed(engine)  # the weights never changed: it is as if nothing had happened
    for a, b in zip(result.trajectories, plain.trajectories, strict=True):
        assert a.token_ids == b.token_ids
        torch.testing.assert_close(torch.tensor(a.sampler_logprobs), torch.tensor(b.sampler_logprobs))
