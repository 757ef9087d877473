"""Rewards for groups: calls a reward function within a time limit and checks what it gives back.

The function has TRL's shape, ``f(prompts, completions, **columns) -> list of numbers or None``, plain or async. It runs
on a thread of this process, so closures and open models work. A thread cannot be killed: one that hangs is left behind
(it does not keep the process from ending) and its answer is ignored. Python code and waiting are bounded in this way;
a single call into C that never lets other threads run is not, so text of a model must not be evaluated here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import threading
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from numbers import Real
from typing import Any, Literal

from vcpo.errors import ConfigError, RewardError
from vcpo.tasks.protocol import Task
from vcpo.types import Trajectory, TrajectoryGroup

RewardFunction = Callable[..., Any]
MAX_HUNG_CALLS = 16
"""With on_error="unscorable", this many calls may hang at once before the run ends all the same."""
_FINISHED = ("stop", "length")
_LARGEST = 3.4e38  # rewards travel as fp32: anything beyond it would arrive as inf


class Scorer:
    """Scores groups with a task or a reward function; safe to use from several threads.

    A reward of None, NaN or plus or minus inf marks its trajectory unscorable (reward None) and is counted in
    `unscorable`. A function that raises, hangs or returns something else ends the run with RewardError, or, with
    ``on_error="unscorable"``, makes its group unscorable and is counted in `errors` by kind ("raised", "timeout",
    "wrong_length", "wrong_type").
    """

    def __init__(
        self,
        task_or_function: Task | RewardFunction,
        *,
        timeout_s: float,
        on_error: Literal["stop", "unscorable"] = "stop",
    ) -> None:
        if not timeout_s > 0:
            raise ConfigError(f"the time limit of a reward function must be above 0 seconds, got {timeout_s}")
        if on_error not in ("stop", "unscorable"):
            raise ConfigError(f"on_reward_error must be stop or unscorable, got {on_error!r}")
        is_task = not inspect.isroutine(task_or_function) and hasattr(task_or_function, "score")
        self._function: RewardFunction = task_or_function.score if is_task else task_or_function  # type: ignore[union-attr]
        self.name = f"{getattr(task_or_function, 'name', 'task')}.score" if is_task else _name_of(self._function)
        if not callable(self._function):
            raise ConfigError(f"need a task or a reward function, got {type(task_or_function).__name__}")
        self._accepts = _accepted_names(self._function)
        self._timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        self._on_error = on_error
        self._lock = threading.Lock()
        self._hung: list[_Call] = []
        self.unscorable = 0
        """Trajectories shown to the function that came back without a usable reward."""
        self.errors: Counter[str] = Counter()
        """Failed calls by kind."""

    def score_group(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """The same group with rewards. Failed and aborted trajectories are not shown to the function and keep None."""
        shown = [t for t in group.trajectories if t.finish_reason in _FINISHED]
        rewards = iter(self._score(group, shown) if shown else [])
        return group.with_rewards([next(rewards) if t.finish_reason in _FINISHED else None for t in group.trajectories])

    def _score(self, group: TrajectoryGroup, shown: Sequence[Trajectory]) -> list[float | None]:
        try:
            returned = self._call(group, shown)
            rewards = self._checked(returned, len(shown))
        except _Failure as failure:
            with self._lock:
                self.errors[failure.kind] += 1
                self.unscorable += len(shown)
            if self._on_error == "stop" or self._too_many_hang():
                line = f"reward function {self.name} {failure} (prompt {group.prompt.prompt_id!r})"
                raise RewardError(line) from failure.__cause__
            return [None] * len(shown)
        with self._lock:
            self.unscorable += rewards.count(None)
        return rewards

    def _call(self, group: TrajectoryGroup, shown: Sequence[Trajectory]) -> Any:
        columns = {name: [value] * len(shown) for name, value in group.prompt.columns.items()}
        given = {
            **columns,
            "prompts": [group.prompt.text] * len(shown),
            "completions": [t.completion for t in shown],
        }
        arguments = given if self._accepts is None else {k: v for k, v in given.items() if k in self._accepts}
        call = _Call(self._function, arguments, f"reward {self.name}")
        call.start()
        call.join(self._timeout_s)
        if call.outcome == "returned":
            return call.value
        if call.outcome == "raised":
            raise _Failure("raised", f"raised {_where(call.value)}") from call.value
        call.cancel()
        with self._lock:
            self._hung.append(call)
        limit = f"{self._timeout_s:g} s"
        raise _Failure("timeout", f"did not return within its time limit of {limit}: make it faster or raise the limit")

    def _checked(self, returned: Any, count: int) -> list[float | None]:
        if hasattr(returned, "tolist") and not isinstance(returned, list | tuple):  # arrays and tensors
            returned = returned.tolist()
        if not isinstance(returned, list | tuple):
            raise _Failure(
                "wrong_type", f"returned {_show(returned)}, not a list with one number or None per completion"
            )
        if len(returned) != count:
            raise _Failure("wrong_length", f"returned {len(returned)} rewards for {count} completions")
        return [_reward(value, i) for i, value in enumerate(returned)]

    def _too_many_hang(self) -> bool:
        with self._lock:
            self._hung = [t for t in self._hung if t.is_alive()]
            return len(self._hung) >= MAX_HUNG_CALLS


class _Failure(Exception):
    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


class _Call(threading.Thread):
    """One call of a reward function, on its own daemon thread: the process may end while it still runs."""

    def __init__(self, function: RewardFunction, arguments: Mapping[str, Any], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._function, self._arguments = function, arguments
        self._task: asyncio.Task[Any] | None = None
        self.outcome: Literal["running", "returned", "raised"] = "running"
        self.value: Any = None

    def run(self) -> None:
        try:
            returned = self._function(**self._arguments)
            if inspect.isawaitable(returned):
                returned = asyncio.run(self._await(returned))
            self.value, self.outcome = returned, "returned"
        except BaseException as exc:  # sys.exit() in a reward function is a failure of that function, too
            self.value, self.outcome = exc, "raised"

    def cancel(self) -> None:
        """Ask a coroutine to stop; a plain function cannot be asked."""
        if self._task is not None:
            with contextlib.suppress(RuntimeError):  # its loop ended by itself in the meantime
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    async def _await(self, awaitable: Awaitable[Any]) -> Any:
        self._task = asyncio.current_task()
        asyncio.get_running_loop().set_default_executor(_DaemonThreads())
        return await awaitable


class _DaemonThreads(ThreadPoolExecutor):
    """For asyncio.to_thread in async reward functions: Python waits at exit for the threads of the usual executor."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as exc:
                future.set_exception(exc)

        threading.Thread(target=work, daemon=True).start()
        return future


def _reward(value: Any, index: int) -> float | None:
    if hasattr(value, "item") and not isinstance(value, Real):  # 0-d arrays and tensors
        value = value.item() if getattr(value, "ndim", 0) == 0 else value
    if value is None:
        return None
    if not isinstance(value, Real):
        raise _Failure("wrong_type", f"returned {_show(value)} as reward {index}, not a number or None")
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and abs(number) <= _LARGEST else None


def _accepted_names(function: RewardFunction) -> set[str] | None:
    """Names that can be given by keyword; None where anything can (**columns) or nothing is known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    return {p.name for p in parameters}


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__name__)


def _where(exc: BaseException) -> str:
    frames = traceback.extract_tb(exc.__traceback__)
    at = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(exc).__name__}: {' '.join(str(exc).split())[:200]}{at}"


def _show(value: Any) -> str:
    return f"{type(value).__name__} {' '.join(repr(value).split())[:60]}"
