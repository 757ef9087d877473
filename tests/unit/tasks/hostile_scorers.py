"""Reward functions that a worker must survive; each leaves the pids it made in the file named by its column `pids`."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
from pathlib import Path


def fine(completions, **columns):
    print("a line on stdout")
    os.write(1, b'{"call": 0, "rewards": [9.0]}')
    return [float(len(c)) for c in completions]


def where(completions, **columns):
    return [float(os.getpid())] * len(completions)


def loops(completions, **columns):
    if "bad" in completions:
        while True:
            pass
    return [1.0] * len(completions)


def hangs_in_c(completions, **columns):
    """One call that keeps Python's lock for ever."""
    if "bad" in completions:
        ctypes.PyDLL(None).pause()
    return [1.0] * len(completions)


def power_evaluated(completions, **columns):
    return [float(bool(eval("9**9**9**9"))) if c == "bad" else 1.0 for c in completions]


async def waits(completions, **columns):
    if "bad" in completions:
        await asyncio.sleep(3600)
    return [1.0] * len(completions)


def forks(completions, pids, **columns):
    if "bad" in completions:
        for own_session in (False, True):
            pid = os.fork()
            if pid == 0:
                if own_session:
                    os.setsid()
                time.sleep(3600)
            with Path(pids[0]).open("a") as file:
                file.write(f"{pid}\n")
        time.sleep(3600)
    return [1.0] * len(completions)


def comes_back_twice(completions, **columns):
    if "bad" in completions:
        os.fork()
    return [1.0] * len(completions)


def fills_memory(completions, **columns):
    if "bad" in completions:
        kept = []
        while True:
            kept.append(bytearray(2**26))
    return [1.0] * len(completions)


def leaves(completions, **columns):
    if "bad" in completions:
        os._exit(3)
    return [1.0] * len(completions)


def calls_exit(completions, **columns):
    if "bad" in completions:
        sys.exit(4)
    return [1.0] * len(completions)


def segfaults(completions, **columns):
    if "bad" in completions:
        os.kill(os.getpid(), signal.SIGSEGV)
    return [1.0] * len(completions)


def closes_everything(completions, **columns):
    if "bad" in completions:
        os.closerange(3, 256)
        time.sleep(3600)
    return [1.0] * len(completions)


def raises(completions, **columns):
    raise KeyError("no such answer")


def wrong_length(completions, **columns):
    return [1.0]


def deep(completions, **columns):
    value: list = []
    for _ in range(100_000):
        value = [value]
    return [value] * len(completions)
