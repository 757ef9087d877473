"""Parts for pipeline tests: a policy that is one number, samplers and a learner around it. No torch, no processes.

The policy's "weights" are a string; what it samples is a hash of them, so a stale or torn policy shows in every token.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vcpo.metrics.report import UpdateReport
from vcpo.pipeline import Parts, RolloutParts, run_async, run_replay, run_sync
from vcpo.rollout.pool import GroupAborted, GroupCompleted, GroupStarted, SamplerEvent, SamplerRestarted
from vcpo.rollout.requests import GroupRequest, GroupResult
from vcpo.types import Prompt, Trajectory, TrajectoryGroup

LENGTH = 4
"""Tokens of a trajectory, unless a pool is told otherwise."""


def number(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "big")


def prompts(count: int | None = None) -> Iterator[Prompt]:
    numbers = itertools.count() if count is None else range(count)
    return (Prompt(f"p/{i}", f"text {i}") for i in numbers)


def sample_token(weights: str, seed: int, group_id: int, member: int, t: int) -> int:
    return number(weights, seed, group_id, member, t) % 1000


class Publisher:
    """What was published last, and everything before."""

    def __init__(self) -> None:
        self.weights, self.version = "", -1
        self.versions: list[int] = []

    def publish(self, named: Mapping[str, Any], policy_version: int) -> None:
        self.weights, self.version = named["weights"], policy_version
        self.versions.append(policy_version)


@dataclass
class Learner:
    """Its weights become a hash of themselves and everything in the batch; steps in `skip` change nothing."""

    skip: frozenset[int] = frozenset()
    raise_at: int | None = None
    update_s: float = 0.0
    weights: str = "warm start"
    policy_version: int = 0
    batches: list[list[TrajectoryGroup]] = field(default_factory=list)

    def update(self, batch: tuple[list[TrajectoryGroup], int]) -> UpdateReport:
        groups, version = batch
        assert version == self.policy_version
        self.batches.append(groups)
        step = len(self.batches)
        if step == self.raise_at:
            raise FloatingPointError("the learner's own error")
        time.sleep(self.update_s)
        skipped = step in self.skip
        if not skipped:
            self.weights = str(number(self.weights, [g.to_json() for g in groups]))
            self.policy_version += 1
        n = sum(len(g.trajectories) for g in groups)
        return UpdateReport(
            policy_version=self.policy_version, step=step, skipped="asked for" if skipped else None, n_trajectories=n,
            n_groups=len(groups), n_tokens=LENGTH * n, ess=1.0, ess_ratio=1.0, lr_scale=1.0, lr=1.0, lr_effective=1.0,
        )  # fmt: skip

    def named_weights(self) -> Mapping[str, Any]:
        return {"weights": self.weights}


class Scorer:
    """Reward 0 or 1 by the tokens; raises at group `raise_at`, sleeps `score_s` first."""

    def __init__(self, raise_at: int | None = None, score_s: float = 0.0) -> None:
        self.raise_at, self.score_s = raise_at, score_s

    def score_group(self, group: TrajectoryGroup) -> TrajectoryGroup:
        time.sleep(self.score_s)
        if group.group_id == self.raise_at:
            raise ZeroDivisionError("the reward function's own error")
        return group.with_rewards([float(sum(t.token_ids) % 2) for t in group.trajectories])


class Sink:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def write(self, row: Mapping[str, Any]) -> None:
        self.rows.append(dict(row))

    def close(self) -> None: ...


@dataclass
class _InFlight:
    request: GroupRequest
    length: int
    versions: list[int] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)


class Pool:
    """Samplers that write one token of every group at each poll, with the weights published then.

    `length(group_id)` is how many tokens a group takes. `on_poll(pool, n)` runs first at the n-th poll (from 1) and may
    raise. `fate(group_id, member, attempt)` is "stop" or "failed". `slots`: groups at work at once; others wait.
    """

    def __init__(
        self,
        publisher: Publisher,
        *,
        length: Callable[[int], int] = lambda group_id: LENGTH,
        on_poll: Callable[[Pool, int], None] = lambda pool, n: None,
        fate: Callable[[int, int, int], str] = lambda group_id, member, attempt: "stop",
        slots: int = 10**9,
        logprobs: Callable[[int], float] = lambda group_id: -0.5,
    ) -> None:
        self._publisher, self._length, self._on_poll, self._fate = publisher, length, on_poll, fate
        self._slots, self._logprobs = slots, logprobs
        self._waiting: list[GroupRequest] = []
        self._running: dict[int, _InFlight] = {}
        self._attempts: dict[int, int] = {}
        self.events: list[SamplerEvent] = []
        self.submits: list[list[int]] = []
        self.aborted: list[int] = []
        self.polls, self.closed = 0, 0

    @property
    def num_outstanding(self) -> int:
        return len(self._waiting) + len(self._running)

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        assert self._publisher.versions, "nothing may be dispatched before the first weights are published"
        self.submits.append([r.group_id for r in requests])
        self._waiting += requests
        for r in requests:
            self._attempts[r.group_id] = self._attempts.get(r.group_id, -1) + 1

    def poll(self, timeout_s: float) -> list[SamplerEvent]:
        self.polls += 1
        self._on_poll(self, self.polls)
        while self._waiting and len(self._running) < self._slots:
            request = self._waiting.pop(0)
            self._running[request.group_id] = _InFlight(request, self._length(request.group_id))
            self.events.append(GroupStarted(request.group_id, self._publisher.version, 0))
        for work in list(self._running.values()):
            self._write_token(work)
        events, self.events = self.events, []
        if not events:
            time.sleep(min(timeout_s, 0.0002))
        return events

    def lose_everything(self) -> None:
        """The sampler died: its groups start again from the prompt."""
        lost = list(self._running.values())
        self._running = {}
        self._waiting = [w.request for w in lost] + self._waiting
        self.events.append(SamplerRestarted(0, "killed", tuple(w.request.group_id for w in lost)))

    def abort(self, group_ids: Iterable[int]) -> list[int]:
        stopped = [i for i in group_ids if i in self._running]
        for group_id in stopped:
            self.events.append(GroupAborted(self._running.pop(group_id).request, 0))
        self.aborted += stopped
        return stopped

    def close(self) -> None:
        self.closed += 1

    def _write_token(self, work: _InFlight) -> None:
        r, t = work.request, len(work.versions)
        work.versions.append(self._publisher.version)
        work.tokens.append(
            [sample_token(self._publisher.weights, r.seed, r.group_id, m, t) for m in range(r.num_generations)]
        )
        if len(work.versions) == work.length:
            del self._running[r.group_id]
            self.events.append(GroupCompleted(self._result(work), 0))

    def _result(self, work: _InFlight) -> GroupResult:
        r = work.request
        kept = {t.member: t for t in r.partial}
        written = {
            m: Trajectory(
                member=m,
                token_ids=tuple(row[m] for row in work.tokens),
                sampler_logprobs=(self._logprobs(r.group_id),) * work.length,
                policy_versions=tuple(work.versions),
                finish_reason=self._fate(r.group_id, m, self._attempts[r.group_id]),  # type: ignore[arg-type]
            )
            for m in range(r.num_generations)
        }
        members = tuple((written | kept)[m] for m in range(r.num_generations))
        return GroupResult(r.group_id, r.prompt_token_ids, members, work.versions[-1], min(work.versions))


def collect_with(publisher: Publisher, *, num_generations: int, seed: int = 0, **pool_options: Any):
    """What the pool would write, in this process."""

    def collect(batch: Sequence[Prompt], *, first_group_id: int) -> list[TrajectoryGroup]:
        pool = Pool(publisher, **pool_options)
        pool.submit([
            GroupRequest(group_id=first_group_id + i, prompt_token_ids=(1,), num_generations=num_generations, seed=seed)
            for i in range(len(batch))
        ])  # fmt: skip
        results: list[GroupResult] = []
        while pool.num_outstanding:
            results += [e.result for e in pool.poll(0.0) if isinstance(e, GroupCompleted)]
        return [decode(p, r) for p, r in zip(batch, sorted(results, key=lambda r: r.group_id), strict=True)]

    return collect


def decode(prompt: Prompt, result: GroupResult) -> TrajectoryGroup:
    return TrajectoryGroup(
        result.group_id, prompt, result.prompt_token_ids, result.trajectories, result.completed_version
    )


@dataclass
class World:
    """All parts of one run, wired together; change one before `run_*`."""

    learner: Learner = field(default_factory=Learner)
    scorer: Scorer = field(default_factory=Scorer)
    prompts: Iterator[Prompt] = field(default_factory=prompts)
    num_generations: int = 2
    pool_options: dict[str, Any] = field(default_factory=dict)
    rollout_options: dict[str, Any] = field(default_factory=dict)
    after_step: Callable[[int], Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        self.publisher, self.sink = Publisher(), Sink()
        self.pool = Pool(self.publisher, **self.pool_options)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.sink.rows

    @property
    def trained_ids(self) -> list[list[int]]:
        return [[g.group_id for g in batch] for batch in self.learner.batches]

    def parts(self) -> Parts:
        return Parts(
            prompts=self.prompts, scorer=self.scorer, learner=self.learner, publisher=self.publisher,
            make_batch=lambda groups, version: (list(groups), version), sinks=[self.sink], after_step=self.after_step,
        )  # fmt: skip

    def run_async(self, *, steps: int = 5, groups_per_batch: int = 4, max_policy_lag: int = 2, **options):
        rollout = RolloutParts(
            pool=self.pool, encode=lambda prompt: (1,), decode=decode, num_generations=self.num_generations, seed=0,
            **self.rollout_options,
        )  # fmt: skip
        options = {"stall_timeout_s": 20.0, "join_timeout_s": 10.0} | options
        return run_async(
            self.parts(),
            rollout,
            steps=steps,
            groups_per_batch=groups_per_batch,
            max_policy_lag=max_policy_lag,
            **options,
        )

    def run_sync(self, *, steps: int = 5, groups_per_batch: int = 4):
        collect = collect_with(self.publisher, num_generations=self.num_generations)
        return run_sync(self.parts(), collect, steps=steps, groups_per_batch=groups_per_batch)

    def run_replay(self, *, steps: int = 5, groups_per_batch: int = 4, policy_lag: int = 2, collect=None):
        collect = collect or collect_with(self.publisher, num_generations=self.num_generations)
        return run_replay(self.parts(), collect, steps=steps, groups_per_batch=groups_per_batch, policy_lag=policy_lag)
