"""Loading, saving and refusing policies, and the character tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vcpo.errors import ConfigError
from vcpo.policy import (
    character_tokenizer,
    encode_prompt,
    forward_logits,
    load_policy,
    model_fingerprint,
    save_policy,
    seeded,
)

TINY = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
}
# Letters that spell special tokens, characters that tokenizers like to clean up or merge, and a wide one.
ALPHABET = "<>/abcdeknopsu0123.,'! \n\r\t\x00é\u0301\u2028\U0001f600"
TOKENIZER = character_tokenizer(ALPHABET)


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def tiny(**changes):
    given = {"architecture": TINY, "tokenizer": "characters", "alphabet": "0123456789+=", "seed": 0}
    return load_policy(**{**given, **changes})


def one_line(info) -> str:
    text = str(info.value)
    assert "\n" not in text
    return text


# ---- the character tokenizer ----


@settings(deadline=None, max_examples=300)
@given(st.text(alphabet=ALPHABET, max_size=40))
def test_encoding_and_decoding_give_back_every_string_over_the_alphabet(text):
    ids = TOKENIZER(text)["input_ids"]
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("text", ["<eos>", "<pad><unk>", "a<eos>b", " a , b . n't \r\n", "e\u0301é", "<unk"])
def test_text_never_turns_into_a_special_token_nor_is_cleaned_up(text):
    tok = character_tokenizer("".join(sorted(set(text))))
    ids = tok(text)["input_ids"]
    assert not set(ids) & {tok.pad_token_id, tok.eos_token_id, tok.unk_token_id}
    assert tok.decode(ids, skip_special_tokens=True) == text


def test_an_unknown_character_becomes_unk_and_a_prompt_with_one_is_refused():
    tok = character_tokenizer("abc")
    assert tok("azb")["input_ids"] == [3, tok.unk_token_id, 4]
    assert encode_prompt(tok, "abc") == [3, 4, 5]
    with pytest.raises(ConfigError, match="'z'") as info:
        encode_prompt(tok, "azb")
    one_line(info)
    with pytest.raises(ConfigError, match="empty"):
        encode_prompt(tok, "")


def test_the_special_tokens_are_not_decoded_when_skipped():
    ids = [3, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id, 4]
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == ALPHABET[:2]


@pytest.mark.parametrize(("alphabet", "word"), [("", "empty"), ("abca", "repeats 'a'"), ("a\ud800", "surrogate")])
def test_an_alphabet_must_be_a_set_of_characters(alphabet, word):
    with pytest.raises(ConfigError, match=word) as info:
        character_tokenizer(alphabet)
    one_line(info)


# ---- building and saving ----


def test_a_seed_is_a_policy_and_the_global_generator_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, same, other = tiny(seed=1), tiny(seed=1), tiny(seed=2)
    assert torch.equal(torch.rand(3), expected)
    weights = [p.model.lm_head.weight for p in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert one.model.config.vocab_size == 3 + 12
    assert not one.model.training


def test_torch_initialization_is_wider_and_also_a_function_of_the_seed():
    usual, one, same = tiny(), tiny(initialization="torch"), tiny(initialization="torch")
    assert torch.equal(one.model.lm_head.weight, same.model.lm_head.weight)
    assert usual.model.get_input_embeddings().weight.std() < 0.03
    assert 0.8 < one.model.get_input_embeddings().weight.std() < 1.2
    bound = 16**-0.5  # fan-in of the output layer
    assert 0.9 * bound < one.model.lm_head.weight.abs().max() <= bound


def test_bfloat16_is_the_same_policy_rounded():
    full, half = tiny(seed=3), tiny(seed=3, dtype="bfloat16")
    for a, b in zip(full.model.parameters(), half.model.parameters(), strict=True):
        assert b.dtype == torch.bfloat16
        assert torch.equal(a.to(torch.bfloat16), b)


def test_a_saved_policy_is_a_plain_folder_that_transformers_loads(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = tiny(alphabet="<>eos 0123")
    save_policy(policy, tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in folder.iterdir()}
    assert not [p for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pkl")]
    again = load_policy(path=folder)
    tok = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([again.tokenizer("<eos> 01")["input_ids"]])
    assert ids.tolist() == [tok("<eos> 01")["input_ids"]] == [policy.tokenizer("<eos> 01")["input_ids"]]
    assert tok.decode(ids[0], skip_special_tokens=True) == "<eos> 01"
    expected = forward_logits(policy.model, ids, torch.ones_like(ids))
    for loaded in (again.model, model):
        assert torch.equal(forward_logits(loaded, ids, torch.ones_like(ids)), expected)
    assert (again.pad_token_id, again.eos_token_id) == (policy.pad_token_id, policy.eos_token_id) == (0, 1)
    assert load_policy(path=str(folder), dtype="bfloat16").model.dtype == torch.bfloat16


def test_saving_and_loading_print_nothing(tmp_path, capfd):
    save_policy(tiny(), tmp_path)
    load_policy(path=tmp_path)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_the_fingerprint_speaks_of_names_shapes_and_dtypes_only():
    assert model_fingerprint(tiny(seed=1).model) == model_fingerprint(tiny(seed=2).model)
    others = [
        tiny(dtype="bfloat16"),
        tiny(alphabet="01"),
        tiny(architecture={**TINY, "num_hidden_layers": 2}),
        tiny(architecture={**TINY, "model_type": "qwen3", "head_dim": 8}),
    ]
    prints = {model_fingerprint(p.model) for p in [tiny(), *others]}
    assert len(prints) == 5


def test_seeded_puts_the_generator_back_also_after_an_error():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with pytest.raises(KeyError), seeded(4):
        first = torch.rand(2)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), state)
    with seeded(4):
        assert torch.equal(torch.rand(2), first)


def test_importing_the_module_loads_no_transformers():
    code = "import sys, vcpo.policy; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- what is refused, in one line ----


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": None}, ["path", "architecture"]),
        ({"path": "x"}, ["not both"]),
        ({"initialization": "xavier"}, ["xavier", "transformers, torch"]),
        ({"dtype": "float31"}, ["float31", "float32, bfloat16"]),
        ({"tokenizer": None}, ["tokenizer", "characters"]),
        ({"alphabet": None}, ["alphabet"]),
        ({"architecture": {"model_type": "lama"}}, ["'lama'", "did you mean llama", "qwen3"]),
        ({"architecture": {"hidden_size": 8}}, ["model_type None", "llama"]),
        ({"architecture": {"model_type": "vit"}}, ["'vit'", "causal"]),
        ({"architecture": {**TINY, "hiden_size": 8}}, ["hiden_size", "did you mean hidden_size"]),
        ({"architecture": {**TINY, "hidden_size": "8"}}, ["hidden_size"]),
        ({"architecture": {**TINY, "num_attention_heads": 3}}, ["attention"]),
        ({"architecture": {**TINY, "eos_token_id": 3}}, ["eos_token_id", "tokenizer"]),
        ({"architecture": {**TINY, "dtype": "bfloat16"}}, ["dtype", "policy.dtype"]),
        ({"architecture": {**TINY, "vocab_size": 14}}, ["do not match", "14", "13"]),
        ({"architecture": None, "path": "./no/such"}, ["'./no/such'", "folder"]),
        ({"architecture": None, "path": "/no/such"}, ["'/no/such'", "folder"]),
        ({"architecture": None, "path": "a/b/c"}, ["'a/b/c'", "folder"]),
        ({"architecture": None, "path": "some-org/some-model"}, ["some-org/some-model"]),
        ({"tokenizer": "/no/such"}, ["tokenizer", "/no/such"]),
    ],
)
def test_what_cannot_be_a_policy_is_refused_in_one_line(changes, words):
    with pytest.raises(ConfigError) as info:
        tiny(**changes)
    text = one_line(info)
    assert all(word in text for word in words), text


def edit(folder, name, **changes):
    file = folder / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("name", ["pad", "eos"])
def test_a_model_without_pad_or_eos_token_is_refused_with_the_way_to_set_it(tmp_path, name):
    save_policy(tiny(), tmp_path)
    edit(tmp_path, "tokenizer_config.json", **{f"{name}_token": None})
    edit(tmp_path, "config.json", **{f"{name}_token_id": None})
    with pytest.raises(ConfigError, match=f"no {name} token") as info:
        load_policy(path=tmp_path)
    assert f"tokenizer.{name}_token = " in one_line(info)


def test_the_model_config_stands_in_for_a_token_that_the_tokenizer_does_not_name(tmp_path):
    save_policy(tiny(), tmp_path)
    edit(tmp_path, "tokenizer_config.json", pad_token=None, eos_token=None)
    edit(tmp_path, "config.json", pad_token_id=2, eos_token_id=[7, 8])
    policy = load_policy(path=tmp_path)
    assert (policy.pad_token_id, policy.eos_token_id) == (2, 7)


def test_special_token_ids_outside_the_vocabulary_are_refused(tmp_path):
    save_policy(tiny(), tmp_path)
    edit(tmp_path, "tokenizer_config.json", eos_token=None)
    edit(tmp_path, "config.json", eos_token_id=900)
    with pytest.raises(ConfigError, match="eos token id 900") as info:
        load_policy(path=tmp_path)
    one_line(info)


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    save_policy(tiny(), tmp_path / "small")
    save_policy(tiny(alphabet="abcdefghijklmnopqrstuvwxyz"), tmp_path / "large")
    with pytest.raises(ConfigError, match="do not match") as info:
        load_policy(path=tmp_path / "small", tokenizer=tmp_path / "large")
    one_line(info)


def test_a_folder_that_lacks_weights_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    save_policy(tiny(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 weights.*lm_head") as info:
        load_policy(path=tmp_path)
    one_line(info)


def test_torn_and_pickled_weights_are_refused(tmp_path):
    policy = tiny()
    save_policy(policy, tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError) as info:
        load_policy(path=tmp_path)
    one_line(info)
    (tmp_path / "model.safetensors").unlink()
    torch.save(policy.model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safetensors") as info:
        load_policy(path=tmp_path)
    one_line(info)


def test_an_empty_folder_and_a_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"without config\.json"):
        load_policy(path=tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="not a folder"):
        load_policy(path=tmp_path / "file")
