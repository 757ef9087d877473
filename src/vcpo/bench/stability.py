"""Who keeps learning at a high policy lag: the same cell, method by method and seed by seed, in replay mode.

Each run is an ordinary `vcpo train` of the cell with a few settings replaced, in a process of one thread; its folder keeps
config, metrics and summary. A run whose folder holds a finished result for the same config is not run again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from vcpo.bench.curves import describe
from vcpo.bench.evidence import provenance
from vcpo.config import load_config, to_json
from vcpo.errors import ConfigError, VcpoError
from vcpo.metrics import read_jsonl

CELL = "stability.toml"
"""The cell all methods share; package data, so that it is there without a checkout."""

_TIS = {"variance_control.baseline": "group_mean", "variance_control.step_control": "none"}
METHODS: dict[str, dict[str, Any]] = {
    "sync": {**_TIS, "rollout.max_policy_lag": 0},
    "tis": _TIS,
    "ess": {"variance_control.baseline": "group_mean", "variance_control.step_control": "ess"},
    "opob": {"variance_control.baseline": "optimal", "variance_control.step_control": "none"},
    "vcpo": {"variance_control.baseline": "optimal", "variance_control.step_control": "ess"},
}
"""name -> what it sets in the cell. sync: lag 0. tis: truncated sequence weights alone. ess, opob: VCPO's parts alone."""


@dataclass(frozen=True)
class Grid:
    """Which runs: every method at every learning rate, lag and seed (sync once per rate and seed)."""

    name: str
    methods: tuple[str, ...]
    lrs: tuple[float, ...]
    lags: tuple[int, ...]
    steps: int
    seeds: tuple[int, ...]


GRIDS = {
    "smoke": Grid("smoke", ("sync", "tis", "ess", "vcpo"), (2e-3,), (16,), 80, (0, 1, 2)),
    "rates": Grid("rates", ("sync", "tis", "ess", "vcpo"), (5e-4, 1e-3), (16,), 80, (0, 1)),
    "quick": Grid("quick", ("sync", "tis", "ess", "vcpo"), (2e-3,), (16,), 80, (0, 1, 2, 3, 4)),
}


@dataclass(frozen=True)
class Run:
    """One run of a grid."""

    method: str
    lr: float
    lag: int
    seed: int
    steps: int

    @property
    def name(self) -> str:
        """Folder name."""
        return f"{self.method}-lr{self.lr:g}-k{self.lag}-seed{self.seed}-{self.steps}steps"

    def overrides(self, folder: Path) -> list[str]:
        """KEY=VALUE arguments of `vcpo train` on the cell."""
        settings: dict[str, Any] = {"rollout.max_policy_lag": self.lag, **METHODS[self.method]}
        pairs = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        return [*pairs, f"learner.lr={self.lr}", f"seed={self.seed}", f"steps={self.steps}", f'run_dir="{folder}"']


def runs_of(grid: Grid) -> Iterator[Run]:
    """Every run of the grid; a method that fixes its own lag comes once, not once per lag."""
    for method in grid.methods:
        if method not in METHODS:
            raise ConfigError(f"unknown method {method!r} in grid {grid.name}; use one of {', '.join(METHODS)}")
        own = METHODS[method].get("rollout.max_policy_lag")
        for lag in grid.lags if own is None else (own,):
            for lr in grid.lrs:
                for seed in grid.seeds:
                    yield Run(method, lr, lag, seed, grid.steps)


def bench_stability(
    grid: Grid,
    *,
    out: Path,
    jobs: int | None = None,
    command: str = "",
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run what is missing of the grid and return the evidence: per run its figures, per method the counts over seeds.

    jobs: processes at a time, each of one thread; default the number of cores. Raises RolloutError and the like as
    one VcpoError naming the run that failed; finished runs stay.
    """
    began = time.monotonic()
    runs = list(runs_of(grid))
    out.mkdir(parents=True, exist_ok=True)
    _warm_start(out, report)
    missing = [run for run in runs if not _finished(run, out)]
    report(f"stability grid {grid.name}: {len(runs)} runs, {len(runs) - len(missing)} of them there already")
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as workers:
        for run, seconds in workers.map(lambda r: _train(r, out), missing):
            figures = describe(_rewards(out / run.name))
            report(f"  {run.name}: final {figures['final']:.2f}{_collapse_word(figures)}  ({seconds:.0f} s)")
    return {
        **provenance(command),
        "grid": {**grid.__dict__},
        "cell": json.loads(to_json(load_config(str(cell_path())))),
        "wall_s": round(time.monotonic() - began, 1),
        "runs": [_result(run, out) for run in runs],
    }


def _collapse_word(figures: dict[str, Any]) -> str:
    return f", collapsed at step {figures['onset']}" if figures["collapsed"] else ""


def _result(run: Run, out: Path) -> dict[str, Any]:
    rows = read_jsonl(out / run.name / "metrics.jsonl")
    summary = json.loads((out / run.name / "summary.json").read_text())
    curves = {
        name: [None if row.get(name) is None else round(row[name], 4) for row in rows if row["step"] > 0]
        for name in ("reward_current", "ess_ratio", "ess_ratio_truncated", "grad_norm", "lr_scale")
    }
    figures = describe(_rewards(out / run.name))
    return {**run.__dict__, **figures, "wall_s": round(summary["wall_s"], 1), "curves": curves}


def _rewards(folder: Path) -> list[float]:
    """Reward of the current policy at each step."""
    return [
        row["reward_current"] for row in read_jsonl(folder / "metrics.jsonl") if row.get("reward_current") is not None
    ]


def cell_path() -> Path:
    """The TOML file of the cell."""
    return Path(str(files("vcpo.bench").joinpath(CELL)))


def _warm_start(out: Path, report: Callable[[str], None]) -> None:
    """Once, before the runs share it: otherwise every process would train its own."""
    probe = Run("tis", 1e-3, 0, 0, 1)
    if _finished(probe, out):
        return
    report("warm start (cached for all runs) ...")
    _, seconds = _train(probe, out)
    report(f"warm start and one step: {seconds:.0f} s")


def _finished(run: Run, out: Path) -> bool:
    folder = out / run.name
    if not (folder / "summary.json").exists():
        return False
    wanted = to_json(load_config(str(cell_path()), run.overrides(folder)))
    return json.loads(wanted) == json.loads(to_json(load_config(str(folder / "config.toml"))))


def _train(run: Run, out: Path) -> tuple[Run, float]:
    folder = out / run.name
    began = time.monotonic()
    run_vcpo_train(cell_path(), run.overrides(folder), threads=1)
    return run, time.monotonic() - began


def run_vcpo_train(recipe: Path, overrides: Sequence[str], *, threads: int) -> None:
    """`vcpo train` in a process of its own, replacing what its folder holds; VcpoError with its last line if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "vcpo.cli.main", "train", str(recipe), "--overwrite", *overrides]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        why = (done.stderr.strip() or "no message").splitlines()[-1]
        raise VcpoError(f"vcpo train {recipe.name} {' '.join(overrides)} failed: {why}")
