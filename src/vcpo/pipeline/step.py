"""One step of the learner's side, the same in every mode: update, publish, count, write a row."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vcpo.buffer import BufferCounts, RolloutBuffer, TakenBatch
from vcpo.pipeline.parts import Parts
from vcpo.pipeline.rows import batch_columns, lag_columns
from vcpo.types import TrajectoryGroup

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run came to."""

    steps: int
    """Updates made and rows written, skipped ones included."""
    counts: BufferCounts
    wall_s: float
    """From the start to the end of the last step, seconds."""
    dispatched_prompt_histogram: Mapping[str, int]
    """prompt_id -> groups dispatched."""
    trained_prompt_histogram: Mapping[str, int]
    """prompt_id -> groups trained."""
    ended_early: str | None = None
    """Why fewer steps were made than asked for, in one line; None when all were."""


@dataclass
class RolloutTimes:
    """Running totals of the rollout side; the rollout side writes, the learner's side reads."""

    rollout_s: float = 0.0
    """Seconds in which samplers had work in flight."""
    score_s: float = 0.0
    """Seconds spent in the scorer."""
    sampler_restarts: int = 0


class LearnerSide:
    """Trains batch after batch and writes one row for each."""

    def __init__(self, parts: Parts, buffer: RolloutBuffer, times: RolloutTimes, clock: Clock = time.monotonic) -> None:
        self.steps = 0
        self.trained_prompts: Counter[str] = Counter()
        self._parts, self._buffer, self._times, self._clock = parts, buffer, times, clock
        self._tokens = 0
        self._began = self._last_row = clock()
        self._last_times = (times.rollout_s, times.score_s)

    def publish_first(self) -> None:
        """Publish the weights that the run starts from: nothing is sampled before."""
        version = self._parts.learner.policy_version
        self._parts.publisher.publish(self._parts.learner.named_weights(), version)
        self._buffer.published(version)

    def train(self, batch: TakenBatch, extra: Mapping[str, Any] | None = None) -> None:
        """One update on the batch; its weights are published before the next group can be dispatched."""
        learner, clock = self._parts.learner, self._clock
        before = learner.policy_version
        t0 = clock()
        report = learner.update(self._parts.make_batch(batch.groups, before))
        t1 = clock()
        if learner.policy_version != before:  # a skipped step changed nothing
            self._parts.publisher.publish(learner.named_weights(), learner.policy_version)
        t2 = clock()
        self._buffer.mark_trained(learner.policy_version)
        self.steps += 1
        self.trained_prompts.update(g.prompt.prompt_id for g in batch.groups)
        row = {
            "step": self.steps,
            **report.to_dict(),
            **batch_columns(batch.groups),
            **lag_columns(batch.groups, before),
            **self._running_columns(batch.groups),
            "batch_wait_s": batch.batch_wait_s,
            "bound_wait_s": batch.bound_wait_s,
            "learner_s": t1 - t0,
            "publish_s": t2 - t1,
            **(extra or {}),
        }
        if self._parts.after_step is not None:
            row.update(self._parts.after_step(row["step"]))
        for sink in self._parts.sinks:
            sink.write(row)
        self._last_row = clock()  # what the next row's rates are counted from: evaluation is not the samplers' time

    def result(self, dispatched: Mapping[str, int], steps_wanted: int) -> RunResult:
        """What the run came to."""
        early = None
        if self.steps < steps_wanted:
            early = f"the prompts ran out after {self.steps} of {steps_wanted} steps: give more prompts or fewer steps"
        return RunResult(
            steps=self.steps,
            counts=self._buffer.counts(),
            wall_s=self._last_row - self._began,
            dispatched_prompt_histogram=dict(dispatched),
            trained_prompt_histogram=dict(self.trained_prompts),
            ended_early=early,
        )

    def _running_columns(self, groups: Sequence[TrajectoryGroup]) -> dict[str, Any]:
        """Columns that compare with the row before, or count since the run began."""
        now, counts, times = self._clock(), self._buffer.counts(), self._times
        since, rolled = now - self._last_row, (times.rollout_s, times.score_s)
        tokens = sum(sum(t.actions) for g in groups for t in g.trajectories)
        self._tokens += tokens
        columns = {
            "wall_s": now - self._began,
            "rollout_s": rolled[0] - self._last_times[0],
            "score_s": rolled[1] - self._last_times[1],
            "tokens": self._tokens,
            "tokens_per_s": tokens / since if since > 0 else None,
            "groups_dispatched": counts.dispatched,
            "groups_trained": counts.trained,
            "groups_dropped": counts.dropped_total,
            "groups_dropped_by_reason": dict(counts.dropped),
            "groups_queued": counts.queued,
            "groups_in_flight": counts.in_flight,
            "sampler_restarts": times.sampler_restarts,
        }
        self._last_times = rolled
        return columns
