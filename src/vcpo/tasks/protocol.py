"""What a task is: prompts to train on, prompts kept apart, a score, and demonstrations to start from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from vcpo.types import Prompt


@runtime_checkable
class Task(Protocol):
    """A source of prompts with a reward. Everything it hands out is a function of its options and the given seed."""

    @property
    def name(self) -> str:
        """One word; prompt ids start with it."""
        ...

    @property
    def alphabet(self) -> str | None:
        """Every character of its prompts and demonstrations, for a character tokenizer; None where text is open."""
        ...

    def train_prompts(self, seed: int) -> Iterator[Prompt]:
        """Prompts without end, in an order that `seed` alone decides; never one of the held-out ones."""
        ...

    def heldout_prompts(self, count: int) -> list[Prompt]:
        """The first `count` of a fixed list of different prompts that training never sees."""
        ...

    def score(self, prompts: Sequence[str], completions: Sequence[str], **columns: list[Any]) -> list[float | None]:
        """One reward per completion, TRL's shape: lists of equal length, the prompts' columns by name.

        None says that a completion cannot be scored. Completions are hostile text: bounded work, nothing executed.
        """
        ...

    def demonstrations(self, seed: int, *, noise: float = 0.0) -> Iterator[tuple[str, str]]:
        """(prompt text, completion text) without end, for supervised warm starts; the trainer adds the EOS token.

        `noise` in [0, 1] is the share of symbols that are replaced at random, so that RL has something to learn.
        """
        ...
