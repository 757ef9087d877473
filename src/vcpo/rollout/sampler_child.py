"""The coordinator's handle on one sampler process: start it, talk to it, say how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vcpo.rollout.channel import ChannelClosed, JsonChannel
from vcpo.rollout.requests import GroupRequest

_TAIL_BYTES = 4000


class SamplerChild:
    """Sampler number `index`. `init` is its first message; stderr and stdout go to a log file in `log_dir`."""

    def __init__(
        self,
        index: int,
        init: Mapping[str, Any],
        *,
        module: str,
        environment: Mapping[str, str],
        log_dir: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index = index
        self.log_path = log_dir / f"sampler_{index}.log"
        self.outstanding: dict[int, GroupRequest] = {}
        """Groups it is to complete, in the order they were sent."""
        self.aborting: dict[int, GroupRequest] = {}
        """Groups it was told to stop and has not answered about."""
        self.num_deaths = 0
        self.traceback: str | None = None
        """What it said about its own end."""
        self._init, self._module, self._environment, self._clock = dict(init), module, dict(environment), clock
        self.start()

    @property
    def load(self) -> int:
        """Trajectories it is working on."""
        return sum(r.num_generations for r in [*self.outstanding.values(), *self.aborting.values()])

    def start(self) -> None:
        """Start the process (again). Its first message is sent, nothing else."""
        ours, theirs = socket.socketpair()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(self.log_path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        try:
            self._log_start = os.fstat(log).st_size
            self.process = subprocess.Popen(
                # -P: files in the working directory must not be taken for modules.
                [sys.executable, "-P", "-m", self._module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **self._environment},
                start_new_session=True,  # Ctrl-C in a terminal goes to the coordinator alone
            )
        finally:
            os.close(log)
            theirs.close()
        self.channel = JsonChannel(ours)
        self.ready = self._exited = False
        self.traceback = None
        self._quiet_since = self._started_at = self._clock()
        self.send({"type": "init", "parent_pid": os.getpid(), **self._init})

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; a dead process is not noticed here but by `cause_of_death`."""
        try:
            self.channel.send(message)
        except ChannelClosed:
            self.channel.closed = True

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Hand it groups, in one message."""
        if not self.load:
            self._quiet_since = self._clock()  # an idle sampler owes no sign of life
        self.outstanding.update((r.group_id, r) for r in requests)
        self.send({"type": "submit", "requests": [r.to_json() for r in requests]})

    def receive(self) -> list[dict[str, Any]]:
        """The messages that arrived; passes on what is unsent."""
        if self.channel.has_unsent and not self.channel.closed:
            with contextlib.suppress(ChannelClosed):  # what it sent before it died is still to be read
                self.channel.flush()
        self._exited = self.process.poll() is not None  # asked first: then everything it sent is read below
        messages = self.channel.receive()
        if messages:
            self._quiet_since = self._clock()
        return messages

    def cause_of_death(self, *, silence_timeout_s: float, startup_timeout_s: float) -> str | None:
        """Why this process must be replaced, None while it is well. To be asked after `receive`."""
        if self.channel.closed or self._exited:
            try:
                code = self.process.wait(timeout=2.0)
            except subprocess.TimeoutExpired:
                return "closed its connection without ending"
            return _exit_text(code)
        now = self._clock()
        if not self.ready:
            late = now - self._started_at > startup_timeout_s
            return f"not ready after {startup_timeout_s:g} s" if late else None
        if self.load and now - self._quiet_since > silence_timeout_s:
            return f"silent for {silence_timeout_s:g} s with {len(self.outstanding)} groups in flight"
        return None

    def end(self) -> None:
        """Kill the process if it still runs, and reap it."""
        self.channel.close()
        if self.process.poll() is None:
            self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: not ours to wait for
            self.process.wait(timeout=10.0)

    def last_words(self) -> str:
        """Its own traceback, else the end of what it wrote to stderr since its last start."""
        if self.traceback:
            return self.traceback.rstrip()
        with open(self.log_path, "rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - _TAIL_BYTES))
            tail = log.read().decode(errors="replace").strip()
        return tail or "(it wrote nothing to stderr)"


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"killed by signal {-code}"
