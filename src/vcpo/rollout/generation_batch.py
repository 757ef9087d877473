"""The generation batch: the rows in flight together with their key/value cache, one decode step at a time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vcpo.errors import ConfigError, RolloutError
from vcpo.rollout.causal_lm import CausalLM
from vcpo.rollout.kv_cache import RowCache
from vcpo.rollout.requests import GroupRequest, SamplingParams
from vcpo.rollout.rows import Rows
from vcpo.rollout.sampling import sample_tokens
from vcpo.types import FinishReason, Trajectory

Member = tuple[GroupRequest, int, Trajectory | None]
"""Who is to be written: request, number inside the group, what was written so far."""

_DEAD_SHARE = 8
"""Rows that ended are taken out when they are one in so many: taking out copies the whole cache, keeping computes in vain."""


class GenerationBatch:
    """Rows in flight. Members come with `advance`, leave when they end or are stopped."""

    def __init__(self, lm: CausalLM, params: SamplingParams) -> None:
        self._lm = lm
        self._params = params
        if any(t >= lm.vocab_size for t in params.stop_token_ids):
            raise ConfigError(
                f"stop token {max(params.stop_token_ids)} is not in the model's vocabulary of {lm.vocab_size} tokens"
            )
        self._is_stop = torch.zeros(lm.vocab_size, dtype=torch.bool, device=lm.device)
        self._is_stop[list(params.stop_token_ids)] = True
        self._clear()

    def advance(self, members: Sequence[Member], policy_version: int) -> list[tuple[int, Trajectory]]:
        """Let `members` join, sample one token for every row; returns (group_id, trajectory) of the rows that ended.

        Raises RolloutError when the model gives probabilities that are not finite.
        """
        with torch.inference_mode(), self._lm.evaluating():
            logits = [] if self._rows is None else [self._decode(self._rows)]
            if members:
                logits.append(self._join(members))
            if self._rows is None:
                return []
            tokens, logprobs = sample_tokens(
                torch.cat(logits) if len(logits) > 1 else logits[0],
                self._rows.next_uniforms(),
                temperature=self._params.temperature,
            )
            self._require_finite(logprobs, policy_version)
            ended = self._rows.record(tokens, logprobs, policy_version, self._is_stop)
            return self._leave(ended.tolist(), None) if len(ended) else []

    def stop(self, group_ids: Collection[int]) -> list[tuple[int, Trajectory]]:
        """Take all rows of these groups out; returns (group_id, what was written, finish_reason "aborted")."""
        if self._rows is None:
            return []
        live = self._rows.live.tolist()
        index = [i for i, (group_id, _) in enumerate(self._rows.owners) if live[i] and group_id in group_ids]
        with torch.inference_mode():
            return self._leave(index, "aborted") if index else []

    def _clear(self) -> None:
        self._rows: Rows | None = None
        self._cache = RowCache()
        self._padded = False
        self._num_dead = 0

    def _decode(self, rows: Rows) -> Tensor:
        real = rows.prompt_lengths + rows.counts
        return self._lm.next_logits(
            rows.last_tokens(),
            real_columns=real,
            positions=(real - 1).unsqueeze(1),
            cache=self._cache,
            padded=self._padded,
        )

    def _join(self, members: Sequence[Member]) -> Tensor:
        fresh = Rows.fresh(members, self._params.max_new_tokens, self._lm.logprob_dtype).to(self._lm.device)
        cache = RowCache()
        logits = self._lm.prefill([r.prompt_token_ids + (t.token_ids if t else ()) for r, _, t in members], cache)
        if self._rows is None:
            self._rows, self._cache = fresh, cache
        else:
            self._rows = self._rows.append(fresh)
            self._cache.append_rows(cache)
        self._align(self._rows, unread=0)
        return logits

    def _leave(self, index: list[int], finish_reason: FinishReason | None) -> list[tuple[int, Trajectory]]:
        """Rows `index` ended, with a stop token or the last possible one unless a reason is given."""
        assert self._rows is not None
        rows = self._rows
        left = []
        for row, trajectory in zip(index, rows.trajectories(index), strict=True):
            stopped = trajectory.token_ids[-1:] and trajectory.token_ids[-1] in self._params.stop_token_ids
            reason = finish_reason or ("stop" if stopped else "length")
            left.append((rows.owners[row][0], replace(trajectory, finish_reason=reason)))
        rows.live[index] = False
        self._num_dead += len(index)
        if self._num_dead == len(rows):
            self._clear()
        elif self._num_dead * _DEAD_SHARE >= len(rows):
            kept = rows.live.nonzero().squeeze(1)
            self._rows, self._num_dead = rows.keep(kept), 0
            self._cache.select(kept)
            self._align(self._rows, unread=1)
        return left

    def _align(self, rows: Rows, *, unread: int) -> None:
        """Drop the columns that no live row needs and note whether any row is padded.

        `unread`: tokens at the end of each row that the model has not read yet (1 after sampling, 0 before).
        """
        real = (rows.prompt_lengths + rows.counts - unread)[rows.live]
        self._cache.drop_left(self._cache.columns - int(real.max()))
        self._padded = bool((real < self._cache.columns).any())

    def _require_finite(self, logprobs: Tensor, policy_version: int) -> None:
        assert self._rows is not None
        bad = ~logprobs.isfinite() & self._rows.live
        if bad.any():
            group_id, member = self._rows.owners[int(bad.nonzero()[0])]
            raise RolloutError(
                f"policy version {policy_version} gives no finite probabilities (first seen in group {group_id},"
                f" member {member}): its weights or activations are NaN or infinite"
            )
