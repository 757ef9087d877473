"""What a reward curve came to, which runs a grid has, what its page says, and that finished runs are not run again."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from vcpo.bench import stability
from vcpo.bench.curves import describe
from vcpo.bench.stability import GRIDS, Grid, Run, bench_stability, cell_path, runs_of
from vcpo.bench.stability_page import plot_stability, stability_page
from vcpo.cli.main import app
from vcpo.config import load_config, to_toml
from vcpo.errors import VcpoError


def test_a_collapse_is_seen_with_its_onset():
    rewards = [0.2] * 5 + [0.9] * 20 + [0.1] * 15
    found = describe(rewards)
    assert found["collapsed"]
    assert found["peak"] == 0.9
    assert found["final"] == pytest.approx(0.1)
    # Two of five at .1: mean .58 < .7 x .9, after 25 good-or-warm steps.
    assert found["onset"] == 27
    assert found["to_80"] == 10
    assert found["dip"] == pytest.approx(0.1)


def test_a_run_that_never_learns_has_not_collapsed_and_a_dip_is_no_collapse():
    assert not describe([0.1] * 40)["collapsed"]
    assert describe([0.1] * 40)["to_80"] is None
    dipped = describe([0.95] * 20 + [0.5] * 5 + [0.95] * 20)
    assert not dipped["collapsed"]
    assert dipped["onset"] is None
    assert dipped["dip"] == pytest.approx(0.5)


def test_a_short_run_is_described_too():
    assert describe([0.4])["final"] == 0.4


def test_every_grid_names_methods_that_exist_and_sync_comes_once_per_rate_and_seed():
    for grid in GRIDS.values():
        runs = list(runs_of(grid))
        assert len({run.name for run in runs}) == len(runs)
        sync = [run for run in runs if run.method == "sync"]
        assert {run.lag for run in sync} == {0}
        assert len(sync) == len(grid.lrs) * len(grid.seeds)
    assert len(list(runs_of(Grid("x", ("tis", "sync"), (1e-3,), (4, 16), 5, (0,))))) == 3


@pytest.mark.parametrize("method", stability.METHODS)
def test_every_method_is_a_valid_config_of_the_cell(tmp_path, method):
    config = load_config(str(cell_path()), Run(method, 1e-3, 16, 7, 20).overrides(tmp_path))
    assert config.mode == "replay"
    assert config.seed == 7
    assert config.rollout.max_policy_lag == (0 if method == "sync" else 16)
    assert config.variance_control.baseline == ("optimal" if method in ("vcpo", "opob") else "group_mean")
    assert config.variance_control.step_control == ("ess" if method in ("vcpo", "ess") else "none")


@pytest.fixture
def fake_train(monkeypatch):
    """Stands in for `vcpo train`: writes what a run leaves, counts the calls."""
    calls = []

    def train(recipe, overrides, *, threads):
        config = load_config(str(recipe), list(overrides))
        folder = stability.Path(config.run_dir)
        if config.seed == 13:
            raise VcpoError("vcpo train failed: boom")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(to_toml(config))
        row = {"reward_current": 0.5, "ess_ratio": 0.9, "ess_ratio_truncated": 0.9, "grad_norm": 0.1, "lr_scale": 1.0}
        lines = [json.dumps({"step": step, **row}) for step in range(1, config.steps + 1)]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "summary.json").write_text(json.dumps({"wall_s": 1.0}))
        calls.append(folder.name)

    monkeypatch.setattr(stability, "run_vcpo_train", train)
    return calls


def test_finished_runs_are_not_run_again_and_other_settings_are(tmp_path, fake_train):
    grid = Grid("tiny", ("sync", "tis"), (1e-3,), (2,), 6, (0, 1))
    evidence = bench_stability(grid, out=tmp_path, jobs=1, report=lambda line: None)
    assert len(evidence["runs"]) == 4
    assert len(fake_train) == 5  # and the warm start
    assert {"command", "commit", "machine", "versions", "cell"} <= set(evidence)
    again = bench_stability(grid, out=tmp_path, jobs=1, report=lambda line: None)
    assert len(fake_train) == 5
    assert again["runs"] == evidence["runs"]
    (tmp_path / fake_train[-1] / "config.toml").write_text(to_toml(load_config(str(cell_path()))))
    bench_stability(grid, out=tmp_path, jobs=1, report=lambda line: None)
    assert len(fake_train) == 6


def test_a_run_that_fails_ends_the_bench_with_its_reason(tmp_path, fake_train):
    with pytest.raises(VcpoError, match="boom"):
        bench_stability(Grid("x", ("tis",), (1e-3,), (2,), 3, (13,)), out=tmp_path, jobs=1, report=lambda line: None)


def test_page_and_picture_say_what_the_json_says(tmp_path, fake_train):
    grid = Grid("tiny", ("sync", "vcpo"), (1e-3, 2e-3), (2,), 6, (0,))
    evidence = bench_stability(grid, out=tmp_path, jobs=1, command="vcpo bench stability", report=lambda line: None)
    evidence["runs"][-1].update(collapsed=True, onset=5, final=0.02)
    page = stability_page(evidence, "picture.png", "A note.")
    assert "| VCPO (paper) | 0.002 | 2 | 1 of 1 | .02 (C@5) |" in page
    assert "A note." in page
    assert "command: `vcpo bench stability`" in page
    plot_stability(evidence, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_the_command_writes_all_three_and_plot_alone_redraws(tmp_path, fake_train):
    options = ["bench", "stability", "--out", str(tmp_path / "runs"), "--results", str(tmp_path), "--jobs", "1"]
    done = CliRunner().invoke(app, [*options, "--seeds", "0", "--steps", "6"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "stability-smoke.json").exists()
    (tmp_path / "stability-smoke.md").unlink()
    calls = len(fake_train)
    assert CliRunner().invoke(app, [*options, "--plot"]).exit_code == 0
    assert (tmp_path / "stability-smoke.md").exists()
    assert len(fake_train) == calls
    wrong = CliRunner().invoke(app, ["bench", "stability", "--grid", "smoky"])
    assert wrong.exit_code == 1
    assert wrong.stderr.startswith("error: unknown grid 'smoky'; use one of smoke")
    assert (
        CliRunner()
        .invoke(app, ["bench", "stability", "--seeds", "a"])
        .stderr.startswith("error: --seeds must be whole numbers")
    )
