"""Groups for whoever generates in its own process: prompts in, trajectory groups with decoded text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vcpo import policy
from vcpo.errors import ConfigError, RolloutError
from vcpo.rollout.engine import SamplingEngine
from vcpo.rollout.requests import GroupRequest, GroupResult
from vcpo.types import Prompt, Trajectory, TrajectoryGroup


def encode_prompt(tokenizer: Any, prompt: Prompt, max_prompt_tokens: int) -> tuple[int, ...]:
    """The prompt's token ids, special tokens as the tokenizer adds them to a text.

    Raises ConfigError, naming the prompt, for one that is empty, longer than `max_prompt_tokens`, or not encodable.
    """
    try:
        ids = policy.encode_prompt(tokenizer, prompt.text)
    except ConfigError as error:
        raise ConfigError(f"prompt {prompt.prompt_id!r}: {error}") from None
    if len(ids) > max_prompt_tokens:
        raise ConfigError(
            f"prompt {prompt.prompt_id!r} has {len(ids)} tokens, more than max_prompt_tokens={max_prompt_tokens}:"
            " raise it or leave the prompt out"
        )
    return tuple(ids)


def decode_completion(tokenizer: Any, trajectory: Trajectory) -> str:
    """The trajectory's text without its stop token: everything else that was written, special tokens too."""
    ids = list(trajectory.token_ids)
    if trajectory.finish_reason == "stop":
        ids.pop()
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""


def to_trajectory_group(tokenizer: Any, prompt: Prompt, result: GroupResult) -> TrajectoryGroup:
    """An engine's result as the rest of the house knows it: with the prompt, and with text to score."""
    return TrajectoryGroup(
        group_id=result.group_id,
        prompt=prompt,
        prompt_token_ids=result.prompt_token_ids,
        trajectories=tuple(replace(t, completion=decode_completion(tokenizer, t)) for t in result.trajectories),
        completed_version=result.completed_version,
    )


def collect_groups(
    engine: SamplingEngine,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    num_generations: int,
    seed: int,
    max_prompt_tokens: int = 512,
    first_group_id: int = 0,
) -> list[TrajectoryGroup]:
    """One group per prompt, in the order of the prompts, numbered from `first_group_id`; blocks until all are done.

    All prompts form one generation batch. The engine must have nothing else in flight; raises RolloutError if it has.
    """
    if engine.num_active:
        raise RolloutError(f"cannot collect groups: the engine has {engine.num_active} other trajectories in flight")
    requests = [
        GroupRequest(
            group_id=first_group_id + i,
            prompt_id=prompt.prompt_id,
            prompt_token_ids=encode_prompt(tokenizer, prompt, max_prompt_tokens),
            num_generations=num_generations,
            seed=seed,
        )
        for i, prompt in enumerate(prompts)
    ]
    engine.submit(requests)
    results: dict[int, GroupResult] = {}
    while engine.num_active:
        results.update((r.group_id, r) for r in engine.step())
    engine.started()  # nobody asks about these, and the list would grow
    return [to_trajectory_group(tokenizer, p, results[r.group_id]) for p, r in zip(prompts, requests, strict=True)]
