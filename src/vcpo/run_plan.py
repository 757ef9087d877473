"""What a run is going to do, worked out from its config alone, and every mistake that can be seen beforehand. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vcpo.config import RunConfig, config_warnings
from vcpo.errors import ConfigError
from vcpo.tasks import Task, make_task

_SPECIAL_TOKENS = 3  # of a character tokenizer
_PLAIN_DECODERS = {"llama": 0, "mistral": 0, "qwen3": 2}
"""Model types whose size follows from their settings -> extra norms of one head's width in each layer."""


@dataclass(frozen=True)
class RunPlan:
    """The numbers of a run before it starts."""

    mode: str
    task: str
    policy: str
    parameters: int | None
    """Parameters of the policy; None when only loading would tell."""
    steps: int
    groups_per_batch: int
    num_generations: int
    trajectories_per_step: int
    max_new_tokens: int
    max_tokens_per_step: int
    """New tokens of one optimizer batch at most."""
    max_tokens: int
    """New tokens of the whole run at most."""
    lag_bound: int
    """Versions."""
    samplers: int
    """Processes beside the learner."""
    sampler_threads: int
    learner_threads: int
    warm_start_steps: int
    heldout_prompts: int
    run_dir: str
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Field name -> value."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The plan for a person."""
        size = f", {_count(self.parameters)} parameters" if self.parameters else ""
        words = {"replay": "exactly ", "async": "at most "}
        lag = f"{words.get(self.mode, '')}{self.lag_bound}"
        beside = (
            f", {self.samplers} sampler process{'es' * (self.samplers > 1)} beside the learner" if self.samplers else ""
        )
        return [
            f"task        {self.task}",
            f"policy      {self.policy}{size}",
            f"mode        {self.mode}, policy lag {lag}{beside}",
            f"threads     learner {self.learner_threads}"
            + (f", each sampler {self.sampler_threads}" if self.samplers else ""),
            f"batch       {self.groups_per_batch} groups x {self.num_generations} = {self.trajectories_per_step} "
            f"trajectories of up to {self.max_new_tokens} tokens",
            f"warm start  {f'{self.warm_start_steps} supervised steps' if self.warm_start_steps else 'none'}",
            f"steps       {self.steps}, up to {_count(self.max_tokens)} tokens in all",
            f"evaluation  {f'{self.heldout_prompts} held-out prompts' if self.heldout_prompts else 'none'}",
            f"run dir     {self.run_dir}",
            *(f"warning: {w}" for w in self.warnings),
        ]


def plan_run(config: RunConfig) -> RunPlan:
    """The plan; ConfigError when the task or the policy is not there or the two do not go together."""
    task = make_task(config.task.name, **config.task.options)
    _check_policy(config, task)
    rollout = config.rollout
    per_step = rollout.groups_per_batch * rollout.num_generations
    in_process = config.mode != "async"
    return RunPlan(
        mode=config.mode,
        task=config.task.name,
        policy=config.policy.path or str((config.policy.architecture or {})["model_type"]),
        parameters=_parameters(config, task),
        steps=config.steps,
        groups_per_batch=rollout.groups_per_batch,
        num_generations=rollout.num_generations,
        trajectories_per_step=per_step,
        max_new_tokens=rollout.max_new_tokens,
        max_tokens_per_step=per_step * rollout.max_new_tokens,
        max_tokens=per_step * rollout.max_new_tokens * config.steps,
        lag_bound=config.lag_bound,
        samplers=0 if in_process else rollout.num_samplers,
        sampler_threads=rollout.threads_per_sampler,
        learner_threads=config.learner.threads,
        warm_start_steps=config.warm_start.steps,
        heldout_prompts=config.evaluation.prompts,
        run_dir=config.run_dir,
        warnings=tuple(config_warnings(config)),
    )


def _check_policy(config: RunConfig, task: Task) -> None:
    policy = config.policy
    if policy.tokenizer == "characters" and task.alphabet is None:
        raise ConfigError(
            f'policy.tokenizer = "characters" does not go with task {task.name}, whose text is open: give a folder'
        )
    for key, place, needed in (
        ("path", policy.path, "config.json"),
        ("tokenizer", policy.tokenizer, "tokenizer_config.json"),
    ):
        if place is None or place == "characters":
            continue
        folder = Path(place)
        looks_local = place.startswith((".", "/", "~")) or place.count("/") > 1 or folder.exists()
        if looks_local and not (folder / needed).is_file():
            state = f"has no {needed}" if folder.is_dir() else "is not a folder that exists"
            raise ConfigError(f"policy.{key} {place!r} {state}: give a folder that save_pretrained wrote, or a hub id")


def _parameters(config: RunConfig, task: Task) -> int | None:
    if config.policy.path is not None:
        files = sorted(Path(config.policy.path).glob("*.safetensors"))
        return sum(map(_stored_numbers, files)) or None
    if config.policy.tokenizer != "characters" or config.policy.architecture is None:
        return None
    return decoder_parameters(config.policy.architecture, vocabulary=len(task.alphabet or "") + _SPECIAL_TOKENS)


def _stored_numbers(file: Path) -> int:
    """Numbers in a safetensors file, read from its header."""
    with file.open("rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    return sum(math.prod(t["shape"]) for name, t in header.items() if name != "__metadata__")


def decoder_parameters(architecture: Mapping[str, Any], *, vocabulary: int) -> int | None:
    """Parameters of a plain decoder with gated MLPs; None for other model types, or where a size is not given."""
    try:
        extra_norms = _PLAIN_DECODERS[architecture["model_type"]]
        d, layers, inner = (architecture[k] for k in ("hidden_size", "num_hidden_layers", "intermediate_size"))
        heads = architecture["num_attention_heads"]
        kv_heads = architecture["num_key_value_heads"]
        # qwen3's own default is 128, whatever the hidden size
        width = architecture["head_dim"] if extra_norms else architecture.get("head_dim") or d // heads
    except KeyError:
        return None
    attention = 2 * d * width * (heads + kv_heads) + extra_norms * width
    embeddings = vocabulary * d * (1 if architecture.get("tie_word_embeddings") else 2)
    return embeddings + layers * (attention + 3 * d * inner + 2 * d) + d


def _count(n: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.3g}{letter}"
    return str(n)
