"""What an engine is asked for and what it gives back: frozen, plain Python, JSON in and out, no torch.

A worked example, two answers to the prompt "1+1=" under the run's seed 0::

    params = SamplingParams(max_new_tokens=4, temperature=1.0, stop_token_ids=(2,))
    request = GroupRequest(group_id=31, prompt_id="sums/17", prompt_token_ids=(5, 10, 5, 11), num_generations=2, seed=0)
    result = GroupResult(group_id=31, prompt_token_ids=(5, 10, 5, 11), trajectories=(good, cut),
                         completed_version=5, started_version=4)     # good, cut: see vcpo.types
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from vcpo.errors import ConfigError
from vcpo.types import Trajectory


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How trajectories are sampled: the same for every request of an engine. Raises ConfigError for a value out of range."""

    max_new_tokens: int
    """Longest completion in tokens, the stop token included; >= 1."""
    temperature: float = 1.0
    """Logits are divided by it; > 0."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a trajectory (EOS and others); a sampled one is an action and part of the trajectory."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(sorted({int(t) for t in self.stop_token_ids})))
        if not self.max_new_tokens >= 1:
            raise ConfigError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ConfigError(
                f"temperature must be a positive number, got {self.temperature}: greedy decoding has no sampling"
                " probabilities to learn from; use a small temperature such as 0.1"
            )
        if any(t < 0 for t in self.stop_token_ids):
            raise ConfigError(f"stop_token_ids must be token ids >= 0, got {list(self.stop_token_ids)}")

    def to_json(self) -> dict[str, Any]:
        """Plain dict for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SamplingParams:
        """The inverse of `to_json`."""
        return cls(data["max_new_tokens"], data["temperature"], tuple(data["stop_token_ids"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """Ask for `num_generations` trajectories of one prompt. Raises ConfigError for an empty prompt or group."""

    group_id: int
    """Dispatch number within the run; the same group keeps it through restarts and resumes."""
    prompt_token_ids: tuple[int, ...]
    num_generations: int
    seed: int
    """Seed of the run; with group_id and the member's number it fixes the randomness of every trajectory."""
    prompt_id: str = ""
    """For messages only."""
    partial: tuple[Trajectory, ...] = ()
    """Members written so far: finished ones are kept, an "aborted" one goes on after its last token. Others start anew."""

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ConfigError(f"group {self.group_id} ({self.prompt_id}): the prompt has no tokens, one is needed")
        if not self.num_generations >= 1:
            raise ConfigError(f"group {self.group_id}: num_generations must be at least 1, got {self.num_generations}")
        members = [t.member for t in self.partial]
        if len(set(members)) < len(members) or any(not 0 <= m < self.num_generations for m in members):
            raise ConfigError(
                f"group {self.group_id}: partial members must be distinct and below {self.num_generations}, got {members}"
            )

    def from_prompt(self) -> GroupRequest:
        """The same request without the tokens written so far: what is resubmitted when partial rollouts are off."""
        return replace(self, partial=())

    def to_json(self) -> dict[str, Any]:
        """Plain dict for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GroupRequest:
        """The inverse of `to_json`."""
        return cls(**{**_tuples(data), "partial": tuple(_trajectory(t) for t in data["partial"])})


@dataclass(frozen=True, slots=True)
class GroupResult:
    """A group that is done. `trajectories` are in the order of their members; fewer than asked for when members failed."""

    group_id: int
    prompt_token_ids: tuple[int, ...]
    trajectories: tuple[Trajectory, ...]
    completed_version: int
    """Version the sampler held when the last trajectory ended."""
    started_version: int
    """Oldest version that sampled a token of the group."""

    def to_json(self) -> dict[str, Any]:
        """Plain dict for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GroupResult:
        """The inverse of `to_json`."""
        return cls(**{**_tuples(data), "trajectories": tuple(_trajectory(t) for t in data["trajectories"])})


def trajectory_seed(run_seed: int, group_id: int, member: int) -> int:
    """A 63-bit number that depends on all three arguments, the same on every machine and in every process."""
    digest = hashlib.blake2b(f"{run_seed}/{group_id}/{member}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}


def _trajectory(data: Mapping[str, Any]) -> Trajectory:
    return Trajectory(**_tuples(data))
