from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vcpo import training
from vcpo.cli.main import app
from vcpo.errors import RolloutError
from vcpo.metrics import METRICS, read_jsonl

RECIPE = """
mode = "sync"
steps = 2
run_dir = "DIR/run"
[policy]
tokenizer = "characters"
[policy.architecture]
model_type = "llama"
hidden_size = 16
intermediate_size = 16
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 64
[task]
name = "running_sums"
[rollout]
groups_per_batch = 2
num_generations = 3
max_new_tokens = 6
[evaluation]
prompts = 4
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE.replace("DIR", str(tmp_path)))
    return path


def run(*arguments: str | Path):
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def error_of(*arguments: str | Path) -> str:
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output
    return result.stderr.strip()


def test_a_run_prints_a_plan_its_steps_and_what_it_came_to(recipe, tmp_path):
    result = run(recipe)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "task        running_sums"
    assert any(line.startswith("step 1/2  reward 0.00  ess 1.00") for line in lines)
    assert any(line.startswith("held-out    reward 0.000 before training (4 prompts)") for line in lines)
    assert any(line.startswith("reward      0.000 before, 0.000 after: +0.000") for line in lines)
    assert any(line.startswith("policy lag  median 0, largest 0 (bound 0)") for line in lines)
    assert lines[-1] == f"picture     {tmp_path / 'run' / 'run.png'}"
    left = {p.name for p in (tmp_path / "run").iterdir()}
    assert left == {"config.toml", "metrics.jsonl", "run.png", "summary.json", "policy"}


def test_every_key_of_a_row_is_in_the_list_of_metrics(recipe, tmp_path, no_picture):
    assert (
        run(recipe, "mode=replay", "rollout.max_policy_lag=1", "variance_control.score_norms=two_pass").exit_code == 0
    )
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in rows] == [0, 1, 2]
    assert {k for r in rows for k in r} <= set(METRICS)
    assert {k for r in rows for k in r} >= set(METRICS) - {"nonfinite"}


def test_json_lines_for_programs(recipe, no_picture):
    result = run(recipe, "--json", "evaluation.prompts=0")
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [e["event"] for e in events] == ["plan", "step", "step", "summary"]
    assert events[0]["trajectories_per_step"] == 6
    assert events[-1]["reward_before"] is None
    assert Path(events[-1]["picture"]).is_file()


def test_a_dry_run_prints_the_plan_and_touches_nothing(recipe, tmp_path):
    result = run(recipe, "--dry-run")
    assert result.exit_code == 0
    assert "2 groups x 3 = 6 trajectories of up to 6 tokens" in result.output
    plan = json.loads(run(recipe, "--dry-run", "--json").stdout)
    assert (plan["event"], plan["steps"], plan["lag_bound"]) == ("plan", 2, 0)
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.toml"]


def test_the_folder_of_a_recipe_is_numbered_and_a_named_one_is_not(recipe, tmp_path, no_picture):
    quick = ("steps=1", "evaluation.prompts=0")
    assert run(recipe, *quick).exit_code == 0
    assert run(recipe, *quick).exit_code == 0
    assert (tmp_path / "run-2" / "summary.json").is_file()
    way_out = "already holds a run: choose another with --run-dir, or replace it with --overwrite"
    for named in (["--run-dir", tmp_path / "run"], [f"run_dir={tmp_path / 'run'}"]):
        for dry in ([], ["--dry-run"]):
            assert error_of(recipe, *quick, *named, *dry) == f"error: run_dir {tmp_path / 'run'} {way_out}"
    assert run(recipe, *quick, "--overwrite").exit_code == 0
    assert not (tmp_path / "run-3").exists()
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 1


def test_a_resolved_config_runs_again(recipe, tmp_path, no_picture):
    assert run(recipe, "seed=3").exit_code == 0
    again = run(tmp_path / "run" / "config.toml", "--run-dir", tmp_path / "again")
    assert again.exit_code == 0
    one, other = (read_jsonl(tmp_path / d / "metrics.jsonl") for d in ("run", "again"))
    for key in ("reward_mean", "loss", "grad_norm", "n_tokens", "eval_reward"):
        assert [r.get(key) for r in one] == [r.get(key) for r in other]


def test_mistakes_are_one_line_and_exit_1(recipe, tmp_path):
    assert error_of(tmp_path / "none.toml").startswith("error: cannot read ")
    assert error_of(recipe, "learner.lrr=1") == "error: command line: unknown key 'lrr' in [learner]; did you mean lr?"
    assert "unknown task 'runing_sums'" in error_of(recipe, "task.name=runing_sums", "--dry-run")
    assert "cannot be written" in error_of(recipe, "--run-dir", "/proc/x")
    (tmp_path / "file").write_text("")
    assert "is a file" in error_of(recipe, "--run-dir", tmp_path / "file")


def test_the_traceback_of_a_sampler_follows_the_line(recipe, monkeypatch):
    def die(*_, **__):
        raise RolloutError("sampler 0 died 3 times\nTraceback (most recent call last):\nBoom: in the sampler")

    monkeypatch.setattr(training, "train", die)
    result = run(recipe)
    assert result.exit_code == 1
    assert result.stderr == (
        "error: sampler 0 died 3 times\nTraceback (most recent call last):\nBoom: in the sampler\n"
    )


def test_ctrl_c_is_one_line_and_exit_130(recipe, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "train", interrupt)
    result = run(recipe)
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


def test_warnings_are_lines_on_stderr_and_lr_0_is_one(recipe, no_picture):
    result = run(recipe, "learner.lr=0", "steps=1", "evaluation.prompts=0")
    assert result.exit_code == 0
    assert "warning: learner.lr is 0: the policy will not change" in result.stdout
    assert result.stderr.startswith("warning: the base learning rate is 0")
