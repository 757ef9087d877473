from __future__ import annotations

import math
import struct
import subprocess
import sys

import pytest

from vcpo.metrics import plot_run
from vcpo.metrics.picture import run_figure

PNG = b"\x89PNG\r\n\x1a\n"


def some_rows(steps: int) -> list[dict]:
    rows: list[dict] = [{"step": 0, "eval_reward": 0.2}]
    for t in range(1, steps + 1):
        rows.append(
            {
                "step": t,
                "reward_mean": t / (t + 5),
                "ess_ratio": math.nan if t == 3 else 0.5,
                "ess_ratio_truncated": 0.7,
                "lr": 2e-3,
                "lr_effective": 1.4e-3,
                "grad_norm": 0.0 if t == 4 else 0.3 / t,
                "grad_clip": None,
                "policy_lag_median": 2.0,
                "policy_lag_max": 4,
            }
        )
    rows[-1]["eval_reward"] = 0.9
    return rows


@pytest.mark.parametrize("rows", [[], some_rows(1), some_rows(12)])
def test_any_rows_make_one_picture_of_1200_by_900(tmp_path, rows):
    path = plot_run(rows, tmp_path / "run.png", title="a run", max_policy_lag=4)
    data = path.read_bytes()
    assert data.startswith(PNG)
    assert struct.unpack(">II", data[16:24]) == (1200, 900)


def lines_of(rows, **kwargs):
    panels = {ax.get_label(): ax for ax in run_figure(rows, **kwargs).axes}
    return {name: {line.get_label(): line.get_xydata() for line in ax.lines} for name, ax in panels.items()}


def test_each_panel_draws_its_metric():
    lines = lines_of(some_rows(12), max_policy_lag=4)
    assert lines["reward"]["training batch"][4].tolist() == [5.0, 0.5]
    assert lines["reward"]["held-out prompts"].tolist() == [[0.0, 0.2], [12.0, 0.9]]
    assert lines["ess"]["raw weights"][3].tolist() == [4.0, 0.5]
    assert lines["ess"]["truncated weights"][3].tolist() == [4.0, 0.7]
    assert lines["lr"]["lr (schedule)"][0].tolist() == [1.0, 2e-3]
    assert lines["lr"]["lr effective (scaled by ess)"][0].tolist() == [1.0, 1.4e-3]
    assert lines["grad"]["gradient norm"][0].tolist() == [1.0, 0.3]
    assert lines["lag"]["median of the batch"][0].tolist() == [1.0, 2.0]
    assert lines["lag"]["largest of the batch"][0].tolist() == [1.0, 4.0]
    assert lines["lag"]["bound 4"][:, 1].tolist() == [4.0, 4.0]


def test_what_is_missing_or_not_finite_leaves_a_gap_and_no_empty_line():
    lines = lines_of([{"step": 1, "grad_norm": math.nan}, {"step": 2, "ess_ratio": math.inf}, *some_rows(12)])
    assert math.isnan(lines["ess"]["raw weights"][0, 1])
    assert "clipping threshold" not in lines["grad"]
    assert [lines_of([])[name] for name in ("ess", "lr", "grad", "lag")] == [{}, {}, {}, {}]


def test_the_running_mean_is_over_the_last_five_steps():
    mean = lines_of(some_rows(12))["reward"]["training batch, mean of 5 steps"]
    assert mean[0].tolist() == [1.0, 1 / 6]
    assert mean[9, 1] == pytest.approx(sum(t / (t + 5) for t in range(6, 11)) / 5)


def test_matplotlib_is_imported_only_to_draw():
    code = "import sys, vcpo.metrics; assert 'matplotlib' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
