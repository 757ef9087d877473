"""What becomes of a group some of whose members failed: trained as it is, asked for again, or dropped and counted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from vcpo.errors import ConfigError
from vcpo.rollout.requests import GroupResult

SHORT_GROUPS = ("train", "refill")


@dataclass(frozen=True, slots=True)
class Settled:
    """The verdict on one group."""

    kind: Literal["keep", "refill", "drop"]
    reason: str
    """Empty for a full group, else one line that a metric or a log can carry."""
    result: GroupResult
    """The group without its failed members."""


def settle_group(result: GroupResult, num_generations: int, short_groups: str, *, refills_left: int = 1) -> Settled:
    """Decide about a group: "keep" a full one; treat a short one as `short_groups` says ("train" or "refill").

    A lone survivor of a larger group is dropped: nothing is left to compare it with. `refills_left` is how often the
    group may still be asked for again; at 0 "refill" decides like "train", so a member that fails for ever ends.
    Raises ConfigError for another `short_groups`, ValueError when there are more members than asked for.
    """
    if short_groups not in SHORT_GROUPS:
        raise ConfigError(f"short_groups must be one of {', '.join(SHORT_GROUPS)}, got {short_groups!r}")
    if len(result.trajectories) > num_generations:
        raise ValueError(
            f"group {result.group_id} has {len(result.trajectories)} trajectories, {num_generations} were asked for"
        )
    survivors = tuple(t for t in result.trajectories if t.finish_reason not in ("failed", "aborted"))
    rest = replace(result, trajectories=survivors)
    n = len(survivors)
    if n == num_generations:
        return Settled("keep", "", rest)
    if short_groups == "refill" and refills_left > 0:
        return Settled("refill", f"{n} of {num_generations} members survived", rest)
    if n == 0:
        return Settled("drop", f"no survivor of {num_generations} members", rest)
    if n == 1:
        return Settled("drop", f"lone survivor of {num_generations} members", rest)
    return Settled("keep", f"{n} of {num_generations} members survived", rest)
