"""Reward functions in processes that can be killed: whatever hangs, forks, fills memory or calls exit ends with its worker.

The work of a call is bounded in time (from outside, by SIGKILL, so C code that never returns is bounded too) and in
memory (RLIMIT_AS). The function sees the trainer's files, environment and network: code that a model wrote needs a
sandbox on top.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vcpo.tasks.reward_values import RewardFailure, too_slow

LENGTH = struct.Struct("!Q")
"""In front of each message, either way."""
START_S = 120.0
"""A worker that is not ready after this many seconds (imports of the function's module included) has failed."""
_LARGEST_ANSWER = 2**26  # bytes


class Unloadable(Exception):
    """The function cannot be loaded in another process; says why."""


def to_bytes(function: Callable[..., Any]) -> bytes:
    """The function for another process; Unloadable for lambdas, closures and functions of the program's main file."""
    if getattr(function, "__module__", None) == "__main__":
        raise Unloadable("it stands in the program's main file")
    try:
        return pickle.dumps(function)
    except Exception as error:  # pickle raises PicklingError, AttributeError, TypeError
        raise Unloadable(" ".join(str(error).split())[:200]) from None


class ScoreWorkers:
    """Up to `count` workers for one function; safe to use from several threads, each call has a worker to itself."""

    def __init__(self, function: bytes, *, timeout_s: float, memory_bytes: int, count: int = 1) -> None:
        """function: from `to_bytes`. The first worker begins to load at once."""
        self._init = {"function": function, "timeout_s": timeout_s, "memory_bytes": memory_bytes}
        self._timeout_s = timeout_s
        self._free = threading.Semaphore(count)
        self._lock = threading.Lock()
        self._idle = [_Worker(self._init)]
        self._closed = False

    def call(self, arguments: Mapping[str, Any], count: int) -> list[float | None]:
        """Rewards of one call. RewardFailure when it fails; Unloadable when the function cannot be loaded over there."""
        with self._free:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            worker = worker or _Worker(self._init)
            try:
                rewards = worker.call(arguments, count, self._timeout_s)
            except RewardFailure as failure:
                if failure.kind in ("timeout", "died"):
                    worker.kill()
                raise
            except BaseException:
                worker.kill()
                raise
            finally:
                self._put_back(worker)
            return rewards

    def _put_back(self, worker: _Worker) -> None:
        with self._lock:
            if worker.alive and not self._closed:
                self._idle.append(worker)
                return
        worker.kill()

    def close(self) -> None:
        """End every worker and what it started; calls that are under way fail or come back first."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.kill()


class _Worker:
    """One process."""

    def __init__(self, init: Mapping[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                # -P: files in the working directory must not be taken for modules unless the trainer's path has it.
                [sys.executable, "-P", "-m", "vcpo.tasks.score_child", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
        finally:
            theirs.close()
        self._channel = ours
        self._calls = itertools.count()
        self._ready = False
        self.alive = True
        with contextlib.suppress(OSError):  # it died already: the first call will say so
            self._send(pickle.dumps(init), time.monotonic() + START_S)

    def call(self, arguments: Mapping[str, Any], count: int, timeout_s: float) -> list[float | None]:
        if not self._ready:
            self._wait_ready()
        number = next(self._calls)
        try:
            body = pickle.dumps({"call": number, "arguments": dict(arguments), "count": count})
        except Exception as error:
            raise RewardFailure(
                "raised", f"cannot be given its columns in a worker: {' '.join(str(error).split())}"
            ) from error
        deadline = time.monotonic() + timeout_s
        try:
            self._send(body, deadline)
            answer = self._receive(deadline)
            while answer.get("call") != number:
                answer = self._receive(deadline)
        except TimeoutError:
            raise too_slow(timeout_s) from None
        except OSError:
            raise self._died() from None
        if "rewards" in answer:
            return list(answer["rewards"])
        kind, text = answer["failure"]
        raise RewardFailure(kind, text) from (_Remote(answer["traceback"]) if "traceback" in answer else None)

    def _wait_ready(self) -> None:
        try:
            answer = self._receive(time.monotonic() + START_S)
        except TimeoutError:
            raise RewardFailure("died", f"was not loaded by its worker within {START_S:g} s") from None
        except OSError:
            raise self._died() from None
        if "unloadable" in answer:
            raise Unloadable(f"loading it in a worker {answer['unloadable']}")
        self._ready = True

    def _died(self) -> RewardFailure:
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return RewardFailure("died", "closed the connection of its worker to the trainer")
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        return RewardFailure("died", f"took its worker process down with it, which {how}")

    def _send(self, body: bytes, deadline: float) -> None:
        self._channel.settimeout(max(0.001, deadline - time.monotonic()))
        self._channel.sendall(LENGTH.pack(len(body)) + body)

    def _receive(self, deadline: float) -> dict[str, Any]:
        size = LENGTH.unpack(self._exactly(LENGTH.size, deadline))[0]
        if size > _LARGEST_ANSWER:
            raise OSError(f"an answer of {size} bytes")
        try:
            answer = json.loads(self._exactly(size, deadline))
        except ValueError as error:
            raise OSError("an answer that is no JSON") from error
        if not isinstance(answer, dict):
            raise OSError("an answer of another shape")
        return answer

    def _exactly(self, count: int, deadline: float) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            self._channel.settimeout(max(0.001, deadline - time.monotonic()))
            part = self._channel.recv(min(count - len(parts), 2**20))
            if not part:
                raise ConnectionError("the worker is gone")
            parts += part
        return bytes(parts)

    def kill(self) -> None:
        """End the process and everything that it started."""
        if not self.alive:
            return
        self.alive = False
        started = _descendants(self._process.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pid in started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._channel.close()


class _Remote(Exception):
    """A traceback from a worker, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _descendants(pid: int) -> list[int]:
    """Processes started by this one, by those, and so on; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # pid (name) state parent ...; the name may hold anything
            fields = entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found, waiting = [], [pid]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found.append(child)
            waiting.append(child)
    return found
