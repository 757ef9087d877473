"""Which prompts are held out: decided by a hash of the prompt itself, so no draw can put one on both sides."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

from vcpo.errors import ConfigError
from vcpo.types import Prompt

HELDOUT_SHARE = 1 / 8
_DRAWS_PER_PROMPT = 200  # 25 times what a large task needs on average


def unit_hash(text: str) -> float:
    """A number in [0, 1) that depends on `text` alone, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


def is_heldout(key: str) -> bool:
    """Whether the prompt with this key belongs to the held-out side."""
    return unit_hash(f"held out/{key}") < HELDOUT_SHARE


def first_heldout(prompts: Iterator[Prompt], count: int, *, key: Callable[[Prompt], str], task: str) -> list[Prompt]:
    """The first `count` different held-out prompts of an endless stream; ConfigError if the task has too few."""
    found: dict[str, Prompt] = {}
    for _ in range(_DRAWS_PER_PROMPT * max(count, 1)):
        if len(found) >= count:
            break
        prompt = next(prompts)
        if is_heldout(key(prompt)):
            found.setdefault(key(prompt), prompt)
    if len(found) < count:
        raise ConfigError(
            f"task {task} has only about {len(found)} held-out prompts, {count} were asked for: evaluate on fewer prompts "
            "or make the task larger"
        )
    return list(found.values())
