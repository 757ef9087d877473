"""What `vcpo train` prints while it runs: plain lines for a person, or one JSON object a line for a program."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import typer

from vcpo.metrics.jsonl import finite
from vcpo.run_summary import clock_time

if TYPE_CHECKING:
    from vcpo.pipeline import Evaluation
    from vcpo.run_plan import RunPlan
    from vcpo.run_summary import RunSummary

Row = Mapping[str, Any]


class Console(Protocol):
    """vcpo.training.Progress, and what comes before and after."""

    def plan(self, plan: RunPlan) -> None:
        """What is going to run."""
        ...

    def warm_start(self, step: int, steps: int, loss: float | None) -> None:
        """See Progress."""
        ...

    def evaluated(self, step: int, evaluation: Evaluation, seconds: float) -> None:
        """See Progress."""
        ...

    def training(self) -> None:
        """See Progress."""
        ...

    def step(self, row: Row) -> None:
        """See Progress."""
        ...

    def note(self, text: str) -> None:
        """Something a person should know, such as a warning."""
        ...

    def summary(self, summary: RunSummary) -> None:
        """The run is over."""
        ...


class TextConsole:
    """Lines for a person: no colours, no redrawing, so that a log file reads as well as a terminal."""

    def __init__(self, *, seconds_between_lines: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._every = seconds_between_lines
        self._clock = clock
        self._last_line = -math.inf
        self._steps = 0
        self._speed = _Speed(clock)

    def plan(self, plan: RunPlan) -> None:
        self._steps = plan.steps
        typer.echo("\n".join(plan.lines()))

    def warm_start(self, step: int, steps: int, loss: float | None) -> None:
        if loss is None:
            typer.echo("warm start  taken from the cache")
        elif self._due(step in (1, steps), every=5.0):
            typer.echo(f"warm start  {step}/{steps}  loss {loss:.3f} nat/token")

    def evaluated(self, step: int, evaluation: Evaluation, seconds: float) -> None:
        when = "before training" if step == 0 else f"after {step} steps"
        reward = _number(evaluation.reward_mean, ".3f")
        typer.echo(f"held-out    reward {reward} {when} ({evaluation.n} prompts)")
        self._speed.leave_out(seconds)

    def training(self) -> None:
        self._speed.begin()

    def step(self, row: Row) -> None:
        self._speed.add(row.get("n_tokens") or 0)
        at = int(row["step"])
        if self._due(at in (1, self._steps) or bool(row.get("skipped"))):
            typer.echo(step_line(row, self._steps, self._speed.tokens_per_s, self._speed.eta_s(self._steps - at)))

    def note(self, text: str) -> None:
        typer.echo(text, err=True)

    def summary(self, summary: RunSummary) -> None:
        typer.echo("\n".join(summary.lines()))

    def _due(self, always: bool, every: float | None = None) -> bool:
        now = self._clock()
        if not always and now - self._last_line < (self._every if every is None else every):
            return False
        self._last_line = now
        return True


class JsonConsole:
    """One JSON object a line on stdout, each with an `event`; numbers that JSON does not know are null."""

    def plan(self, plan: RunPlan) -> None:
        self._print("plan", plan.to_dict())

    def warm_start(self, step: int, steps: int, loss: float | None) -> None:
        if loss is None or step in (1, steps) or step % 100 == 0:
            self._print("warm_start", {"step": step, "steps": steps, "loss": loss})

    def evaluated(self, step: int, evaluation: Evaluation, seconds: float) -> None:
        fields = {"eval_reward": evaluation.reward_mean, "standard_error": evaluation.standard_error}
        self._print("evaluation", {"step": step, **fields, "prompts": evaluation.n, "seconds": seconds})

    def training(self) -> None:
        pass

    def step(self, row: Row) -> None:
        self._print("step", row)

    def note(self, text: str) -> None:
        typer.echo(text, err=True)

    def summary(self, summary: RunSummary) -> None:
        self._print("summary", summary.to_dict())

    def _print(self, event: str, fields: Row) -> None:
        typer.echo(json.dumps(finite({"event": event, **fields})))


class _Speed:
    """Tokens per second and time left, from the moment training began; evaluations are not counted."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()
        self._busy_s, self._tokens, self._steps = 0.0, 0, 0

    def begin(self) -> None:
        """The first step begins now."""
        self._since = self._clock()

    def leave_out(self, seconds: float) -> None:
        """So long something else was done."""
        self._since += seconds

    def add(self, tokens: int) -> None:
        """A step with this many tokens has ended."""
        now = self._clock()
        self._busy_s += now - self._since
        self._since = now
        self._tokens += tokens
        self._steps += 1

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / self._busy_s if self._busy_s > 0 else 0.0

    def eta_s(self, steps_left: int) -> float:
        return self._busy_s / max(self._steps, 1) * steps_left


def step_line(row: Row, steps: int, tokens_per_s: float, eta_s: float) -> str:
    """`step 12/60  reward 0.43  ess 0.31 (truncated 0.52)  lr 2.0e-3 -> 1.1e-3  grad 0.8  lag 3 (max 4)  ...`"""
    parts = [f"step {row['step']}/{steps}"]
    if row.get("skipped"):
        parts.append(f"skipped: {row['skipped']}")
    parts += [
        f"reward {_number(row.get('reward_mean'), '.2f')}",
        f"ess {_number(row.get('ess_ratio'), '.2f')} (truncated {_number(row.get('ess_ratio_truncated'), '.2f')})",
        f"lr {_short_exponent(row.get('lr'))} -> {_short_exponent(row.get('lr_effective'))}",
        f"grad {_number(row.get('grad_norm'), '.2g')}",
        f"lag {_number(row.get('policy_lag_median'), 'g')} (max {_number(row.get('policy_lag_max'), 'g')})",
        f"{short_count(tokens_per_s)} tok/s",
        f"eta {clock_time(eta_s)}",
    ]
    return "  ".join(parts)


def _number(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def _short_exponent(value: Any) -> str:
    """0.002 -> 2.0e-3."""
    if value is None or not math.isfinite(value):
        return "-"
    mantissa, exponent = f"{value:.1e}".split("e")
    return "0" if value == 0 else f"{mantissa}e{int(exponent)}"


def short_count(value: float) -> str:
    """1234 -> 1.2k."""
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"
