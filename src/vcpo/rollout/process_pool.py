"""ProcessSamplerPool: samplers in processes of their own on this machine, watched, replaced a bounded number of times."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vcpo.errors import ConfigError, RolloutError
from vcpo.rollout.channel import wait_for
from vcpo.rollout.pool import GroupAborted, GroupCompleted, GroupStarted, SamplerEvent, SamplerRestarted
from vcpo.rollout.requests import GroupRequest, GroupResult, SamplingParams
from vcpo.rollout.sampler_child import SamplerChild

_SLICE_S = 0.1  # longest wait in one go: what another thread submits meanwhile is passed on after it


class ProcessSamplerPool:
    """`num_samplers` processes, each with the model of `model_dir` and the weights published at `weight_address`.

    `policy_version` is the version of the weights in `model_dir`, used until newer ones are published. A process that
    dies, or that has work and says nothing for `silence_timeout_s` seconds (longer than its slowest decode step), is
    killed and started again, at most `max_restarts` times each; its groups are dispatched again from the prompt. One
    that cannot even load its model is not tried again. Times in seconds. The processes are started here, in parallel;
    `wait_ready` waits for them. Methods may be called from several threads. Raises ConfigError for a bad argument.
    """

    def __init__(
        self,
        model_dir: str | Path,
        weight_address: Mapping[str, Any],
        params: SamplingParams,
        *,
        log_dir: str | Path,
        num_samplers: int = 1,
        threads_per_sampler: int = 1,
        max_restarts: int = 2,
        silence_timeout_s: float = 60.0,
        startup_timeout_s: float = 300.0,
        seed: int = 0,
        policy_version: int = 0,
        child_module: str = "vcpo.rollout.sampler_process",
    ) -> None:
        _require_at_least(1, num_samplers=num_samplers, threads_per_sampler=threads_per_sampler)
        _require_at_least(0, max_restarts=max_restarts)
        if not silence_timeout_s > 0:
            raise ConfigError(f"silence_timeout_s must be a positive number of seconds, got {silence_timeout_s}")
        self._max_restarts = max_restarts
        self._silence_timeout_s, self._startup_timeout_s = silence_timeout_s, startup_timeout_s
        self._lock = threading.RLock()
        self._events: list[SamplerEvent] = []
        self._failure: str | None = None
        self._closed = False
        init = {
            "model_dir": str(model_dir),
            "weight_address": dict(weight_address),
            "params": params.to_json(),
            "threads": threads_per_sampler,
            "seed": seed,
            "policy_version": policy_version,
            "heartbeat_s": min(1.0, silence_timeout_s / 5),
        }
        environment = _environment(threads_per_sampler)
        self._children: list[SamplerChild] = []
        try:
            for index in range(num_samplers):
                self._children.append(
                    SamplerChild(index, init, module=child_module, environment=environment, log_dir=Path(log_dir))
                )
        except BaseException:
            self.close(timeout_s=0.0)
            raise

    @property
    def num_outstanding(self) -> int:
        """Groups that were submitted and neither completed nor aborted, as far as `poll` has told."""
        with self._lock:
            told_later = sum(isinstance(e, GroupCompleted | GroupAborted) for e in self._events)
            return told_later + sum(len(c.outstanding) + len(c.aborting) for c in self._children)

    @property
    def pids(self) -> list[int]:
        """Process ids of the samplers, by number."""
        with self._lock:
            return [c.process.pid for c in self._children]

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Return when all samplers have loaded their model. Raises RolloutError after `timeout_s`, or when one cannot."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._require_open()
                self._pump()
                self._raise_failure()
                slow = [c for c in self._children if not c.ready]
                if not slow:
                    return
            if time.monotonic() >= deadline:
                raise RolloutError(
                    f"sampler {slow[0].index} is not ready after {timeout_s:g} s; its log is {slow[0].log_path}"
                )
            self._wait(deadline - time.monotonic())

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Dispatch groups, each to the sampler with the fewest trajectories. Raises RolloutError for an id that is out already."""
        with self._lock:
            self._require_open()
            self._raise_failure()
            known = {gid for c in self._children for gid in [*c.outstanding, *c.aborting]}
            for r in requests:
                if r.group_id in known:
                    raise RolloutError(f"group {r.group_id} is with a sampler already: group ids must be unique")
                known.add(r.group_id)
            shares: dict[int, list[GroupRequest]] = {}
            loads = [c.load for c in self._children]
            for r in requests:
                least = loads.index(min(loads))
                loads[least] += r.num_generations
                shares.setdefault(least, []).append(r)
            for index, share in shares.items():
                self._children[index].submit(share)

    def poll(self, timeout_s: float) -> list[SamplerEvent]:
        """What happened, at once if something has, else after waiting at most `timeout_s` seconds (then perhaps nothing).

        Raises RolloutError, with the sampler's own traceback, when one died more often than it may be restarted.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._require_open()
                self._pump()
                if self._events:
                    events, self._events = self._events, []
                    return events
                self._raise_failure()
            if time.monotonic() >= deadline:
                return []
            self._wait(deadline - time.monotonic())

    def abort(self, group_ids: Iterable[int]) -> list[int]:
        """Stop these groups; returns the ones that were outstanding. A GroupAborted follows for each of them."""
        wanted = set(group_ids)
        stopped: list[int] = []
        with self._lock:
            self._require_open()
            self._raise_failure()
            for child in self._children:
                ids = [gid for gid in child.outstanding if gid in wanted]
                child.aborting.update((gid, child.outstanding.pop(gid)) for gid in ids)
                if ids:
                    child.send({"type": "abort", "group_ids": ids})
                stopped.extend(ids)
        return stopped

    def close(self, timeout_s: float = 5.0) -> None:
        """End all samplers: they see their connection close; whoever is not gone after `timeout_s` seconds is killed."""
        with self._lock:
            self._closed = True
            for child in self._children:
                child.channel.close()
            deadline = time.monotonic() + timeout_s
            for child in self._children:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(timeout=max(0.0, deadline - time.monotonic()))
                child.end()

    def __enter__(self) -> ProcessSamplerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, timeout_s: float) -> None:
        with self._lock:
            channels = [c.channel for c in self._children if not c.channel.closed]
        wait_for(channels, min(timeout_s, _SLICE_S))

    def _pump(self) -> None:
        """Read what the samplers said, replace those that are gone."""
        for child in self._children:
            if self._failure is not None:
                return
            for message in child.receive():
                self._take(child, message)
            cause = child.cause_of_death(
                silence_timeout_s=self._silence_timeout_s, startup_timeout_s=self._startup_timeout_s
            )
            if cause is not None:
                self._replace(child, cause)

    def _take(self, child: SamplerChild, message: Mapping[str, Any]) -> None:
        kind = message["type"]
        if kind == "ready":
            child.ready = True
        elif kind == "started":
            for group_id, version in message["groups"]:
                if group_id in child.outstanding:
                    self._events.append(GroupStarted(group_id, version, child.index))
        elif kind == "completed":
            result = GroupResult.from_json(message["result"])
            if child.outstanding.pop(result.group_id, None) is not None:
                self._events.append(GroupCompleted(result, child.index))
            elif (request := child.aborting.pop(result.group_id, None)) is not None:
                # It was done before it heard of the abort: all its members are there, should they be wanted.
                self._events.append(GroupAborted(replace(request, partial=result.trajectories), child.index))
        elif kind == "aborted":
            request = GroupRequest.from_json(message["request"])
            if child.aborting.pop(request.group_id, None) is not None:
                self._events.append(GroupAborted(request, child.index))
        elif kind == "error":
            child.traceback = message["traceback"]

    def _replace(self, child: SamplerChild, cause: str) -> None:
        child.end()
        child.num_deaths += 1
        could_not_start = child.traceback is not None and not child.ready
        if could_not_start or child.num_deaths > self._max_restarts:
            times = f"{child.num_deaths} time" + ("s" if child.num_deaths > 1 else "")
            how = "while starting" if could_not_start else f"{times} (max_restarts={self._max_restarts})"
            self._failure = (
                f"sampler {child.index} died {how}, last: {cause}; its log is {child.log_path}\n{child.last_words()}"
            )
            return
        for request in child.aborting.values():  # nobody wants these back; their tokens are lost
            self._events.append(GroupAborted(request, child.index))
        child.aborting.clear()
        lost = list(child.outstanding.values())
        child.start()
        if lost:
            child.submit(lost)
        self._events.append(SamplerRestarted(child.index, cause, tuple(r.group_id for r in lost)))

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RolloutError(self._failure)

    def _require_open(self) -> None:
        if self._closed:
            raise RolloutError("the sampler pool is closed")


def _environment(threads: int) -> dict[str, str]:
    """What the children's libraries read when they are imported: thread counts, and that no hub is ever asked."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def _require_at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
