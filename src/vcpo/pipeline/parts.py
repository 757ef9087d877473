"""What the loops are put together from: protocols of the parts, and two bundles of them. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from vcpo.errors import ConfigError
from vcpo.metrics.jsonl import MetricSink
from vcpo.metrics.report import UpdateReport
from vcpo.rollout.pool import SamplerPool
from vcpo.rollout.requests import GroupResult
from vcpo.types import Prompt, TrajectoryGroup


class Scorer(Protocol):
    """Puts rewards on trajectories."""

    def score_group(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """The same group with one reward per trajectory, None where it cannot be scored; in bounded time."""
        ...


class LearnerPort(Protocol):
    """The side that updates."""

    @property
    def policy_version(self) -> int:
        """Updates that changed the weights so far; a skipped step does not raise it."""
        ...

    def update(self, batch: Any) -> UpdateReport:
        """One optimizer step on what `make_batch` returned."""
        ...

    def named_weights(self) -> Mapping[str, Any]:
        """The current weights by name, for the publisher."""
        ...


class PublisherPort(Protocol):
    """The part of WeightPublisher that the loops use."""

    def publish(self, named: Mapping[str, Any], policy_version: int) -> None:
        """Make these weights the newest ones; samplers have them when this returns, or take them at their next step."""
        ...


class Collect(Protocol):
    """Rollout in this process."""

    def __call__(self, prompts: Sequence[Prompt], *, first_group_id: int) -> Sequence[TrajectoryGroup]:
        """One finished, unscored group per prompt, in the prompts' order, numbered from `first_group_id`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What every mode needs."""

    prompts: Iterator[Prompt]
    scorer: Scorer
    learner: LearnerPort
    make_batch: Callable[[Sequence[TrajectoryGroup], int], Any]
    """(groups, learner's version) -> batch; `collate` with the policy's padding."""
    publisher: PublisherPort
    sinks: Sequence[MetricSink] = ()
    after_step: Callable[[int], Mapping[str, Any]] | None = None
    """(step, from 1) -> further columns of that step's row, such as a held-out evaluation. Time spent there is not
    booked on any part."""


@dataclass(frozen=True, kw_only=True)
class RolloutParts:
    """What the rollout thread of the async mode needs beside `Parts`."""

    pool: SamplerPool
    encode: Callable[[Prompt], tuple[int, ...]]
    """Prompt -> token ids."""
    decode: Callable[[Prompt, GroupResult], TrajectoryGroup]
    """A sampler's result -> the group with its prompt and its text, unscored."""
    num_generations: int
    seed: int
    """Seed of the run; with the group's number and the member's it fixes the randomness of each trajectory."""
    short_groups: Literal["train", "refill"] = "train"
    max_in_flight: int | None = None
    """Most groups at the samplers at once; None: as many as the lag bound admits."""


class HasVersion(Protocol):
    """An engine whose version can be set from outside."""

    policy_version: int


class VersionStamp:
    """The publisher for an engine that samples from the learner's own model: the weights are there, the number moves."""

    def __init__(self, engine: HasVersion) -> None:
        self._engine = engine

    def publish(self, named: Mapping[str, Any], policy_version: int) -> None:
        """Stamp this version on whatever the engine samples from now on."""
        self._engine.policy_version = policy_version


@dataclass
class PromptSource:
    """Numbers the prompts as they are dispatched, from 0, and remembers which ones were."""

    prompts: Iterator[Prompt]
    next_id: int = 0
    ended: bool = False
    histogram: Counter[str] = field(default_factory=Counter[str])
    """prompt_id -> how often it was dispatched."""

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        """The next `count` prompts with their group ids; fewer, and `ended` is set, when they run out."""
        taken: list[tuple[int, Prompt]] = []
        while len(taken) < count and not self.ended:
            try:
                prompt = next(self.prompts)
            except StopIteration:
                self.ended = True
                break
            taken.append((self.next_id, prompt))
            self.histogram[prompt.prompt_id] += 1
            self.next_id += 1
        return taken


def require_sampler_logprobs(group: TrajectoryGroup, max_policy_lag: int) -> None:
    """Refuse a group that says nothing about the policy that wrote it, where that may not be the learner's own.

    Raises ConfigError. At lag 0 the learner's own log-probs are the sampler's. A single missing number is not refused
    here: its trajectory is quarantined in the update, and counted.
    """
    if max_policy_lag == 0:
        return
    logprobs = [p for t in group.trajectories for p in t.sampler_logprobs]
    tokens = sum(len(t.token_ids) for t in group.trajectories)
    if tokens and not any(math.isfinite(p) for p in logprobs):
        raise ConfigError(
            f"group {group.group_id} came without sampler log-probs, which max_policy_lag = {max_policy_lag} needs for "
            "its importance weights: let the samplers record them (sampler_logprobs = true) or set max_policy_lag = 0"
        )
