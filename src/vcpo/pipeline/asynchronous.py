"""Samplers and learner side by side. Who waits for whom:

prompts ──> ROLLOUT THREAD ── submit ──> sampler pool (other processes)
              ^    |   ^                      |        ^
              |    |   +──── poll: events ────+        | newest weights, between decode steps
  admissible? |    | completed(group)                  |
              |    v                                   |
           RolloutBuffer ── take_batch ──> LEARNER (main thread): update, publish, mark_trained, row

rollout thread    waits for    admission (the buffer is full until the learner has published), news from the pool
                  unblocked by mark_trained, a dropped group; poll's own timeout
learner           waits for    a batch of groups (batch_wait), slow old groups at the lag bound (bound_wait)
                  unblocked by completed, drop, end_of_prompts, fail
samplers          wait for     the first published weights, then for groups; never for the learner
publisher, sinks  run inside the learner's turn, the scorer (which bounds its own time) inside the rollout thread's

A part dies       rollout thread -> buffer.fail -> raised at the learner's next wait, with its own traceback
                  sampler -> restarted by the pool a bounded number of times, then poll raises -> as above
                  silence of everybody -> take_batch gives up after stall_timeout_s
                  learner -> the thread is told to stop and joined, in bounded time
In every case the pool is closed.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter
from dataclasses import replace

from vcpo.buffer import OnBound, RolloutBuffer
from vcpo.pipeline.parts import Parts, PromptSource, RolloutParts, require_sampler_logprobs
from vcpo.pipeline.step import Clock, LearnerSide, RolloutTimes, RunResult
from vcpo.rollout.pool import GroupCompleted, GroupStarted, SamplerEvent, SamplerPool, SamplerRestarted
from vcpo.rollout.requests import GroupRequest, GroupResult
from vcpo.rollout.settle import settle_group
from vcpo.types import Prompt

POLL_S = 0.01
"""Longest wait for the pool while groups are in flight; admission is looked at in between."""
IDLE_S = 0.2
"""Longest wait for admission while nothing is in flight; a death in the pool is noticed in between."""


def run_async(
    parts: Parts,
    rollout: RolloutParts,
    *,
    steps: int,
    groups_per_batch: int,
    max_policy_lag: int,
    on_bound: OnBound = "wait",
    stall_timeout_s: float = 1800.0,
    join_timeout_s: float = 30.0,
    clock: Clock = time.monotonic,
) -> RunResult:
    """Train `steps` batches while samplers work ahead, no token older than `max_policy_lag` versions.

    `max_policy_lag` = 0 equals `run_sync`: a batch is dispatched in one submit, nothing is in flight during an update.
    No more groups are dispatched than the steps can train. Raises what killed the rollout thread (a sampler's or reward
    function's error), or RolloutError after `stall_timeout_s` seconds in which no group moved while the learner waited.
    """
    total = steps * groups_per_batch
    buffer = RolloutBuffer(groups_per_batch, max_policy_lag, on_bound, clock, total_groups=total)
    times, source = RolloutTimes(), PromptSource(parts.prompts)
    worker = _RolloutWorker(parts, rollout, buffer, source, times, clock)
    thread = threading.Thread(target=worker.run, name="vcpo rollout", daemon=True)
    learner_side = LearnerSide(parts, buffer, times, clock)
    finished = False
    try:
        learner_side.publish_first()
        thread.start()
        while learner_side.steps < steps:
            batch = buffer.take_batch(parts.learner.policy_version, stall_timeout_s)
            if batch is None:
                break
            learner_side.train(batch)
        finished = True
    finally:
        worker.stop()
        if thread.ident is not None:
            thread.join(join_timeout_s)
        if thread.is_alive():
            warnings.warn(f"the rollout thread did not end within {join_timeout_s:g} s: left behind", stacklevel=2)
        _close(rollout.pool)
    if finished and worker.error is not None:  # every batch was trained: the result stands
        warnings.warn(f"the samplers failed after the last batch: {worker.error}", stacklevel=2)
    return learner_side.result(source.histogram, steps)


def _close(pool: SamplerPool) -> None:
    """Close the pool (again, if the thread did); an error here must not hide the one that ended the run."""
    try:
        pool.close()
    except Exception as error:
        warnings.warn(f"closing the sampler pool failed: {error}", stacklevel=3)


class _RolloutWorker:
    """The rollout thread: dispatches what the buffer admits, turns the pool's events into scored groups."""

    def __init__(
        self,
        parts: Parts,
        rollout: RolloutParts,
        buffer: RolloutBuffer,
        source: PromptSource,
        times: RolloutTimes,
        clock: Clock,
    ) -> None:
        self.error: BaseException | None = None
        self._scorer, self._rollout, self._pool = parts.scorer, rollout, rollout.pool
        self._buffer, self._source, self._times, self._clock = buffer, source, times, clock
        self._stopping = threading.Event()
        self._prompts: dict[int, Prompt] = {}
        """Prompts of the groups in flight."""
        self._refills: Counter[int] = Counter()

    def stop(self) -> None:
        """Ask the thread to end; it does so within one turn."""
        self._stopping.set()
        self._buffer.close()

    def run(self) -> None:
        """The thread's life. Whatever ends it reaches the learner, and the pool is closed."""
        try:
            while not self._stopping.is_set():
                self._turn()
        except BaseException as error:
            self._fail(error)
        finally:
            try:
                self._pool.close()
            except BaseException as error:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
        self._buffer.fail(error)

    def _turn(self) -> None:
        self._dispatch()
        aborts = self._buffer.pop_aborts()
        if aborts:
            self._pool.abort(aborts)
            for group_id in aborts:
                self._prompts.pop(group_id, None)
        began, busy = self._clock(), bool(self._prompts)
        if busy:
            events = self._pool.poll(POLL_S)
        else:
            self._buffer.wait_admissible(IDLE_S)
            events = self._pool.poll(0.0)
        for event in events:
            if self._stopping.is_set():
                return
            self._handle(event)
            self._dispatch()  # scoring may take long: do not let samplers run dry meanwhile
        if busy:
            self._times.rollout_s += self._clock() - began

    def _dispatch(self) -> None:
        """Everything that is admissible goes out in one submit: at lag 0 that is exactly one optimizer batch."""
        room = self._buffer.admissible()
        if self._rollout.max_in_flight is not None:
            room = min(room, self._rollout.max_in_flight - len(self._prompts))
        if room <= 0:
            return
        numbered = self._source.take(room)
        # Counted before they leave: a sampler can only have this version or a newer one when it starts them.
        self._buffer.dispatched([group_id for group_id, _ in numbered])
        self._prompts.update(numbered)
        if numbered:
            self._pool.submit([self._request(group_id, prompt) for group_id, prompt in numbered])
        if self._source.ended:
            self._buffer.end_of_prompts()

    def _request(self, group_id: int, prompt: Prompt) -> GroupRequest:
        return GroupRequest(
            group_id=group_id,
            prompt_id=prompt.prompt_id,
            prompt_token_ids=self._rollout.encode(prompt),
            num_generations=self._rollout.num_generations,
            seed=self._rollout.seed,
        )

    def _handle(self, event: SamplerEvent) -> None:
        if isinstance(event, GroupStarted):
            self._buffer.started(event.group_id, event.policy_version)
        elif isinstance(event, GroupCompleted):
            self._complete(event.result)
        elif isinstance(event, SamplerRestarted):
            self._times.sampler_restarts += 1
            for group_id in event.lost_group_ids:
                self._buffer.redispatched(group_id)
        # GroupAborted needs nothing: the buffer counted the group when it gave it up.

    def _complete(self, result: GroupResult) -> None:
        group_id = result.group_id
        prompt = self._prompts.get(group_id)
        if prompt is None:  # given up meanwhile
            return
        left = 1 - self._refills[group_id]
        settled = settle_group(result, self._rollout.num_generations, self._rollout.short_groups, refills_left=left)
        if settled.kind == "refill":
            self._refills[group_id] += 1
            self._buffer.redispatched(group_id)
            self._pool.submit([_refill(self._request(group_id, prompt), settled.result)])
            return
        del self._prompts[group_id]
        self._refills.pop(group_id, None)
        if settled.kind == "drop":
            self._buffer.drop(group_id, settled.reason)
            return
        group = self._rollout.decode(prompt, settled.result)
        require_sampler_logprobs(group, self._buffer.rule.max_policy_lag)
        began = self._clock()
        scored = self._scorer.score_group(group)
        self._times.score_s += self._clock() - began
        self._buffer.completed(scored)


def _refill(request: GroupRequest, survivors: GroupResult) -> GroupRequest:
    """Ask for the members that failed; those that survived are kept as they are."""
    return replace(request, partial=survivors.trajectories)
