"""Running sums: seven random digits, answered by the chain of their sums modulo 10.

    prompt      4408123>
    completion  4+4=8|8+0=8|_8+8=6;6+1=7,7+2=9|__9+3=2        (then EOS)

A policy of 100k parameters learns it in a minute of one core, yet it has what makes asynchronous RL fragile: the
reward depends on a chain of steps, while separators (any of , ; |) and fillers (_) are style that is never rewarded,
so the entropy of a trajectory is far larger than what the reward speaks about, as in prose.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vcpo.errors import ConfigError
from vcpo.tasks.split import first_heldout, is_heldout, unit_hash
from vcpo.types import Prompt

SEPARATORS = ",;|"
FILLER = "_"
FILLER_CHANCE = 0.2
"""Chance of one more filler before a link: 0.25 of them on average, 0.63 nats of entropy per link."""


@dataclass(frozen=True)
class RunningSums:
    """The running sums task; see the module's first lines for its text."""

    digits: int = 7
    """Digits in a prompt, at least 2; the chain has one link fewer."""
    flip_rewards: float = 0.0
    """Share of rewards that are turned round, in [0, 1]: a noisy reward. Fixed for each prompt and completion."""
    flip_seed: int = 0
    """Decides which rewards are turned round."""

    name = "running_sums"
    alphabet = "0123456789>+=" + SEPARATORS + FILLER

    def __post_init__(self) -> None:
        if not 2 <= self.digits <= 64:
            raise ConfigError(f"task running_sums: digits must be from 2 to 64, got {self.digits}")
        if not 0 <= self.flip_rewards <= 1:
            raise ConfigError(f"task running_sums: flip_rewards is a share from 0 to 1, got {self.flip_rewards}")

    def train_prompts(self, seed: int) -> Iterator[Prompt]:
        """Random digits without end, held-out ones left out."""
        return (p for p in self._draws(f"train/{seed}") if not is_heldout(p.text))

    def heldout_prompts(self, count: int) -> list[Prompt]:
        """The first `count` held-out prompts."""
        return first_heldout(
            self._draws("held out"), count, key=lambda p: p.text, task=f"running_sums, digits={self.digits}"
        )

    def score(self, prompts: Sequence[str], completions: Sequence[str], **columns: list[Any]) -> list[float | None]:
        """1 if the completion is a whole chain and its last digit is the sum modulo 10, else 0.

        Only the last digit is judged, the links before it only for their form. None for a prompt of another task.
        """
        return [self._reward(p, c) for p, c in zip(prompts, completions, strict=True)]

    def demonstrations(self, seed: int, *, noise: float = 0.0) -> Iterator[tuple[str, str]]:
        """Chains in random style. Each sum is replaced by a random digit with chance `noise` and the chain goes on
        from what was written, so a perfect imitator ends right with chance 0.1 + 0.9 (1 - noise)^links."""
        if not 0 <= noise <= 1:
            raise ConfigError(f"noise is a share from 0 to 1, got {noise}")
        rng = random.Random(f"running_sums/demonstrations/{seed}")
        for prompt in self.train_prompts(seed):
            yield prompt.text, _chain(prompt.text[:-1], noise, rng)

    def _draws(self, stream: str) -> Iterator[Prompt]:
        rng = random.Random(f"running_sums/{self.digits}/{stream}")
        while True:
            # rng.random() alone is promised to stay the same in later Pythons.
            digits = [int(10 * rng.random()) for _ in range(self.digits)]
            text = "".join(map(str, digits))
            yield Prompt(f"running_sums/{text}", f"{text}>", {"answer": str(sum(digits) % 10)})

    def _reward(self, prompt: str, completion: str) -> float | None:
        if re.fullmatch(rf"[0-9]{{{self.digits}}}>", prompt) is None:
            return None
        link = r"_*[0-9]\+[0-9]="
        # Linear time: every choice in it is decided by the next character. `$` is the written sign for the end.
        chain = re.fullmatch(rf"(?:{link}[0-9][,;|]){{{self.digits - 2}}}{link}([0-9])\$?", completion)
        right = chain is not None and int(chain[1]) == sum(map(int, prompt[:-1])) % 10
        if self.flip_rewards and unit_hash(f"flip/{self.flip_seed}/{prompt}{completion}") < self.flip_rewards:
            right = not right
        return float(right)


def _chain(digits: str, noise: float, rng: random.Random) -> str:
    links: list[str] = []
    spare = 2 * (len(digits) - 1)  # with 7 digits: 48 tokens at most, EOS included
    total = int(digits[0])
    for digit in digits[1:]:
        fillers = 0
        while fillers < spare and rng.random() < FILLER_CHANCE:
            fillers += 1
        spare -= fillers
        written = (total + int(digit)) % 10
        if rng.random() < noise:
            written = int(10 * rng.random())
        links.append(f"{FILLER * fillers}{total}+{digit}={written}")
        total = written
    return links[0] + "".join(SEPARATORS[int(3 * rng.random())] + link for link in links[1:])
