"""Countdown: reach a target with all the given numbers, each used once. Problems and judgement are reasoning_gym's.

compact prompt  3 5 7=1>            completion  3+5-7            (then EOS)
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vcpo.errors import ConfigError
from vcpo.tasks.expressions import numbers_of
from vcpo.tasks.split import first_heldout, is_heldout, unit_hash
from vcpo.types import Prompt

COMPACT_ALPHABET = "0123456789+-*/() =>"
QUESTION_ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
_HELDOUT_SHARE = 1 / 8  # with the default options there are only about 4,300 problems
_POOL = 20_000  # problems that demonstrations draw from; making one costs about as much as training on it


@dataclass(frozen=True)
class Countdown:
    """The countdown task; needs the extra "tasks" (reasoning_gym)."""

    min_numbers: int = 3
    max_numbers: int = 3
    """Numbers in a problem, 2 to 12."""
    max_value: int = 12
    """The largest given number; the smallest is 1."""
    max_target: int = 99
    """The largest target; the smallest is 1."""
    operators: str = "+-*/"
    """Signs that the problems are made with; an answer may use all four."""
    prompt_style: str = "compact"
    """"compact" for small character models, "question" for reasoning_gym's own words."""

    name = "countdown"

    def __post_init__(self) -> None:
        if not 2 <= self.min_numbers <= self.max_numbers <= 12:
            got = f"{self.min_numbers} and {self.max_numbers}"
            raise ConfigError(f"task countdown: 2 <= min_numbers <= max_numbers <= 12 must hold, got {got}")
        if not 1 <= self.max_value <= 999_999 or not 1 <= self.max_target <= 999_999:
            got = f"{self.max_value} and {self.max_target}"
            raise ConfigError(f"task countdown: max_value and max_target must be from 1 to 999999, got {got}")
        if not self.operators or set(self.operators) - set("+-*/"):
            raise ConfigError(f"task countdown: operators must be some of +-*/, got {self.operators!r}")
        if self.prompt_style not in ("compact", "question"):
            raise ConfigError(f"task countdown: prompt_style must be compact or question, got {self.prompt_style!r}")

    @property
    def alphabet(self) -> str:
        """Characters of prompts and answers in the chosen style."""
        return COMPACT_ALPHABET if self.prompt_style == "compact" else QUESTION_ALPHABET

    def train_prompts(self, seed: int) -> Iterator[Prompt]:
        """Generated problems without end, held-out ones left out."""
        return (p for p in self._prompts(f"train/{seed}") if not is_heldout(_key(p), share=_HELDOUT_SHARE))

    def heldout_prompts(self, count: int) -> list[Prompt]:
        """The first `count` held-out problems; the same numbers in another order count as the same problem."""
        name = "countdown with these options"
        return first_heldout(self._prompts("held out"), count, key=_key, task=name, share=_HELDOUT_SHARE)

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        *,
        numbers: Sequence[Sequence[int]],
        target: Sequence[int],
        **columns: list[Any],
    ) -> list[float | None]:
        """1 if the completion is an expression that uses all `numbers` once and equals `target`, else 0.

        The grammar and the numbers are checked first, so that reasoning_gym's scorer, which decides, sees short sums of
        the given numbers only.
        """
        return [self._reward(*row) for row in zip(completions, numbers, target, strict=True)]

    def demonstrations(self, seed: int, *, noise: float = 0.0) -> Iterator[tuple[str, str]]:
        """The generator's own solutions without spaces; each digit or sign is replaced with chance `noise`."""
        if not 0 <= noise <= 1:
            raise ConfigError(f"noise is a share from 0 to 1, got {noise}")
        rng = random.Random(f"countdown/demonstrations/{seed}")
        pool: list[Prompt] = []
        fresh = self.train_prompts(seed)
        while True:
            if len(pool) < _POOL:
                pool.append(next(fresh))
                prompt = pool[-1]
            else:
                prompt = pool[int(_POOL * rng.random())]
            yield prompt.text, "".join(_noisy(c, noise, rng) for c in prompt.columns["solution"])

    def _prompts(self, stream: str) -> Iterator[Prompt]:
        index = int(unit_hash(f"countdown/{stream}") * 2**53)  # far from any other stream's
        while True:
            try:
                entry = self._problems[index]
            except ValueError as exc:
                raise ConfigError(
                    f"task countdown: no problem with these options: {exc}; allow a larger max_target"
                ) from exc
            index += 1
            meta = entry["metadata"]
            numbers, target, solution = list(meta["numbers"]), meta["target"], meta["expression"].replace(" ", "")
            text = f"{' '.join(map(str, numbers))}={target}>"
            columns = {"numbers": numbers, "target": target, "solution": solution}
            prompt_id = f"countdown/{text[:-1]}"
            yield Prompt(prompt_id, text if self.prompt_style == "compact" else entry["question"], columns)

    def _reward(self, completion: str, numbers: Sequence[int], target: int) -> float:
        used = numbers_of(completion)
        if used is None or sorted(used) != sorted(numbers):
            return 0.0
        # Below 1 the library gives small consolation rewards for the form; a stable benchmark wants none.
        entry = {"metadata": {"numbers": list(numbers), "target": target}}
        return float(self._problems.score_answer(completion, entry) >= 1.0)

    @cached_property
    def _problems(self) -> Any:
        try:
            import reasoning_gym
        except ModuleNotFoundError as exc:
            raise ConfigError('task countdown needs reasoning_gym: pip install "vcpo[tasks]"') from exc
        return reasoning_gym.create_dataset(
            "countdown",
            min_numbers=self.min_numbers,
            max_numbers=self.max_numbers,
            min_value=1,
            max_value=self.max_value,
            min_target=1,
            max_target=self.max_target,
            operators=tuple(self.operators),
            seed=0,
            size=2**62,
        )


def _key(prompt: Prompt) -> str:
    return f"countdown/{sorted(prompt.columns['numbers'])}={prompt.columns['target']}"


def _noisy(char: str, noise: float, rng: random.Random) -> str:
    for kind in ("0123456789", "+-*/"):
        if char in kind and rng.random() < noise:
            return kind[int(len(kind) * rng.random())]
    return char
