"""What travels between the rooms: prompts, trajectories and groups. Frozen, plain Python, no torch.

A worked example, one group of two trajectories of the prompt "1+1="::

    prompt = Prompt(prompt_id="sums/17", text="1+1=", columns={"answer": "2"})
    good = Trajectory(member=0, token_ids=(6, 2), sampler_logprobs=(-0.1, -0.01), policy_versions=(4, 4),
                      finish_reason="stop", completion="2", reward=1.0)
    cut = Trajectory(member=1, token_ids=(7, 9), sampler_logprobs=(-2.3, -1.2), policy_versions=(4, 5),
                     finish_reason="length", completion="3;", reward=0.0)
    group = TrajectoryGroup(group_id=31, prompt=prompt, prompt_token_ids=(5, 10, 5, 11),
                            trajectories=(good, cut), completed_version=5)
    assert group.oldest_version == 4      # new weights arrived while the second one was being written
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

FinishReason = Literal["stop", "length", "aborted", "failed"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a task, before tokenisation."""

    prompt_id: str
    """Stable name of the prompt inside its task or data set; the key of the trained-prompt histogram."""
    text: str
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Whatever the reward function needs (`answer`, ...); JSON values only."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What a sampler wrote after one prompt. All per-token fields have one entry per token of `token_ids`."""

    member: int
    """Position inside the group, from 0."""
    token_ids: tuple[int, ...]
    """Tokens after the prompt, exactly as sampled (never re-tokenised), a sampled EOS included."""
    sampler_logprobs: tuple[float, ...]
    """Log-prob in nats of each token under the weights that sampled it, after temperature. 0.0 where not an action."""
    policy_versions: tuple[int, ...]
    """The policy version that sampled each token: stamped at sampling time, not at completion."""
    finish_reason: FinishReason
    completion: str = ""
    """Decoded text without the stop token: what the reward function sees."""
    reward: float | None = None
    """None: not scored yet, or the reward function could not say (unscorable)."""
    action_mask: tuple[bool, ...] | None = None
    """True on tokens the policy chose; None means all of them (no tool output inside)."""

    @property
    def actions(self) -> tuple[bool, ...]:
        """The action mask, written out."""
        return self.action_mask if self.action_mask is not None else (True,) * len(self.token_ids)

    @property
    def oldest_version(self) -> int | None:
        """The oldest version that sampled any action token; None when there is none."""
        return min((v for v, a in zip(self.policy_versions, self.actions, strict=True) if a), default=None)


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """All trajectories of one prompt."""

    group_id: int
    """Dispatch number within the run, from 0: the same group keeps it through restarts and resumes."""
    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    trajectories: tuple[Trajectory, ...]
    completed_version: int = 0
    """Policy version the sampler held when the last trajectory ended (splits lag into in-flight and in-queue)."""

    @property
    def oldest_version(self) -> int:
        """The oldest version that sampled any action token of the group; `completed_version` if there is none."""
        versions = [t.oldest_version for t in self.trajectories]
        return min((v for v in versions if v is not None), default=self.completed_version)

    def with_rewards(self, rewards: list[float | None]) -> TrajectoryGroup:
        """The same group with one reward per trajectory, in order."""
        scored = tuple(replace(t, reward=r) for t, r in zip(self.trajectories, rewards, strict=True))
        return replace(self, trajectories=scored)

    def to_json(self) -> dict[str, Any]:
        """Plain dict for JSON; NaN rewards and log-probs survive (Python's json writes and reads NaN)."""
        return {
            "group_id": self.group_id,
            "prompt": {
                "prompt_id": self.prompt.prompt_id,
                "text": self.prompt.text,
                "columns": dict(self.prompt.columns),
            },
            "prompt_token_ids": list(self.prompt_token_ids),
            "trajectories": [asdict(t) for t in self.trajectories],
            "completed_version": self.completed_version,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TrajectoryGroup:
        """The inverse of `to_json`."""
        return cls(
            group_id=data["group_id"],
            prompt=Prompt(**data["prompt"]),
            prompt_token_ids=tuple(data["prompt_token_ids"]),
            trajectories=tuple(_trajectory_from_json(t) for t in data["trajectories"]),
            completed_version=data["completed_version"],
        )


def _trajectory_from_json(data: Mapping[str, Any]) -> Trajectory:
    fields: dict[str, Any] = dict(data)
    for name in ("token_ids", "sampler_logprobs", "policy_versions", "action_mask"):
        if fields.get(name) is not None:
            fields[name] = tuple(fields[name])
    return Trajectory(**fields)
