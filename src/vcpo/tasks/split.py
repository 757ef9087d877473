"""Which prompts are held out: decided by a hash of the prompt itself, so no draw can put one on both sides."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

from vcpo.errors import ConfigError
from vcpo.types import Prompt

HELDOUT_SHARE = 1 / 16
_DRAWS_IN_VAIN = 4000  # a new prompt turns up every 8 or 16 draws, until nearly all have been seen


def unit_hash(text: str) -> float:
    """A number in [0, 1) that depends on `text` alone, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


def is_heldout(key: str, *, share: float = HELDOUT_SHARE) -> bool:
    """Whether the prompt with this key belongs to the held-out side, which gets `share` of all prompts."""
    return unit_hash(f"held out/{key}") < share


def first_heldout(
    prompts: Iterator[Prompt], count: int, *, key: Callable[[Prompt], str], task: str, share: float = HELDOUT_SHARE
) -> list[Prompt]:
    """The first `count` different held-out prompts of an endless stream; ConfigError if the task has too few."""
    found: dict[str, Prompt] = {}
    in_vain = 0
    while len(found) < count:
        prompt = next(prompts)
        if is_heldout(key(prompt), share=share) and key(prompt) not in found:
            found[key(prompt)] = prompt
            in_vain = 0
        elif (in_vain := in_vain + 1) > _DRAWS_IN_VAIN:
            raise ConfigError(
                f"task {task} has only about {len(found)} held-out prompts, {count} were asked for: "
                "evaluate on fewer prompts or make the task larger"
            )
    return list(found.values())
