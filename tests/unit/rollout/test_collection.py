"""Prompts in, scored-to-be groups with text out."""

from __future__ import annotations

import pytest

from vcpo.errors import ConfigError, RolloutError
from vcpo.policy import character_tokenizer
from vcpo.rollout import collect_groups, decode_completion, encode_prompt
from vcpo.types import Prompt, Trajectory

ALPHABET = "0123456789"


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer(ALPHABET)  # <pad> 0, <eos> 1, <unk> 2


def written(ids, reason):
    n = len(ids)
    return Trajectory(
        member=0, token_ids=ids, sampler_logprobs=(0.0,) * n, policy_versions=(0,) * n, finish_reason=reason
    )


def test_groups_come_in_the_order_of_the_prompts_with_their_text(tokenizer, tiny_model, make_engine):
    engine = make_engine(tiny_model(), stop_token_ids=(1,), policy_version=4)
    prompts = [Prompt(f"p/{i}", "7" * (1 + i % 3)) for i in range(6)]
    groups = collect_groups(engine, tokenizer, prompts, num_generations=3, seed=0, first_group_id=10)
    assert [g.group_id for g in groups] == list(range(10, 16))
    assert [g.prompt for g in groups] == prompts
    assert {g.completed_version for g in groups} == {4}
    ended = 0
    for g in groups:
        assert len(g.trajectories) == 3
        for t in g.trajectories:
            ended += t.finish_reason == "stop"
            text_ids = t.token_ids[:-1] if t.finish_reason == "stop" else t.token_ids
            assert t.completion == tokenizer.decode(list(text_ids))
            assert t.reward is None
    assert ended, "the example needs completions that end"
    assert engine.started() == []
    again = collect_groups(engine, tokenizer, prompts, num_generations=3, seed=0, first_group_id=10)
    assert again == groups


def test_an_engine_at_work_is_refused(tokenizer, tiny_model, make_engine, make_request):
    engine = make_engine(tiny_model())
    engine.submit([make_request(0)])
    with pytest.raises(RolloutError, match="the engine has 3 other trajectories in flight"):
        collect_groups(engine, tokenizer, [Prompt("p", "1")], num_generations=2, seed=0)


def test_the_stop_token_is_no_text_everything_else_is(tokenizer):
    assert decode_completion(tokenizer, written((5, 6, 1), "stop")) == "23"
    assert decode_completion(tokenizer, written((5, 6), "length")) == "23"
    assert decode_completion(tokenizer, written((5, 0, 6), "length")) == "2<pad>3"
    assert decode_completion(tokenizer, written((1,), "stop")) == ""


def test_prompts_that_cannot_be_encoded_are_named(tokenizer):
    assert encode_prompt(tokenizer, Prompt("p", "12"), 2) == (4, 5)
    with pytest.raises(ConfigError, match="prompt 'sums/9' has 3 tokens, more than max_prompt_tokens=2"):
        encode_prompt(tokenizer, Prompt("sums/9", "123"), 2)
    with pytest.raises(ConfigError, match="prompt 'sums/9': a prompt is empty"):
        encode_prompt(tokenizer, Prompt("sums/9", ""), 2)
    with pytest.raises(ConfigError, match=r"prompt 'sums/9': .*'x', which the tokenizer does not know"):
        encode_prompt(tokenizer, Prompt("sums/9", "1x"), 2)
