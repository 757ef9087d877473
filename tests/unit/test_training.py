from __future__ import annotations

import json

import pytest
import torch

from vcpo import build, training
from vcpo.config import load_config, make_config
from vcpo.errors import RewardError
from vcpo.metrics import read_jsonl
from vcpo.run_summary import RunSummary
from vcpo.tasks import make_task

ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def a_config(tmp_path, **changes):
    tree = {
        "mode": "sync",
        "steps": 2,
        "run_dir": str(tmp_path / "run"),
        "policy": {"tokenizer": "characters", "architecture": ARCHITECTURE},
        "task": {"name": "running_sums", "options": {"digits": 3}},
        "rollout": {"groups_per_batch": 2, "num_generations": 3, "max_new_tokens": 6},
        "evaluation": {"prompts": 4},
    }
    for key, value in changes.items():
        tree[key] = tree[key] | value if isinstance(value, dict) and key in tree else value
    return make_config(tree)


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    """A picture takes longer than a tiny run, and has tests of its own."""
    monkeypatch.setattr(training, "plot_run", lambda rows, path, **_: path.write_bytes(b""))


class Watcher(training.Quiet):
    def __init__(self):
        self.seen = []

    def warm_start(self, step, steps, loss):
        self.seen.append(("warm_start", step, steps, loss is None))

    def evaluated(self, step, evaluation, seconds):
        self.seen.append(("evaluated", step, evaluation.n))

    def training(self):
        self.seen.append(("training",))

    def step(self, row):
        self.seen.append(("step", row["step"]))


def test_a_run_evaluates_before_and_after_and_leaves_its_files(tmp_path):
    config = a_config(tmp_path)
    watcher = Watcher()
    summary = training.train(config, watcher)
    assert watcher.seen == [("evaluated", 0, 4), ("training",), ("step", 1), ("evaluated", 2, 4), ("step", 2)]
    assert isinstance(summary, RunSummary)
    assert (summary.steps, summary.groups_trained, summary.policy_lag_max) == (2, 4, 0)
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary.to_dict()
    assert load_config(tmp_path / "run" / "config.toml") == config
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in rows if "eval_reward" in r] == [0, 2]


def test_the_policy_left_behind_is_the_trained_one_and_loads(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = a_config(tmp_path, evaluation={"prompts": 0}, warm_start={"steps": 3, "cache_dir": str(tmp_path / "c")})
    task = make_task("running_sums", digits=3)
    start = build.build_policy(config, task)
    training.train(config)
    end = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "policy")
    AutoTokenizer.from_pretrained(tmp_path / "run" / "policy")
    assert start.model.state_dict().keys() == end.state_dict().keys()


def test_evaluations_in_between_come_every_so_many_steps(tmp_path):
    watcher = Watcher()
    training.train(a_config(tmp_path, steps=5, evaluation={"prompts": 2, "every": 2}), watcher)
    assert [s[1] for s in watcher.seen if s[0] == "evaluated"] == [0, 2, 4, 5]


def test_evaluating_changes_nothing_in_the_training(tmp_path):
    with_them = training.train(a_config(tmp_path / "a", steps=3, evaluation={"prompts": 2, "every": 1}))
    without = training.train(a_config(tmp_path / "b", steps=3, evaluation={"prompts": 0}))
    assert without.reward_before is None
    rows = [read_jsonl(f"{s.run_dir}/metrics.jsonl") for s in (with_them, without)]
    one, other = ([(r["loss"], r["n_tokens"], r["grad_norm"]) for r in part if "loss" in r] for part in rows)
    assert one == other


def test_a_warm_start_is_made_once_and_serves_every_seed(tmp_path):
    warm = {"steps": 3, "batch_size": 4, "cache_dir": str(tmp_path / "cache")}
    first, second = Watcher(), Watcher()
    training.train(a_config(tmp_path / "a", warm_start=warm, steps=1, evaluation={"prompts": 0}), first)
    training.train(a_config(tmp_path / "b", warm_start=warm, steps=1, evaluation={"prompts": 0}, seed=5), second)
    assert first.seen[:3] == [("warm_start", i, 3, False) for i in (1, 2, 3)]
    assert second.seen[0] == ("warm_start", 3, 3, True)


def test_fresh_weights_follow_the_seed(tmp_path):
    task = make_task("running_sums", digits=3)
    policies = [build.build_policy(a_config(tmp_path, seed=s), task) for s in (0, 0, 1)]
    weights = [p.model.get_input_embeddings().weight for p in policies]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_threads_are_the_learners_during_the_run_and_restored_after(tmp_path, monkeypatch):
    seen = []
    before = torch.get_num_threads()
    monkeypatch.setattr(training._Training, "run", lambda self: seen.append(torch.get_num_threads()))
    training.train(a_config(tmp_path, learner={"threads": before + 1}))
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


def test_what_was_measured_before_a_failure_stays(tmp_path, monkeypatch):
    from vcpo.tasks.running_sums import RunningSums

    calls = []

    def fails_later(self, prompts, completions, **columns):
        calls.append(1)
        if len(calls) > 4:  # two groups a step: the third step's first
            raise ZeroDivisionError("in the reward function")
        return [0.0] * len(prompts)

    monkeypatch.setattr(RunningSums, "score", fails_later)
    with pytest.raises(RewardError, match="ZeroDivisionError: in the reward function"):
        training.train(a_config(tmp_path, steps=4, evaluation={"prompts": 0}))
    assert [r["step"] for r in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    assert (tmp_path / "run" / "run.png").is_file()
    assert not (tmp_path / "run" / "summary.json").exists()


def test_without_recorded_logprobs_the_learners_own_stand_in_at_lag_0(tmp_path):
    config = a_config(tmp_path, rollout={"sampler_logprobs": False}, evaluation={"prompts": 0})
    rows = read_jsonl(f"{training.train(config).run_dir}/metrics.jsonl")
    assert all(r["ess_ratio"] == pytest.approx(1.0) and r["log_ratio_abs_mean"] < 1e-6 for r in rows)


def test_gradient_clipping_can_be_off(tmp_path):
    config = a_config(tmp_path, variance_control={"max_grad_norm": "off"}, evaluation={"prompts": 0})
    rows = read_jsonl(f"{training.train(config).run_dir}/metrics.jsonl")
    assert [r["grad_clip"] for r in rows] == [None, None]


def test_samplers_beside_the_learner(tmp_path):
    config = a_config(
        tmp_path, mode="async", steps=4, rollout={"max_policy_lag": 1}, evaluation={"prompts": 2, "every": 2}
    )
    watcher = Watcher()
    summary = training.train(config, watcher)
    assert [s for s in watcher.seen if s[0] == "evaluated"] == [("evaluated", s, 2) for s in (0, 2, 4)]
    assert summary.steps == 4
    assert summary.policy_lag_max in (0, 1)
    assert summary.groups_trained == 8
    left = {p.name for p in (tmp_path / "run").iterdir()}
    assert left == {"config.toml", "metrics.jsonl", "run.png", "summary.json", "policy", "sampler_0.log"}
