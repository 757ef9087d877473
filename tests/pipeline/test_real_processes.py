"""Law 3 with nothing faked: real sampler processes, real weights through shared memory, `vcpo.training.train` itself."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from vcpo.config import make_config
from vcpo.training import train


def settings(folder, **changes):
    config = {
        "run_dir": str(folder),
        "steps": 3,
        "policy": {
            "tokenizer": "characters",
            "initialization": "torch",
            "architecture": {
                "model_type": "llama",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
            },
        },
        "task": {"name": "running_sums"},
        "warm_start": {"steps": 0},
        "rollout": {"groups_per_batch": 4, "num_generations": 4, "max_new_tokens": 12, "max_policy_lag": 0},
        "learner": {"lr": 1e-2, "lr_warmup_steps": 0},
        "variance_control": {"scale_rewards": "none", "baseline": "group_mean"},
        "evaluation": {"prompts": 4},
    }
    for key, value in changes.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    return make_config(config)


def weights(folder):
    return load_file(folder / "policy" / "model.safetensors")


@pytest.mark.timeout(240)
def test_lag_0_with_real_sampler_processes_equals_sync_bit_for_bit(tmp_path, monkeypatch):
    # A random policy earns no reward on the task: score by length, so that there is something to learn.
    from vcpo.tasks.running_sums import RunningSums

    monkeypatch.setattr(
        RunningSums, "score", lambda self, prompts, completions, **_: [len(c) / 12 for c in completions]
    )
    start = train(settings(tmp_path / "start", mode="sync", steps=1, learner={"lr": 1e-12}))
    train(settings(tmp_path / "sync", mode="sync"))
    summary = train(settings(tmp_path / "async", mode="async"))
    assert summary.policy_lag_max == 0
    first, second = weights(tmp_path / "sync"), weights(tmp_path / "async")
    assert all(torch.equal(first[name], second[name]) for name in first)
    begin = weights(tmp_path / "start")
    assert start.steps == 1
    assert any(not torch.equal(begin[name], first[name]) for name in first)
    lagged = train(settings(tmp_path / "lagged", mode="async", steps=4, rollout={"max_policy_lag": 2}))
    assert lagged.policy_lag_max in (1, 2)
    rows = [json.loads(line) for line in (tmp_path / "lagged" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["groups_dispatched"] == rows[-1]["groups_trained"] == 16
