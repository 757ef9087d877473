"""SamplingEngine, and the embedded one: a plain decode loop over a Hugging Face causal language model.

One `step()` is one decode step for all trajectories in flight:

    rows in flight --forward(last token)--+
                                          +--> logits --> one token per row --> rows that ended leave, full groups return
    new requests --prefill, join the rows-+

Requests are prefilled inside the step, never in `submit`: weights change only between steps, so everything that one
step samples comes from one policy version, and that version is stamped on its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor, nn

from vcpo.errors import ConfigError
from vcpo.rollout.causal_lm import CausalLM
from vcpo.rollout.generation_batch import GenerationBatch, Member
from vcpo.rollout.requests import GroupRequest, GroupResult, SamplingParams
from vcpo.types import Trajectory

__all__ = ["EmbeddedEngine", "GroupRequest", "GroupResult", "SamplingEngine", "SamplingParams"]


class SamplingEngine(Protocol):
    """What generates trajectories. Methods are called from one thread."""

    policy_version: int
    """Version of the weights in use."""

    @property
    def num_active(self) -> int:
        """Trajectories of the groups that were asked for and not yet returned."""
        ...

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Take requests; those of one call enter the same generation batch, at the next step."""
        ...

    def step(self) -> list[GroupResult]:
        """One decode step for everything in flight; returns the groups it completed."""
        ...

    def started(self) -> list[tuple[int, int]]:
        """(group_id, oldest policy version) of the groups whose first token was sampled since the last call."""
        ...

    def load_weights(self, named: Mapping[str, Tensor], policy_version: int) -> None:
        """Swap the weights between two steps; what is in flight goes on under the new ones."""
        ...

    def abort(self, group_ids: Iterable[int]) -> list[GroupRequest]:
        """Stop these groups; returns each one's request with the tokens written so far as `partial`."""
        ...


@dataclass
class _Group:
    """A group in flight."""

    request: GroupRequest
    done: dict[int, Trajectory] = field(default_factory=dict)
    """Members that ended, by number."""


class EmbeddedEngine:
    """Samples groups from `model`, a Hugging Face causal language model, on the device it is on.

    Token t of a trajectory depends on (seed, group_id, member, t) and the probabilities only, whatever else is in the
    batch. New weights come with `load_weights`; the key/value cache is kept (in-flight update). When the model's owner
    changes the weights in place instead, set `policy_version`. `on_version` is called with every version loaded. The
    model's mode is left as found. Raises ConfigError for a model without a plain key/value cache.
    """

    def __init__(
        self,
        model: nn.Module,
        params: SamplingParams,
        *,
        pad_token_id: int,
        policy_version: int = 0,
        on_version: Callable[[int], None] | None = None,
    ) -> None:
        self.params = params
        self.policy_version = policy_version
        self._lm = CausalLM(model, pad_token_id=pad_token_id)
        self._batch = GenerationBatch(self._lm, params)
        self._on_version = on_version
        self._pending: list[GroupRequest] = []
        self._groups: dict[int, _Group] = {}
        self._started: list[tuple[int, int]] = []

    @property
    def num_active(self) -> int:
        """Trajectories of the groups that were asked for and not yet returned."""
        requests = [*self._pending, *(g.request for g in self._groups.values())]
        return sum(r.num_generations for r in requests)

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Take requests for the next step. Raises ConfigError, and takes none of them, if one does not fit the model."""
        known = {r.group_id for r in self._pending} | set(self._groups)
        for r in requests:
            if r.group_id in known:
                raise ConfigError(f"group {r.group_id} is in flight already: group ids must be unique")
            known.add(r.group_id)
            self._lm.check_prompt(r.prompt_token_ids, self.params.max_new_tokens, f"group {r.group_id} {r.prompt_id!r}")
        self._pending.extend(requests)

    def step(self) -> list[GroupResult]:
        """One decode step for everything in flight; returns the groups it completed.

        Raises RolloutError when the model gives probabilities that are not finite.
        """
        results, members = self._admit()
        for group_id, trajectory in self._batch.advance(members, self.policy_version):
            group = self._groups[group_id]
            group.done[trajectory.member] = trajectory
            if len(group.done) == group.request.num_generations:
                results.append(self._result(group_id))
        return results

    def started(self) -> list[tuple[int, int]]:
        """(group_id, oldest policy version) of the groups whose first token was sampled since the last call."""
        started, self._started = self._started, []
        return started

    def load_weights(self, named: Mapping[str, Tensor], policy_version: int) -> None:
        """Swap the weights between two steps. Raises WeightSyncError when they are not this model's."""
        self._lm.load_weights(named)
        self.policy_version = policy_version
        if self._on_version is not None:
            self._on_version(policy_version)

    def abort(self, group_ids: Iterable[int]) -> list[GroupRequest]:
        """Stop these groups (ids that are not in flight are left out); returns their requests, to be submitted again.

        `partial` then holds every member's tokens with their log-probs and versions; `from_prompt()` drops them.
        """
        wanted = set(group_ids)
        aborted = [r for r in self._pending if r.group_id in wanted]
        self._pending = [r for r in self._pending if r.group_id not in wanted]
        stopped = {gid: self._groups.pop(gid) for gid in list(self._groups) if gid in wanted}
        for group_id, trajectory in self._batch.stop(stopped):
            stopped[group_id].done[trajectory.member] = trajectory
        for group in stopped.values():
            aborted.append(replace(group.request, partial=_in_order(group)))
        return aborted

    def _admit(self) -> tuple[list[GroupResult], list[Member]]:
        """Open the groups that were submitted: those with all members already are results, the others give members."""
        requests, self._pending = self._pending, []
        results: list[GroupResult] = []
        members: list[Member] = []
        for request in requests:
            written = {t.member: t for t in request.partial}
            done = {m: ended for m, t in written.items() if (ended := self._ended(t)) is not None}
            self._groups[request.group_id] = _Group(request, done)
            versions = [v for t in request.partial for v in t.policy_versions]
            self._started.append((request.group_id, min(versions, default=self.policy_version)))
            members += [(request, m, written.get(m)) for m in range(request.num_generations) if m not in done]
            if len(done) == request.num_generations:
                results.append(self._result(request.group_id))
        return results, members

    def _ended(self, trajectory: Trajectory) -> Trajectory | None:
        """The trajectory if nothing is to be written after it, else None."""
        if trajectory.finish_reason in ("stop", "length"):
            return trajectory
        full = len(trajectory.token_ids) >= self.params.max_new_tokens
        return replace(trajectory, finish_reason="length") if full else None

    def _result(self, group_id: int) -> GroupResult:
        group = self._groups.pop(group_id)
        versions = [v for t in group.done.values() for v in t.policy_versions]
        return GroupResult(
            group_id=group_id,
            prompt_token_ids=group.request.prompt_token_ids,
            trajectories=_in_order(group),
            completed_version=self.policy_version,
            started_version=min(versions, default=self.policy_version),
        )


def _in_order(group: _Group) -> tuple[Trajectory, ...]:
    return tuple(group.done[m] for m in sorted(group.done))
