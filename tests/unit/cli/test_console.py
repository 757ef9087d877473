from __future__ import annotations

import json
import math

import pytest

from vcpo.cli.console import JsonConsole, TextConsole, short_count, step_line
from vcpo.pipeline import Evaluation
from vcpo.run_summary import clock_time

ROW = {
    "step": 12,
    "reward_mean": 0.431,
    "ess_ratio": 0.312,
    "ess_ratio_truncated": 0.52,
    "lr": 2e-3,
    "lr_effective": 1.1e-3,
    "grad_norm": 0.83,
    "policy_lag_median": 3.0,
    "policy_lag_max": 4,
    "n_tokens": 1200,
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_line_of_a_step():
    assert step_line(ROW, 60, 1234.0, 41.4) == (
        "step 12/60  reward 0.43  ess 0.31 (truncated 0.52)  lr 2.0e-3 -> 1.1e-3  grad 0.83  lag 3 (max 4)  "
        "1.2k tok/s  eta 0:41"
    )


def test_what_was_not_measured_is_a_dash_and_a_skipped_step_says_why():
    line = step_line({"step": 1, "skipped": "ess is 0", "lr": math.nan, "lr_effective": 0.0}, 2, 0.0, 0.0)
    assert line.startswith(
        "step 1/2  skipped: ess is 0  reward -  ess - (truncated -)  lr - -> 0  grad -  lag - (max -)"
    )


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (41, "0:41"), (725, "12:05"), (3723, "1:02:03"), (59.6, "1:00")]
)
def test_times(seconds, text):
    assert clock_time(seconds) == text


def test_counts():
    assert [short_count(v) for v in (0, 999, 1234, 45678)] == ["0", "999", "1.2k", "45.7k"]


def test_lines_are_thinned_out_but_the_first_the_last_and_skipped_steps_are_shown(capsys):
    clock = Clock()
    console = TextConsole(seconds_between_lines=1.0, clock=clock)
    console._steps = 10
    console.training()
    for step in range(1, 11):
        clock.now += 0.3
        console.step({**ROW, "step": step, "skipped": "why" if step == 3 else None})
    shown = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["1/10", "3/10", "7/10", "10/10"]


def test_speed_leaves_out_evaluations_and_what_came_before_training(capsys):
    clock = Clock()
    console = TextConsole(clock=clock)
    console._steps = 4
    clock.now = 100.0
    console.training()
    clock.now += 2.0
    console.step({**ROW, "step": 1})
    clock.now += 50.0 + 2.0
    console.evaluated(2, Evaluation(reward_mean=0.5, standard_error=0.1, n=8, unscorable=0), 50.0)
    console.step({**ROW, "step": 2})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("600 tok/s  eta 0:06")
    assert lines[1] == "held-out    reward 0.500 after 2 steps (8 prompts)"
    assert lines[2].endswith("600 tok/s  eta 0:04")


def test_json_lines_are_strict_json(capsys):
    console = JsonConsole()
    console.warm_start(1, 3, 2.5)
    console.warm_start(2, 3, 2.4)
    console.warm_start(3, 3, None)
    console.step({**ROW, "grad_norm": math.nan})
    console.evaluated(0, Evaluation(reward_mean=None, standard_error=None, n=0, unscorable=3), 0.1)

    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    events = [json.loads(line, parse_constant=refuse) for line in capsys.readouterr().out.splitlines()]
    assert [e["event"] for e in events] == ["warm_start", "warm_start", "step", "evaluation"]
    assert events[2]["grad_norm"] is None
