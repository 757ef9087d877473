"""Rewards for groups: calls a reward function within a time limit and checks what it gives back.

The function has TRL's shape, ``f(prompts, completions, **columns) -> list of numbers or None``, plain or async. It runs
in a worker process (see `score_workers`), which is killed when a call hangs. What another process cannot load, a lambda,
a closure, a function of the program's main file, runs on a thread of this process, with a warning: a thread cannot be
killed; one that hangs is left behind (it does not keep the process from ending) and its answer is ignored. Python code
and waiting are bounded in this way; a single call into C that never lets other threads run is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

from vcpo.errors import ConfigError, RewardError
from vcpo.tasks.protocol import Task
from vcpo.tasks.reward_values import RewardFailure, checked_rewards, raised, too_slow
from vcpo.tasks.score_workers import ScoreWorkers, Unloadable, to_bytes
from vcpo.types import Trajectory, TrajectoryGroup

RewardFunction = Callable[..., Any]
MAX_HUNG_CALLS = 16
"""With on_error="unscorable", this many calls may hang at once before the run ends all the same."""
MEMORY_GB = 8.0
"""Address space of a worker, unless told."""
_FINISHED = ("stop", "length")


class Scorer:
    """Scores groups with a task or a reward function; safe to use from several threads.

    A reward of None, NaN or plus or minus inf marks its trajectory unscorable (reward None) and is counted in
    `unscorable`. A function that raises, hangs or returns something else ends the run with RewardError, or, with
    ``on_error="unscorable"``, makes its group unscorable and is counted in `errors` by kind ("raised", "timeout",
    "wrong_length", "wrong_type", "died").
    """

    def __init__(
        self,
        task_or_function: Task | RewardFunction,
        *,
        timeout_s: float,
        on_error: Literal["stop", "unscorable"] = "stop",
        memory_gb: float = MEMORY_GB,
        workers: int = 1,
    ) -> None:
        """timeout_s: for one group. memory_gb: address space of a worker. workers: groups scored at once, at most."""
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
        self._workers = self._start_workers(memory_gb, workers)

    @property
    def isolated(self) -> bool:
        """Whether the function runs in workers that can be killed."""
        return self._workers is not None

    def close(self) -> None:
        """End the workers."""
        if self._workers is not None:
            self._workers.close()

    def _start_workers(self, memory_gb: float, workers: int) -> ScoreWorkers | None:
        try:
            function = to_bytes(self._function)
        except Unloadable as error:
            self._warn_of_thread(error)
            return None
        memory = int(memory_gb * 2**30)
        return ScoreWorkers(function, timeout_s=self._timeout_s, memory_bytes=memory, count=workers)

    def _warn_of_thread(self, why: Unloadable) -> None:
        warnings.warn(
            f"reward function {self.name} runs on a thread of the trainer, where a call that hangs cannot be ended ({why}); "
            "put it into a module of its own",
            stacklevel=2,
        )

    def score_group(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """The same group with rewards. Failed and aborted trajectories are not shown to the function and keep None."""
        shown = [t for t in group.trajectories if t.finish_reason in _FINISHED]
        rewards = iter(self._score(group, shown) if shown else [])
        return group.with_rewards([next(rewards) if t.finish_reason in _FINISHED else None for t in group.trajectories])

    def _score(self, group: TrajectoryGroup, shown: Sequence[Trajectory]) -> list[float | None]:
        try:
            rewards = self._call(group, shown)
        except RewardFailure as failure:
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

    def _call(self, group: TrajectoryGroup, shown: Sequence[Trajectory]) -> list[float | None]:
        columns = {name: [value] * len(shown) for name, value in group.prompt.columns.items()}
        given = {
            **columns,
            "prompts": [group.prompt.text] * len(shown),
            "completions": [t.completion for t in shown],
        }
        arguments = given if self._accepts is None else {k: v for k, v in given.items() if k in self._accepts}
        workers = self._workers
        if workers is not None:
            try:
                return workers.call(arguments, len(shown))
            except Unloadable as error:
                self._workers = None
                self._warn_of_thread(error)
        return checked_rewards(self._call_on_thread(arguments), len(shown))

    def _call_on_thread(self, arguments: Mapping[str, Any]) -> Any:
        call = _Call(self._function, arguments, f"reward {self.name}")
        call.start()
        call.join(self._timeout_s)
        if call.outcome == "returned":
            return call.value
        if call.outcome == "raised":
            raise raised(call.value) from call.value
        call.cancel()
        with self._lock:
            self._hung.append(call)
        raise too_slow(self._timeout_s)

    def _too_many_hang(self) -> bool:
        with self._lock:
            self._hung = [t for t in self._hung if t.is_alive()]
            return len(self._hung) >= MAX_HUNG_CALLS


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
