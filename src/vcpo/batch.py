"""Batch: the only place where lists become tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from vcpo.errors import BatchError
from vcpo.types import Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class Batch:
    """n trajectories as tensors; left or right padding. Column j of every [n, s] tensor speaks of token j.

    The truth about "who is a token" is `attention_mask` (prompt and actions, not padding), about "who is trained"
    `action_mask`. Values at other positions carry no meaning.
    """

    input_ids: Tensor
    """[n, s] int64: prompt and completion tokens, padding anywhere outside `attention_mask`."""
    attention_mask: Tensor
    """[n, s] bool or int: non-zero on real tokens."""
    action_mask: Tensor
    """[n, s] bool: True on tokens the policy chose."""
    sampler_logprobs: Tensor
    """[n, s] float: log-prob in nats of each action as recorded at sampling time, after temperature."""
    rewards: Tensor
    """[n] float; NaN marks an unscorable trajectory."""
    group_ids: Tensor
    """[n] int64: equal for trajectories of the same prompt; any integers."""
    temperature: float = 1.0
    """Sampling temperature > 0; learner log-probs are computed after the same temperature."""
    policy_lags: Tensor | None = None
    """[n] int64: learner's version minus the oldest version that sampled any action; None when unknown."""

    def __post_init__(self) -> None:
        if self.input_ids.ndim != 2:
            raise BatchError(f"input_ids must be [n, s], got shape {tuple(self.input_ids.shape)}")
        n, s = self.input_ids.shape
        for name in ("attention_mask", "action_mask", "sampler_logprobs"):
            if getattr(self, name).shape != (n, s):
                raise BatchError(f"{name} must be [{n}, {s}] like input_ids, got {tuple(getattr(self, name).shape)}")
        for name in ("rewards", "group_ids"):
            if getattr(self, name).shape != (n,):
                raise BatchError(f"{name} must be [{n}], one per trajectory, got {tuple(getattr(self, name).shape)}")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise BatchError(f"temperature must be a positive number, got {self.temperature}")

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def action_lengths(self) -> Tensor:
        """[n] int64: action tokens per trajectory."""
        return self.action_mask.bool().sum(1)

    def rows(self, index: Tensor | Sequence[int]) -> Batch:
        """The trajectories at `index` ([m] int64), trimmed to the columns that any of them uses."""
        at = torch.as_tensor(index, dtype=torch.int64, device=self.input_ids.device)
        used = self.attention_mask[at].bool().any(0).nonzero().flatten()
        columns = slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0, 1)
        picked: dict[str, object] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                picked[f.name] = value[at][:, columns] if value.ndim == 2 else value[at]
        return replace(self, **picked)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        moved = {
            f.name: getattr(self, f.name).to(device) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)


def collate(
    groups: Sequence[TrajectoryGroup],
    *,
    pad_token_id: int,
    policy_version: int | None = None,
    temperature: float = 1.0,
    padding_side: str = "right",
) -> Batch:
    """Groups of trajectories -> Batch, in the order given. A reward of None becomes NaN (unscorable).

    `policy_version` is the learner's version now; with it, `policy_lags` is filled (0 for a row without actions).
    """
    rows = [(g, t) for g in groups for t in g.trajectories]
    if not rows:
        raise BatchError("cannot make a batch of no trajectories")
    width = max(len(g.prompt_token_ids) + len(t.token_ids) for g, t in rows)
    ids, attention, action, logprobs = [], [], [], []
    for group, t in rows:
        p, c = len(group.prompt_token_ids), len(t.token_ids)
        pad = width - p - c
        ids.append(_pad([*group.prompt_token_ids, *t.token_ids], pad, pad_token_id, padding_side))
        attention.append(_pad([True] * (p + c), pad, False, padding_side))
        action.append(_pad([False] * p + list(t.actions), pad, False, padding_side))
        logprobs.append(_pad([0.0] * p + list(t.sampler_logprobs), pad, 0.0, padding_side))
    lags = None
    if policy_version is not None:
        lags = torch.tensor([_lag(t, policy_version) for _, t in rows], dtype=torch.int64)
    return Batch(
        input_ids=torch.tensor(ids, dtype=torch.int64),
        attention_mask=torch.tensor(attention, dtype=torch.bool),
        action_mask=torch.tensor(action, dtype=torch.bool),
        sampler_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        rewards=torch.tensor([math.nan if t.reward is None else t.reward for _, t in rows], dtype=torch.float32),
        group_ids=torch.tensor([g.group_id for g, _ in rows], dtype=torch.int64),
        temperature=temperature,
        policy_lags=lags,
    )


def _pad(values: list, count: int, filler: object, side: str) -> list:
    return values + [filler] * count if side == "right" else [filler] * count + values


def _lag(trajectory: Trajectory, policy_version: int) -> int:
    oldest = trajectory.oldest_version
    return 0 if oldest is None else policy_version - oldest
