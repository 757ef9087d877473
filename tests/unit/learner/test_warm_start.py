"""Supervised warm starts: they learn, they are deterministic, and their cache is whole or made again."""

from __future__ import annotations

import itertools
import json
import math
import os
import time

import pytest
import torch

from vcpo.errors import ConfigError
from vcpo.learner import warm_start
from vcpo.learner.warm_start import cached_warm_start, supervised_warm_start
from vcpo.policy import forward_logits, load_policy

TINY = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "initializer_range": 0.2,
}
NUMBERS = {"steps": 4, "batch_size": 4, "lr": 0.01, "seed": 0}


def make_policy(seed=0, alphabet="abcd>", **changes):
    return load_policy(architecture={**TINY, **changes}, tokenizer="characters", alphabet=alphabet, seed=seed)


def demonstrations():
    """Of unequal length, so that batches are padded: the letter, then its successor as often as it says."""
    return itertools.cycle([("a>", "b"), ("bb>", "ccc"), ("c>", "dd"), ("cc>", "ddddd")])


def weights(policy):
    return torch.cat([p.detach().flatten() for p in policy.model.parameters()])


# ---- training ----


def test_it_learns_the_completions_and_when_to_end():
    policy = make_policy()
    told = []
    loss = supervised_warm_start(
        policy, demonstrations(), steps=150, batch_size=4, lr=0.02, seed=0, report=lambda *row: told.append(row)
    )
    assert loss < 0.1
    assert loss == pytest.approx(sum(value for _, value in told[-15:]) / 15)
    assert [step for step, _ in told] == list(range(150))
    assert told[0][1] > 1.0
    for prompt, completion in itertools.islice(demonstrations(), 4):
        ids = policy.tokenizer(prompt + completion)["input_ids"]
        logits = forward_logits(policy.model, torch.tensor([ids]), torch.ones(1, len(ids)))
        written = logits[0, len(prompt) - 1 :].argmax(-1).tolist()
        assert written == [*ids[len(prompt) :], policy.eos_token_id]


def test_the_first_loss_is_the_plain_mean_over_completion_tokens():
    policy = make_policy()
    rows = list(itertools.islice(demonstrations(), 4))
    total, count = 0.0, 0
    for prompt, completion in rows:
        p = policy.tokenizer(prompt)["input_ids"]
        ids = [*p, *policy.tokenizer(completion)["input_ids"], policy.eos_token_id]
        logprobs = forward_logits(policy.model, torch.tensor([ids]), torch.ones(1, len(ids)))[0].log_softmax(-1)
        for at in range(len(p), len(ids)):
            total -= logprobs[at - 1, ids[at]].item()
            count += 1
    told = []
    supervised_warm_start(policy, iter(rows), **{**NUMBERS, "steps": 1}, report=lambda *row: told.append(row[1]))
    assert told == [pytest.approx(total / count, rel=1e-5)]


def test_one_seed_is_one_result_and_the_generators_are_put_back():
    runs = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        state = torch.get_rng_state()
        policy = make_policy(attention_dropout=0.3)
        supervised_warm_start(policy, demonstrations(), **NUMBERS)
        assert torch.equal(torch.get_rng_state(), state)
        runs.append(weights(policy))
    assert torch.equal(*runs)
    other = make_policy(attention_dropout=0.3)
    supervised_warm_start(other, demonstrations(), **{**NUMBERS, "seed": 1})
    assert not torch.equal(weights(other), runs[0])  # another seed, another dropout


@pytest.mark.parametrize("training", [True, False])
def test_the_models_mode_is_left_as_found_and_no_gradient_stays(training):
    policy = make_policy()
    policy.model.train(training)
    supervised_warm_start(policy, demonstrations(), **NUMBERS)
    assert policy.model.training is training
    assert all(p.grad is None for p in policy.model.parameters())
    with pytest.raises(ConfigError):
        supervised_warm_start(policy, iter([]), **NUMBERS)
    assert policy.model.training is training


def test_the_learning_rate_rises_and_falls_to_nothing():
    factors = [warm_start._schedule(step, 100, "cosine") for step in range(101)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[5] == 1.0
    assert all(a > b for a, b in itertools.pairwise(factors[5:]))
    assert factors[100] == pytest.approx(0.0, abs=1e-12)
    assert factors[99] > 0
    assert warm_start._schedule(0, 1, "cosine") == 1.0
    assert [warm_start._schedule(step, 100, "constant") for step in (0, 4, 5, 99)] == pytest.approx([0.2, 1, 1, 1])


def test_the_schedule_is_what_the_optimizer_steps_with():
    results = []
    for schedule in ("cosine", "constant"):
        policy = make_policy()
        supervised_warm_start(policy, demonstrations(), **NUMBERS, lr_schedule=schedule)
        results.append(weights(policy))
    assert not torch.equal(*results)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"lr_schedule": "linear"}, "cosine, constant"),
        ({"steps": 0}, "1 step"),
        ({"batch_size": 0}, "per step"),
        ({"lr": 0.0}, "positive"),
        ({"lr": math.nan}, "positive"),
    ],
)
def test_numbers_out_of_range_are_refused(changes, word):
    with pytest.raises(ConfigError, match=word):
        supervised_warm_start(make_policy(), demonstrations(), **{**NUMBERS, **changes})


def test_demonstrations_that_end_are_refused_in_one_line():
    with pytest.raises(ConfigError, match="ran out") as info:
        supervised_warm_start(make_policy(), iter([("a>", "b")] * 8), **NUMBERS)
    assert "\n" not in str(info.value)


# ---- the cache ----


def cached(tmp_path, *, make=make_policy, shown=demonstrations, key=None, **changes):
    told = []
    folder = cached_warm_start(
        make,
        shown,
        key=key or {"task": "letters", "noise": 0.0},
        cache_dir=tmp_path / "cache",
        report=lambda step, loss: told.append(step),
        **{**NUMBERS, **changes},
    )
    return folder, len(told)


def test_the_second_time_comes_from_the_cache_and_is_the_same_policy(tmp_path):
    folder, trained = cached(tmp_path)
    again, trained_again = cached(tmp_path)
    assert (folder, trained, trained_again) == (again, 4, 0)
    policy = make_policy()
    supervised_warm_start(policy, demonstrations(), **NUMBERS)
    assert torch.equal(weights(load_policy(path=folder)), weights(policy))
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [folder.name]
    manifest = json.loads((folder / "warm_start.json").read_text())
    assert manifest["key"] == {"task": "letters", "noise": 0.0}


def other_demonstrations():
    return itertools.cycle([("a>", "c")])


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 5},
        {"batch_size": 3},
        {"lr": 0.02},
        {"seed": 1},
        {"lr_schedule": "constant"},
        {"key": {"task": "letters", "noise": 0.1}},
        {"make": lambda: make_policy(seed=1)},
        {"make": lambda: make_policy(num_hidden_layers=2)},
        {"make": lambda: make_policy(rms_norm_eps=1e-5)},
        {"make": lambda: make_policy(alphabet="dcba>")},
        {"shown": other_demonstrations},
    ],
)
def test_whatever_decides_the_result_is_part_of_the_name(tmp_path, changes):
    first, _ = cached(tmp_path)
    second, trained = cached(tmp_path, **changes)
    assert first != second
    assert trained == changes.get("steps", 4)


def test_versions_and_threads_are_part_of_the_name(tmp_path, monkeypatch):
    first, _ = cached(tmp_path)
    monkeypatch.setattr(warm_start, "FORMAT_VERSION", warm_start.FORMAT_VERSION + 1)
    second, _ = cached(tmp_path)
    monkeypatch.setattr(torch, "__version__", "9.9")
    third, _ = cached(tmp_path)
    assert len({first, second, third}) == 3


def cut(file):
    file.write_bytes(file.read_bytes()[:-10])


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: cut(f / "model.safetensors"),
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-1] + b"\x7f"),
        lambda f: (f / "tokenizer.json").unlink(),
        lambda f: (f / "warm_start.json").unlink(),
        lambda f: cut(f / "warm_start.json"),
        lambda f: (f / "warm_start.json").write_text("[]"),
        lambda f: (f / "config.json").write_text("{}"),
    ],
)
def test_a_damaged_entry_is_made_again(tmp_path, damage):
    folder, _ = cached(tmp_path)
    expected = weights(load_policy(path=folder))
    damage(folder)
    again, trained = cached(tmp_path)
    assert (again, trained) == (folder, 4)
    assert torch.equal(weights(load_policy(path=folder)), expected)
    assert cached(tmp_path)[1] == 0
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [folder.name]


def test_a_training_that_fails_leaves_nothing_behind(tmp_path):
    with pytest.raises(ConfigError, match="ran out"):
        cached(tmp_path, shown=lambda: iter([("a>", "b")]))
    assert list((tmp_path / "cache").iterdir()) == []


def test_of_two_processes_at_once_the_later_one_takes_the_entry_of_the_first(tmp_path):
    other = []

    def race(step, loss):
        if step == 3 and not other:
            other.append(cached(tmp_path))

    folder = cached_warm_start(
        make_policy,
        demonstrations,
        key={"task": "letters", "noise": 0.0},
        cache_dir=tmp_path / "cache",
        report=race,
        **NUMBERS,
    )
    assert other == [(folder, 4)]
    assert cached(tmp_path) == (folder, 0)
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [folder.name]


def test_what_died_in_the_middle_long_ago_is_swept_away(tmp_path):
    old, fresh = tmp_path / "cache" / ".making-old", tmp_path / "cache" / ".making-fresh"
    for left in (old, fresh):
        left.mkdir(parents=True)
    os.utime(old, (time.time() - 200_000,) * 2)
    cached(tmp_path)
    assert not old.exists()
    assert fresh.exists()


def test_a_cache_that_cannot_be_written_is_refused_in_one_line(tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(ConfigError, match="cache_dir") as info:
        cached(tmp_path)
    assert "\n" not in str(info.value)
