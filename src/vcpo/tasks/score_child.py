"""A reward function in a process of its own: `python -m vcpo.tasks.score_child FD`, started by `score_workers`.

FD is one end of a socket. In: pickles (from the trainer, which is trusted), first what to load, then one call after the
other. Out: JSON (from code that reads hostile text, which is not):

    {"ready": true} or {"unloadable": "..."}, then for each call
    {"call": n, "rewards": [...]} or {"call": n, "failure": [kind, text], "traceback": "..."}

What the function prints goes to stderr. The process ends with its socket, and by itself when a call hangs far beyond its
limit: so also when the trainer was killed in the middle of one.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import json
import os
import pickle
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from vcpo.tasks.reward_values import RewardFailure, checked_rewards, raised
from vcpo.tasks.score_workers import LENGTH

_GRACE_S = 5.0


def main(argv: list[str] | None = None) -> int:
    """Serve until the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    channel = socket.socket(fileno=int((sys.argv[1:] if argv is None else argv)[0]))
    os.dup2(2, 1)  # nothing that is printed may look like an answer
    first = _receive(channel)
    if first is None:
        return 0
    init = pickle.loads(first)
    _bound_memory(init["memory_bytes"])
    try:
        function = pickle.loads(init["function"])
    except BaseException as error:
        _send(channel, {"unloadable": str(raised(error))})
        return 0
    _send(channel, {"ready": True})
    own = os.getpid()
    while (message := _receive(channel)) is not None:
        # A thread of C's own, which ends the process even where Python never gets its turn again.
        faulthandler.dump_traceback_later(init["timeout_s"] + _GRACE_S, exit=True)
        answer = _answer(function, pickle.loads(message))
        faulthandler.cancel_dump_traceback_later()
        if os.getpid() != own:  # the function forked and came back twice
            os._exit(0)
        _send(channel, answer)
    return 0


def _bound_memory(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _answer(function: Callable[..., Any], message: Mapping[str, Any]) -> dict[str, Any]:
    try:
        returned = function(**message["arguments"])
        if inspect.isawaitable(returned):
            returned = asyncio.run(_wait(returned))
        return {"call": message["call"], "rewards": checked_rewards(returned, message["count"])}
    except RewardFailure as failure:
        return {"call": message["call"], **_failed(failure)}
    except BaseException as error:  # sys.exit() in a reward function is a failure of that function, too
        return {"call": message["call"], **_failed(raised(error)), "traceback": traceback.format_exc(limit=-20)}


async def _wait(awaitable: Any) -> Any:
    return await awaitable


def _failed(failure: RewardFailure) -> dict[str, Any]:
    return {"failure": [failure.kind, str(failure)]}


def _send(channel: socket.socket, message: Mapping[str, Any]) -> None:
    body = json.dumps(message).encode()
    channel.sendall(LENGTH.pack(len(body)) + body)


def _receive(channel: socket.socket) -> bytes | None:
    """One whole message; None when the trainer is gone."""
    head = _exactly(channel, LENGTH.size)
    return None if head is None else _exactly(channel, LENGTH.unpack(head)[0])


def _exactly(channel: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = channel.recv(min(count - len(parts), 2**20))
        if not part:
            return None
        parts += part
    return bytes(parts)


if __name__ == "__main__":
    sys.exit(main())
