"""Law 2: no token older than max_policy_lag versions is ever trained, and holding that bound never gets a run stuck.

Simulated on a fake clock: several samplers with a few slots each, one learner, and a heavy tail of slow groups.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vcpo.buffer import OnBound, RolloutBuffer
from vcpo.buffer.lag_rule import LagRule
from vcpo.errors import RolloutError
from vcpo.types import Prompt, Trajectory, TrajectoryGroup

G = 16


def group(group_id: int, versions: tuple[int, ...]) -> TrajectoryGroup:
    token = Trajectory(0, (7,) * len(versions), (-0.5,) * len(versions), versions, "stop", reward=1.0)
    return TrajectoryGroup(group_id, Prompt(f"p/{group_id}", "x"), (1,), (token,), completed_version=versions[-1])


@dataclass
class Simulation:
    """Discrete events: groups end, updates end; time is a number, so a thousand updates take no time."""

    k: int
    on_bound: OnBound
    rule: type[LagRule]
    seed: int
    slots: int = 24
    slow_share: float = 0.01
    slow_factor: float = 50.0
    update_s: float = 1.0
    skip_share: float = 0.0
    now: float = 0.0
    version: int = 0
    updates: int = 0
    lags: list[int] = field(default_factory=list)
    bound_wait_s: float = 0.0
    batch_wait_s: float = 0.0
    busy: bool = False

    def __post_init__(self) -> None:
        self.buffer = RolloutBuffer(G, self.k, self.on_bound, lambda: self.now)
        self.buffer.rule = self.rule(G, self.k)

    def run(self, updates: int) -> None:
        rng = random.Random(self.seed)
        events: list[tuple[float, int, str, int]] = []
        waiting: list[int] = []
        running: dict[int, int] = {}
        next_id = 0
        self.buffer.published(0)
        while self.updates < updates:
            ids = list(range(next_id, next_id + self.buffer.admissible()))
            if ids:
                self.buffer.dispatched(ids)
                waiting += ids
                next_id += len(ids)
            for aborted in self.buffer.pop_aborts():
                running.pop(aborted, None)
                waiting = [w for w in waiting if w != aborted]
            while waiting and len(running) < self.slots:
                started = waiting.pop(0)
                running[started] = self.version
                self.buffer.started(started, self.version)
                slow = rng.random() < self.slow_share
                heapq.heappush(events, (self.now + rng.uniform(0.5, 1.5) * (self.slow_factor if slow else 1), started, "end", started))
            self.buffer.check()
            if not self.busy and (batch := self.buffer.try_take(self.version)):
                self.buffer.check()
                self.busy = True
                self.lags += [self.version - g.oldest_version for g in batch.groups]
                self.bound_wait_s += batch.bound_wait_s
                self.batch_wait_s += batch.batch_wait_s
                heapq.heappush(events, (self.now + self.update_s, -1, "updated", -1))
                continue
            assert events, f"stuck after {self.updates} updates: {self.buffer.counts()}"
            self.now, _, kind, which = heapq.heappop(events)
            if kind == "updated":
                self.busy = False
                self.updates += 1
                self.version += rng.random() >= self.skip_share
                self.buffer.mark_trained(self.version)
            elif which in running:
                self.buffer.completed(group(which, (running.pop(which), self.version)))


def simulate(k: int, *, updates=400, on_bound: OnBound = "wait", rule=LagRule, **options) -> Simulation:
    simulation = Simulation(k, on_bound, rule, **options)
    simulation.run(updates)
    return simulation
