"""EmbeddedEngine: what it samples, with which log-probs, under which version, whatever else is in the batch."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from vcpo import core
from vcpo.errors import ConfigError, RolloutError, WeightSyncError
from vcpo.policy import forward_logits
from vcpo.rollout import EmbeddedEngine, SamplingParams
from vcpo.rollout.requests import trajectory_seed
from vcpo.rollout.sampling import uniforms


def full_forward(model, result, temperature=1.0):
    """The learner's log-probs of every trajectory: one plain forward pass over prompt and completion."""
    out = []
    for t in result.trajectories:
        ids = torch.tensor([[*result.prompt_token_ids, *t.token_ids]])
        with torch.no_grad():
            logits = forward_logits(model, ids, torch.ones_like(ids))
        logprobs = core.token_logprobs(logits, ids, temperature=temperature)
        out.append(logprobs[0, len(result.prompt_token_ids) :])
    return out


def assert_agrees(model, result, temperature=1.0, atol=1e-9):
    for t, want in zip(result.trajectories, full_forward(model, result, temperature), strict=True):
        torch.testing.assert_close(torch.tensor(t.sampler_logprobs, dtype=want.dtype), want, atol=atol, rtol=0)


def test_tokens_are_the_inverse_cdf_of_the_models_own_probabilities(tiny_model, make_engine, make_request, drain):
    """The slow oracle: one trajectory at a time, a full forward pass per token, no cache."""
    model, temperature = tiny_model(), 0.7
    engine = make_engine(model, temperature=temperature)
    requests = [make_request(g) for g in range(5)]
    engine.submit(requests)
    results = drain(engine)
    for request in requests:
        for t in results[request.group_id].trajectories:
            u = uniforms(trajectory_seed(request.seed, request.group_id, t.member), 12)
            ids = list(request.prompt_token_ids)
            for position, token in enumerate(t.token_ids):
                with torch.no_grad():
                    logits = forward_logits(model, torch.tensor([ids]), torch.ones(1, len(ids)))[0, -1]
                cdf = (logits / temperature).softmax(0).cumsum(0)
                assert token == int((cdf <= u[position] * cdf[-1]).sum())
                ids.append(token)
            ended = t.token_ids[-1] == 2
            assert t.finish_reason == ("stop" if ended else "length")
            assert ended or len(t.token_ids) == 12
            assert 2 not in t.token_ids[:-1]


def test_a_trajectory_is_the_same_alone_and_in_any_company(tiny_model, make_engine, make_request, drain):
    model = tiny_model()
    requests = [make_request(g, n=4) for g in range(9)]
    alone = {}
    for request in requests:
        engine = make_engine(model)
        engine.submit([request])
        alone |= drain(engine)
    together = make_engine(model)
    together.submit(requests)
    late = make_engine(model)  # joining while others are in flight, longer prompts and shorter ones
    joined = {}
    for request in [requests[i] for i in (3, 0, 8, 1, 2, 7, 4, 6, 5)]:
        late.submit([request])
        joined |= {r.group_id: r for _ in range(3) for r in late.step()}
    joined |= drain(late)
    lengths = {len(t.token_ids) for r in alone.values() for t in r.trajectories}
    assert len(lengths) > 4, "the example must have trajectories of many lengths"
    for other in (drain(together), joined):
        assert {g: [t.token_ids for t in r.trajectories] for g, r in other.items()} == {
            g: [t.token_ids for t in r.trajectories] for g, r in alone.items()
        }
        for result in other.values():
            assert_agrees(model, result)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampler_logprobs_equal_the_learners_in_float32(temperature, tiny_model, make_engine, make_request, drain):
    model = tiny_model(dtype=torch.float32)
    engine = make_engine(model, temperature=temperature)
    engine.submit([make_request(g) for g in range(6)])
    for result in drain(engine).values():
        assert_agrees(model, result, temperature, atol=1e-5)


def test_bfloat16_logprobs_are_float32_of_the_logits_in_use(tiny_model, make_engine, make_request, drain):
    engine = make_engine(tiny_model(dtype=torch.bfloat16))
    engine.submit([make_request(0)])
    values = [p for t in drain(engine)[0].trajectories for p in t.sampler_logprobs]
    assert all(p <= 0 for p in values)
    assert torch.tensor(values).bfloat16().tolist() != values


def test_weights_in_flight_old_tokens_keep_version_and_logprobs(tiny_model, make_engine, make_request, drain):
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    never = make_engine(tiny_model(seed=0), policy_version=3)
    never.submit([make_request(0)])
    unchanged = drain(never)[0]
    seen = []
    engine = make_engine(old, policy_version=3, on_version=seen.append)
    engine.submit([make_request(0)])
    for _ in range(4):
        engine.step()
    engine.load_weights(dict(new.named_parameters()), 7)
    result = drain(engine)[0]
    assert seen == [7]
    assert (result.started_version, result.completed_version) == (3, 7)
    for t, before in zip(result.trajectories, unchanged.trajectories, strict=True):
        assert t.policy_versions == (3,) * min(4, len(t.token_ids)) + (7,) * (len(t.token_ids) - 4)
        assert t.token_ids[:4] == before.token_ids[:4]
        assert t.sampler_logprobs[:4] == before.sampler_logprobs[:4]
        assert t.oldest_version == 3
    assert any(len(t.token_ids) > 4 for t in result.trajectories)


def test_tokens_after_a_swap_have_the_new_weights_logprobs_over_the_kept_cache(tiny_model, make_engine, make_request):
    """With only the last layer's output changed, keys and values stay valid: the new log-probs are exactly the new model's."""
    model = tiny_model(seed=0)
    changed = {n: p.detach().clone() for n, p in model.named_parameters()}
    changed["lm_head.weight"] = changed["lm_head.weight"].flip(0)
    engine = make_engine(model, stop_token_ids=())
    engine.submit([make_request(0)])
    for _ in range(5):
        engine.step()
    engine.load_weights(changed, 1)
    results = []
    while engine.num_active:
        results += engine.step()
    for t, want in zip(results[0].trajectories, full_forward(model, results[0]), strict=True):
        got = torch.tensor(t.sampler_logprobs, dtype=want.dtype)
        torch.testing.assert_close(got[5:], want[5:], atol=1e-9, rtol=0)
        assert (got[:5] - want[:5]).abs().max() > 1e-3, "the old tokens must carry the old weights' log-probs"


def test_submit_and_then_new_weights_before_the_first_step_counts_as_the_new_version(
    tiny_model, make_engine, make_request, drain
):
    engine = make_engine(tiny_model(seed=0))
    engine.submit([make_request(0)])
    new = tiny_model(seed=1)
    engine.load_weights(dict(new.named_parameters()), 1)
    result = drain(engine)[0]
    assert_agrees(new, result)
    assert {v for t in result.trajectories for v in t.policy_versions} == {1}
    assert engine.started() == [(0, 1)]
    assert engine.started() == []


def test_weights_of_another_model_are_refused_and_nothing_is_changed(tiny_model, make_engine):
    model = tiny_model()
    engine = make_engine(model)
    before = {n: p.clone() for n, p in model.named_parameters()}
    good = {n: torch.zeros_like(p) for n, p in before.items()}
    lacking = {n: p for n, p in good.items() if n != "lm_head.weight"}
    with pytest.raises(WeightSyncError, match=r"lack 'lm_head\.weight'"):
        engine.load_weights(lacking, 1)
    with pytest.raises(WeightSyncError, match="'extra', which the sampler's model lacks"):
        engine.load_weights({**good, "extra": torch.zeros(1)}, 1)
    with pytest.raises(WeightSyncError, match=r"is \[3\], in the sampler's model it is \[16\]"):
        engine.load_weights({**good, "model.norm.weight": torch.zeros(3)}, 1)
    assert engine.policy_version == 0
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])


def test_the_models_mode_is_left_as_found_and_dropout_is_off(make_engine, make_request, drain):
    config = GPT2Config(vocab_size=13, n_embd=16, n_layer=1, n_head=2, n_positions=32, resid_pdrop=0.5, embd_pdrop=0.5)
    model = GPT2LMHeadModel(config).double().train()
    model.transformer.ln_f.eval()
    modes = [m.training for m in model.modules()]
    engine = make_engine(model)
    engine.submit([make_request(g) for g in range(3)])
    results = drain(engine)
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None and not p.is_inference() for p in model.parameters())
    model.eval()
    for result in results.values():
        assert_agrees(model, result)


def test_sliding_window_attention_over_a_padded_cache(make_engine, make_request, drain):
    config = MistralConfig(
        vocab_size=13, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, sliding_window=4, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MistralForCausalLM(config).double().eval()
    engine = make_engine(model)
    engine.submit([make_request(g) for g in range(5)])
    engine.step()
    engine.submit([make_request(9)])
    for result in drain(engine).values():
        assert_agrees(model, result)


def test_tied_weights_load_under_either_name(make_engine, make_request, drain):
    config = GPT2Config(vocab_size=13, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    model = GPT2LMHeadModel(config).double().eval()
    assert model.lm_head.weight is model.transformer.wte.weight
    new = {("lm_head.weight" if "wte" in n else n): p.detach() + 0.5 for n, p in model.named_parameters()}
    engine = make_engine(model)
    engine.load_weights(new, 1)
    assert torch.equal(model.transformer.wte.weight, new["lm_head.weight"])


def test_nothing_is_printed_or_warned(tiny_model, make_engine, make_request, drain, capfd):
    engine = make_engine(tiny_model())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.submit([make_request(g) for g in range(5)])
        drain(engine)
    assert capfd.readouterr() == ("", "")


def test_the_argument_for_the_cache_is_found_by_name(tiny_model, make_engine, make_request, drain):
    """transformers 5.5 to 5.23 know `past_key_values` only, later ones warn about it."""
    model = tiny_model()
    engine = make_engine(model)
    engine.submit([make_request(0)])
    want = drain(engine)[0]

    class Older(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.config = model, model.config

        def get_output_embeddings(self):
            return self.inner.get_output_embeddings()

        def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None):
            return self.inner(
                input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=past_key_values,
                use_cache=use_cache,
            )

    older = make_engine(Older())
    older.submit([make_request(0)])
    assert drain(older)[0] == want


def test_prompts_that_do_not_fit_are_refused_by_name_and_none_is_taken(tiny_model, make_engine, make_request):
    engine = make_engine(tiny_model(), max_new_tokens=60)
    with pytest.raises(
        ConfigError, match=r"group 1 .*5 prompt tokens and max_new_tokens=60 are more than the model's 64"
    ):
        engine.submit([make_request(0, [3, 4]), make_request(1, [3] * 5)])
    with pytest.raises(ConfigError, match="prompt token 13 is not in the model's vocabulary of 13"):
        engine.submit([make_request(0, [3, 13])])
    with pytest.raises(ConfigError, match="group 4 is in flight already"):
        engine.submit([make_request(4, [3]), make_request(4, [3])])
    assert engine.num_active == 0
    assert engine.step() == []


def test_a_stop_token_outside_the_vocabulary_is_refused(tiny_model, make_engine):
    with pytest.raises(ConfigError, match="stop token 99 is not in the model's vocabulary of 13"):
        make_engine(tiny_model(), stop_token_ids=(2, 99))


def test_a_model_without_a_key_value_cache_is_refused():
    class Recurrent(torch.nn.Module):
        def forward(self, input_ids, state=None):
            return input_ids

    with pytest.raises(ConfigError, match="Recurrent keeps no key/value cache"):
        EmbeddedEngine(Recurrent(), SamplingParams(4), pad_token_id=0)


def test_weights_that_are_not_finite_end_generation_with_one_line(tiny_model, make_engine, make_request):
    model = tiny_model()
    engine = make_engine(model)
    engine.submit([make_request(5)])
    engine.step()
    bad = {n: p.detach().clone() for n, p in model.named_parameters()}
    bad["lm_head.weight"][3] = torch.nan
    engine.load_weights(bad, 8)
    with pytest.raises(RolloutError, match=r"policy version 8 gives no finite probabilities .*group 5, member 0"):
        engine.step()


def test_single_token_completions(tiny_model, make_engine, make_request):
    engine = make_engine(tiny_model(), max_new_tokens=1)
    engine.submit([make_request(0), make_request(1)])
    results = engine.step()
    assert [r.group_id for r in results] == [0, 1]
    assert all(len(t.token_ids) == 1 for r in results for t in r.trajectories)
    assert engine.num_active == 0


def test_another_run_seed_or_group_gives_other_tokens(tiny_model, make_engine, make_request, drain):
    def tokens(group_id, seed):
        engine = make_engine(tiny_model(), stop_token_ids=())
        engine.submit([make_request(group_id, [3, 4], seed=seed)])
        return [t.token_ids for t in drain(engine)[group_id].trajectories]

    first = tokens(0, 0)
    assert len(set(first)) == 3, "members must differ"
    assert tokens(0, 0) == first
    assert tokens(0, 1) != first
    assert tokens(1, 0) != first


def test_several_stop_tokens(tiny_model, make_engine, make_request, drain):
    engine = make_engine(tiny_model(), stop_token_ids=(2, 5, 7))
    engine.submit([make_request(g, n=8) for g in range(3)])
    ends = [t.token_ids[-1] for r in drain(engine).values() for t in r.trajectories if t.finish_reason == "stop"]
    assert set(ends) == {2, 5, 7}


def test_a_finished_groups_result_is_frozen_plain_python(tiny_model, make_engine, make_request, drain):
    engine = make_engine(tiny_model())
    engine.submit([make_request(0)])
    result = drain(engine)[0]
    assert [t.member for t in result.trajectories] == [0, 1, 2]
    for t in result.trajectories:
        assert {type(x) for x in (*t.token_ids, *t.policy_versions)} == {int}
        assert {type(x) for x in t.sampler_logprobs} == {float}
        assert (t.completion, t.reward) == ("", None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.group_id = 3
