"""The trajectories that are being written: one tensor row each, whatever group they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vcpo.rollout.requests import GroupRequest, trajectory_seed
from vcpo.rollout.sampling import uniforms
from vcpo.types import Trajectory

_TENSORS = ("tokens", "logprobs", "versions", "uniforms", "counts", "prompt_lengths", "live")


@dataclass
class Rows:
    """n trajectories in flight. Rows that ended stay, not `live`, until `keep` takes them out."""

    owners: list[tuple[int, int]]
    """(group_id, member) of each row."""
    tokens: Tensor
    """[n, M + 1] int64: what was sampled; column M is written by rows that have ended, and never read."""
    logprobs: Tensor
    """[n, M + 1] float32 (float64 for a float64 model), nats."""
    versions: Tensor
    """[n, M + 1] int64: policy version that sampled each token."""
    uniforms: Tensor
    """[n, M + 1] float64: the random number of each token, drawn beforehand."""
    counts: Tensor
    """[n] int64: tokens sampled so far."""
    prompt_lengths: Tensor
    """[n] int64."""
    live: Tensor
    """[n] bool."""

    @classmethod
    def fresh(
        cls, members: Sequence[tuple[GroupRequest, int, Trajectory | None]], max_new_tokens: int, dtype: torch.dtype
    ) -> Rows:
        """Rows for (request, member, what the member wrote so far or None), on the CPU."""
        n, width = len(members), max_new_tokens + 1
        drawn = np.empty((n, width))
        for row, (request, member, _) in enumerate(members):
            drawn[row] = uniforms(trajectory_seed(request.seed, request.group_id, member), width)
        rows = cls(
            owners=[(request.group_id, member) for request, member, _ in members],
            tokens=torch.zeros(n, width, dtype=torch.int64),
            logprobs=torch.zeros(n, width, dtype=dtype),
            versions=torch.zeros(n, width, dtype=torch.int64),
            uniforms=torch.from_numpy(drawn),
            counts=torch.zeros(n, dtype=torch.int64),
            prompt_lengths=torch.tensor(
                [len(request.prompt_token_ids) for request, _, _ in members], dtype=torch.int64
            ),
            live=torch.ones(n, dtype=torch.bool),
        )
        for row, (_, _, partial) in enumerate(members):
            if partial is not None:
                count = len(partial.token_ids)
                rows.tokens[row, :count] = torch.tensor(partial.token_ids, dtype=torch.int64)
                rows.logprobs[row, :count] = torch.tensor(partial.sampler_logprobs, dtype=dtype)
                rows.versions[row, :count] = torch.tensor(partial.policy_versions, dtype=torch.int64)
                rows.counts[row] = count
        return rows

    def __len__(self) -> int:
        return len(self.owners)

    def to(self, device: torch.device) -> Rows:
        """The same rows on another device."""
        return Rows(self.owners, *(getattr(self, name).to(device) for name in _TENSORS))

    def keep(self, index: Tensor) -> Rows:
        """Rows `index` ([m] int64) only."""
        owners = [self.owners[i] for i in index.tolist()]
        return Rows(owners, *(getattr(self, name)[index] for name in _TENSORS))

    def append(self, other: Rows) -> Rows:
        """These rows, then `other`'s."""
        return Rows(
            self.owners + other.owners,
            *(torch.cat([getattr(self, name), getattr(other, name)]) for name in _TENSORS),
        )

    def next_uniforms(self) -> Tensor:
        """[n] float64: the random number of each row's next token."""
        return self.uniforms.gather(1, self.counts.unsqueeze(1)).squeeze(1)

    def last_tokens(self) -> Tensor:
        """[n, 1] int64: the token each row sampled last."""
        return self.tokens.gather(1, (self.counts - 1).unsqueeze(1))

    def record(self, tokens: Tensor, logprobs: Tensor, policy_version: int, is_stop: Tensor) -> Tensor:
        """Write one sampled token per row ([n] each); returns the indices of the live rows that ended with it.

        `is_stop` [V] bool marks the stop tokens. Rows that had ended before are written past their end only.
        """
        at = self.counts.unsqueeze(1)
        self.tokens.scatter_(1, at, tokens.unsqueeze(1))
        self.logprobs.scatter_(1, at, logprobs.unsqueeze(1).to(self.logprobs.dtype))
        self.versions.scatter_(1, at, policy_version)
        self.counts += self.live
        ended = self.live & (is_stop[tokens] | (self.counts >= self.tokens.shape[1] - 1))
        return ended.nonzero().squeeze(1)

    def trajectories(self, index: list[int]) -> list[Trajectory]:
        """What rows `index` hold, as plain Python; the finish reason is for the caller to say."""
        at = torch.tensor(index, device=self.tokens.device)
        columns = [getattr(self, name)[at].tolist() for name in ("counts", "tokens", "logprobs", "versions")]
        return [
            Trajectory(
                member=self.owners[row][1],
                token_ids=tuple(tokens[:count]),
                sampler_logprobs=tuple(logprobs[:count]),
                policy_versions=tuple(versions[:count]),
                finish_reason="aborted",
            )
            for row, count, tokens, logprobs, versions in zip(index, *columns, strict=True)
        ]
