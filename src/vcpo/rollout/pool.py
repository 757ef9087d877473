"""SamplerPool: what the pipeline asks for trajectories, and the events it gets back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from vcpo.rollout.requests import GroupRequest, GroupResult


@dataclass(frozen=True, slots=True)
class GroupStarted:
    """A sampler sampled the first token of a group. Comes again when the group starts again after a restart."""

    group_id: int
    policy_version: int
    """Oldest version that sampled a token of the group."""
    sampler: int


@dataclass(frozen=True, slots=True)
class GroupCompleted:
    """All members of a group ended. Comes exactly once for every group that is not aborted."""

    result: GroupResult
    sampler: int


@dataclass(frozen=True, slots=True)
class GroupAborted:
    """A group was stopped on request. Comes exactly once for every group that `abort` returned."""

    request: GroupRequest
    """To be submitted again, or not; `partial` holds what was written, `from_prompt()` drops it."""
    sampler: int


@dataclass(frozen=True, slots=True)
class SamplerRestarted:
    """A sampler died or went silent and was replaced; the groups it had were dispatched again, from the prompt."""

    sampler: int
    cause: str
    lost_group_ids: tuple[int, ...]


SamplerEvent = GroupStarted | GroupCompleted | GroupAborted | SamplerRestarted


class SamplerPool(Protocol):
    """Samplers at work, wherever they run."""

    @property
    def num_outstanding(self) -> int:
        """Groups that were submitted and neither completed nor aborted, as far as `poll` has told."""
        ...

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Dispatch groups. Those of one call that go to the same sampler enter the same generation batch."""
        ...

    def poll(self, timeout_s: float) -> list[SamplerEvent]:
        """What happened, at once if something has, else after waiting at most `timeout_s` seconds (then perhaps nothing).

        Raises RolloutError, with the sampler's own traceback, when one died more often than it may be restarted.
        """
        ...

    def abort(self, group_ids: Iterable[int]) -> list[int]:
        """Stop these groups; returns the ones that were outstanding. A GroupAborted follows for each of them."""
        ...

    def close(self) -> None:
        """End all samplers, in bounded time; may be called twice."""
        ...
