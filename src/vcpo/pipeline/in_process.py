"""The modes without samplers of their own: rollout and update take turns in one process.

    rollout (fill the buffer to k + 1 batches) -> score -> update on the oldest batch -> publish -> rollout ...

sync is lag 0: the buffer holds one batch. replay is lag k: before the first update k + 1 batches come from the first
weights; after that each update frees room for one batch, so the batch sampled with version v is trained at update v + k.
Both go through the RolloutBuffer, whose admission and order give exactly this, and whose guard watches the lag.
"""

from __future__ import annotations

import time

from vcpo.buffer import RolloutBuffer
from vcpo.errors import RolloutError
from vcpo.pipeline.parts import Collect, Parts, PromptSource, require_sampler_logprobs
from vcpo.pipeline.rows import mean_reward
from vcpo.pipeline.step import Clock, LearnerSide, RolloutTimes, RunResult
from vcpo.types import TrajectoryGroup


def run_sync(
    parts: Parts, collect: Collect, *, steps: int, groups_per_batch: int, clock: Clock = time.monotonic
) -> RunResult:
    """Rollout, score, update, in turns: every token is of the learner's own version."""
    return run_replay(parts, collect, steps=steps, groups_per_batch=groups_per_batch, policy_lag=0, clock=clock)


def run_replay(
    parts: Parts,
    collect: Collect,
    *,
    steps: int,
    groups_per_batch: int,
    policy_lag: int,
    clock: Clock = time.monotonic,
) -> RunResult:
    """Exactly lag k, deterministic: the batch sampled with version v is trained at update v + k.

    The first k + 1 batches come from the first weights. Each row also has `reward_current`, the mean reward of the batch
    sampled just before its update: that of the current policy, while `reward_mean` is that of the batch trained. For its
    sake sampling goes on to the last step, and k batches stay queued at the end.
    """
    buffer = RolloutBuffer(groups_per_batch, policy_lag, clock=clock)
    times, source = RolloutTimes(), PromptSource(parts.prompts)
    learner_side = LearnerSide(parts, buffer, times, clock)
    learner_side.publish_first()
    while learner_side.steps < steps:
        newest: list[TrajectoryGroup] = []
        while (room := buffer.admissible()) > 0:  # in generation batches of one optimizer batch
            newest = _roll_out(parts, collect, source, buffer, min(room, groups_per_batch), times, clock)
        batch = buffer.try_take(parts.learner.policy_version)
        if batch is None:
            break
        learner_side.train(batch, {"reward_current": mean_reward(newest)})
    return learner_side.result(source.histogram, steps)


def _roll_out(
    parts: Parts,
    collect: Collect,
    source: PromptSource,
    buffer: RolloutBuffer,
    count: int,
    times: RolloutTimes,
    clock: Clock,
) -> list[TrajectoryGroup]:
    """Sample, score and queue up to `count` groups; returns them."""
    numbered = source.take(count)
    buffer.dispatched([group_id for group_id, _ in numbered])
    if source.ended:
        buffer.end_of_prompts()
    if not numbered:
        return []
    t0 = clock()
    groups = collect([prompt for _, prompt in numbered], first_group_id=numbered[0][0])
    t1 = clock()
    if [g.group_id for g in groups] != [group_id for group_id, _ in numbered]:
        raise RolloutError(
            f"collect returned groups {[g.group_id for g in groups]} for {len(numbered)} prompts numbered from "
            f"{numbered[0][0]}: one group per prompt is needed, in order"
        )
    scored = [parts.scorer.score_group(group) for group in groups]
    times.rollout_s += t1 - t0
    times.score_s += clock() - t1
    for group in scored:
        require_sampler_logprobs(group, buffer.rule.max_policy_lag)
        buffer.completed(group)
    return scored
