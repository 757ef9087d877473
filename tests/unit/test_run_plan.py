from __future__ import annotations

import json
import struct

import pytest

from vcpo.config import make_config
from vcpo.errors import ConfigError
from vcpo.run_plan import decoder_parameters, plan_run

ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def a_config(**changes):
    tree = {"policy": {"tokenizer": "characters", "architecture": ARCHITECTURE}, "task": {"name": "running_sums"}}
    return make_config(tree | changes)


def test_the_numbers_of_a_run():
    plan = plan_run(a_config(steps=10, rollout={"groups_per_batch": 3, "num_generations": 5, "max_new_tokens": 7}))
    assert (plan.trajectories_per_step, plan.max_tokens_per_step, plan.max_tokens) == (15, 105, 1050)
    assert (plan.samplers, plan.lag_bound) == (1, 4)
    assert plan_run(a_config(mode="replay")).samplers == 0
    assert json.loads(json.dumps(plan.to_dict()))["mode"] == "async"
    assert any("3 groups x 5 = 15 trajectories" in line for line in plan.lines())


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("llama", {}),
        ("llama", {"head_dim": 8, "tie_word_embeddings": True}),
        ("mistral", {}),
        ("qwen3", {"head_dim": 8}),
    ],
)
def test_the_size_of_a_policy_is_the_size_of_the_model(model_type, more):
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    settings = {k: v for k, v in ARCHITECTURE.items() if k != "model_type"} | more
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**settings, vocab_size=21))
    counted = sum(p.numel() for p in model.parameters())
    assert decoder_parameters({**ARCHITECTURE, "model_type": model_type, **more}, vocabulary=21) == counted


def test_a_size_that_only_loading_would_tell_is_none():
    assert decoder_parameters({"model_type": "gpt2", "n_embd": 8}, vocabulary=10) is None
    assert decoder_parameters({"model_type": "llama", "hidden_size": 8}, vocabulary=10) is None
    assert decoder_parameters({**ARCHITECTURE, "model_type": "qwen3"}, vocabulary=10) is None
    assert plan_run(a_config(policy={"path": "some/hub-id"})).parameters is None


def test_the_size_of_a_folder_is_read_from_its_headers(tmp_path):
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]},
            "b": {"dtype": "F32", "shape": [], "data_offsets": [48, 52]},
        }
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(52))
    (tmp_path / "config.json").write_text("{}")
    assert plan_run(a_config(policy={"path": str(tmp_path)})).parameters == 13


def test_what_is_not_there_is_told_in_one_line(tmp_path):
    for changes, said in [
        ({"task": {"name": "running_sum"}}, "unknown task 'running_sum': did you mean 'running_sums'"),
        ({"task": {"name": "running_sums", "options": {"digit": 3}}}, "no option 'digit'"),
        ({"policy": {"path": "./nowhere"}}, "policy.path './nowhere' is not a folder that exists"),
        ({"policy": {"path": str(tmp_path)}}, "has no config.json"),
        (
            {"policy": {"architecture": ARCHITECTURE, "tokenizer": "/nowhere"}},
            "policy.tokenizer '/nowhere' is not a folder that exists",
        ),
    ]:
        with pytest.raises(ConfigError, match=said) as caught:
            plan_run(a_config(**changes))
        assert "\n" not in str(caught.value)
