"""Tasks by name. A task of your own is any object with the members of `Task`; a factory here is for recipes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from vcpo.errors import ConfigError
from vcpo.tasks.countdown import Countdown
from vcpo.tasks.protocol import Task
from vcpo.tasks.running_sums import RunningSums
from vcpo.tasks.scoring import Scorer

__all__ = ["TASKS", "Countdown", "RunningSums", "Scorer", "Task", "make_task"]

TASKS: dict[str, Callable[..., Task]] = {"running_sums": RunningSums, "countdown": Countdown}


def make_task(name: str, /, **options: Any) -> Task:
    """The task called `name`; raises ConfigError that names the tasks or options there are, the nearest one first."""
    if name not in TASKS:
        raise ConfigError(f"unknown task {name!r}:{_nearest(name, TASKS)} there are {', '.join(sorted(TASKS))}")
    defaults = {f.name: f.default for f in fields(TASKS[name])}  # type: ignore[arg-type]  # all are dataclasses
    for option, value in options.items():
        if option not in defaults:
            near = _nearest(option, defaults)
            raise ConfigError(f"task {name} has no option {option!r}:{near} there are {', '.join(defaults)}")
        right = type(defaults[option])
        if type(value) not in ((int, float) if right is float else (right,)):
            raise ConfigError(f"task {name}: option {option} must be of type {right.__name__}, got {value!r}")
    return TASKS[name](**options)


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f" did you mean {close[0]!r}?" if close else ""
