"""From a config to the objects of a run: the one place that knows both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vcpo import core
from vcpo.batch import Batch, collate
from vcpo.config import RunConfig
from vcpo.forward import forward_logits
from vcpo.learner.learner import Learner
from vcpo.learner.optimizer import make_optimizer, make_schedule
from vcpo.learner.variance_control import VarianceControl
from vcpo.learner.warm_start import cached_warm_start
from vcpo.metrics import MetricSink, UpdateReport
from vcpo.pipeline import Parts, RolloutParts, RunResult, VersionStamp, run_async, run_replay, run_sync
from vcpo.pipeline.parts import PublisherPort
from vcpo.policy import Policy, load_policy
from vcpo.rollout import (
    EmbeddedEngine,
    ProcessSamplerPool,
    SamplingParams,
    collect_groups,
    encode_prompt,
    to_trajectory_group,
)
from vcpo.tasks import Scorer, Task
from vcpo.types import Prompt, TrajectoryGroup

WarmStartReport = Callable[[int, int, float | None], None]
"""(step, steps, loss); a loss of None: the whole warm start came from the cache."""
AfterStep = Callable[[int], Mapping[str, Any]]


# ---- the policy and what trains it ----


def build_policy(config: RunConfig, task: Task, report: WarmStartReport | None = None) -> Policy:
    """The policy that RL starts from: loaded or drawn, and warm-started when the config says so."""
    warm = config.warm_start
    if warm.steps == 0:
        return _load(config, task, seed=config.seed)
    trained = []

    def tell(step: int, loss: float) -> None:
        trained.append(step)
        if report is not None:
            report(step + 1, warm.steps, loss)

    folder = cached_warm_start(
        lambda: _load(config, task, seed=warm.seed),
        lambda: task.demonstrations(warm.seed, noise=warm.noise),
        key={"task": config.task.name, "options": config.task.options, "noise": warm.noise, "seed": warm.seed},
        cache_dir=warm.cache_dir,
        steps=warm.steps,
        batch_size=warm.batch_size,
        lr=warm.lr,
        lr_schedule=warm.lr_schedule,
        seed=warm.seed,
        report=tell,
    )
    if not trained and report is not None:
        report(warm.steps, warm.steps, None)
    return load_policy(path=str(folder), dtype=config.policy.dtype)


def _load(config: RunConfig, task: Task, *, seed: int) -> Policy:
    policy = config.policy
    return load_policy(
        path=policy.path,
        architecture=policy.architecture,
        tokenizer=policy.tokenizer,
        alphabet=task.alphabet if policy.tokenizer == "characters" else None,
        dtype=policy.dtype,
        seed=seed,
        initialization=policy.initialization,
    )


def build_variance_control(
    config: RunConfig, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> VarianceControl:
    """[variance_control] holds the keyword arguments of VarianceControl; only "off" has another name there."""
    options = config.variance_control.model_dump()
    if options["max_grad_norm"] == "off":
        options["max_grad_norm"] = None
    return VarianceControl(model, optimizer, **options)


def build_learner(config: RunConfig, policy: Policy) -> Learner:
    """Optimizer, schedule, variance control and loss around the policy's model."""
    settings = config.learner
    optimizer = make_optimizer(
        policy.model, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
    )
    schedule = make_schedule(
        optimizer, settings.lr_schedule, warmup_steps=settings.lr_warmup_steps, total_steps=config.steps
    )
    return Learner(
        policy.model,
        optimizer,
        build_variance_control(config, policy.model, optimizer),
        schedule=schedule,
        max_tokens_per_micro_batch=settings.max_tokens_per_micro_batch,
        loss=settings.loss,
        loss_options=settings.loss_options,
        chunk_vocabulary=settings.chunk_vocabulary,
    )


@dataclass(frozen=True)
class TrainedPolicy:
    """The learner as the pipeline sees it: its version, its update, its weights by name."""

    learner: Learner

    @property
    def policy_version(self) -> int:
        """Updates that changed the weights."""
        return self.learner.policy_version

    def update(self, batch: Batch) -> UpdateReport:
        """One optimizer step."""
        return self.learner.update(batch)

    def named_weights(self) -> Mapping[str, Tensor]:
        """Parameters by name; what the samplers load."""
        return dict(self.learner.model.named_parameters())


# ---- rollout ----


def build_scorer(config: RunConfig, task: Task) -> Scorer:
    """The task's reward function within its bounds of time and memory."""
    rollout = config.rollout
    return Scorer(
        task,
        timeout_s=rollout.reward_timeout_s,
        on_error=rollout.on_reward_error,
        memory_gb=rollout.reward_memory_gb,
        workers=rollout.reward_workers,
    )


class InProcessRollout:
    """Rollout with the learner's own model, in turns with its updates."""

    def __init__(
        self, config: RunConfig, policy: Policy, *, temperature: float, num_generations: int, seed: int
    ) -> None:
        params = _sampling_params(config, policy, temperature)
        self.engine = EmbeddedEngine(policy.model, params, pad_token_id=policy.pad_token_id)
        self._tokenizer = policy.tokenizer
        self._num_generations, self._seed = num_generations, seed
        self._max_prompt_tokens = config.rollout.max_prompt_tokens
        # As many trajectories at once as training samples: what fits there fits here.
        self._at_once = max(1, config.rollout.groups_per_batch * config.rollout.num_generations // num_generations)

    def __call__(self, prompts: Sequence[Prompt], *, first_group_id: int) -> list[TrajectoryGroup]:
        """One unscored group per prompt, numbered from `first_group_id`."""
        groups: list[TrajectoryGroup] = []
        for at in range(0, len(prompts), self._at_once):
            groups += collect_groups(
                self.engine,
                self._tokenizer,
                prompts[at : at + self._at_once],
                num_generations=self._num_generations,
                seed=self._seed,
                max_prompt_tokens=self._max_prompt_tokens,
                first_group_id=first_group_id + at,
            )
        return groups


def build_rollout(config: RunConfig, policy: Policy) -> InProcessRollout:
    """Rollout for training, in this process."""
    rollout = config.rollout
    return InProcessRollout(
        config,
        policy,
        temperature=rollout.temperature,
        num_generations=rollout.num_generations,
        seed=config.seed,
    )


def build_evaluation_rollout(config: RunConfig, policy: Policy) -> InProcessRollout:
    """One trajectory per held-out prompt, with the same random numbers at every evaluation of a run."""
    # Training seeds are not negative, so no evaluation shares its random numbers with training.
    return InProcessRollout(
        config, policy, temperature=config.evaluation.temperature, num_generations=1, seed=-1 - config.seed
    )


def build_pool(
    config: RunConfig, policy: Policy, *, model_dir: Path, weight_address: Mapping[str, Any], log_dir: Path
) -> ProcessSamplerPool:
    """Sampler processes, already starting."""
    rollout = config.rollout
    return ProcessSamplerPool(
        model_dir,
        weight_address,
        _sampling_params(config, policy, rollout.temperature),
        log_dir=log_dir,
        num_samplers=rollout.num_samplers,
        threads_per_sampler=rollout.threads_per_sampler,
        max_restarts=rollout.max_restarts,
        silence_timeout_s=rollout.silence_timeout_s,
        seed=config.seed,
    )


def build_rollout_parts(config: RunConfig, policy: Policy, pool: ProcessSamplerPool) -> RolloutParts:
    """What the rollout thread needs beside the pool: text to tokens and back."""
    return RolloutParts(
        pool=pool,
        encode=lambda prompt: encode_prompt(policy.tokenizer, prompt, config.rollout.max_prompt_tokens),
        decode=lambda prompt, result: to_trajectory_group(policy.tokenizer, prompt, result),
        num_generations=config.rollout.num_generations,
        seed=config.seed,
        short_groups=config.rollout.short_groups,
    )


def _sampling_params(config: RunConfig, policy: Policy, temperature: float) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=config.rollout.max_new_tokens, temperature=temperature, stop_token_ids=(policy.eos_token_id,)
    )


# ---- the loop ----


def build_parts(
    config: RunConfig,
    task: Task,
    policy: Policy,
    learner: Learner,
    *,
    scorer: Scorer,
    publisher: PublisherPort,
    sinks: Sequence[MetricSink] = (),
    after_step: AfterStep | None = None,
) -> Parts:
    """What every mode of the pipeline needs."""
    prompts: Iterator[Prompt] = task.train_prompts(config.seed)

    def make_batch(groups: Sequence[TrajectoryGroup], policy_version: int) -> Batch:
        batch = collate(
            groups,
            pad_token_id=policy.pad_token_id,
            policy_version=policy_version,
            temperature=config.rollout.temperature,
        )
        return batch if config.rollout.sampler_logprobs else with_own_logprobs(policy.model, batch)

    return Parts(
        prompts=prompts,
        scorer=scorer,
        learner=TrainedPolicy(learner),
        make_batch=make_batch,
        publisher=publisher,
        sinks=sinks,
        after_step=after_step,
    )


def with_own_logprobs(model: torch.nn.Module, batch: Batch) -> Batch:
    """The batch with the learner's log-probs as the sampler's: right at lag 0 alone, where the two policies are one."""
    with torch.no_grad():
        logits = forward_logits(model, batch.input_ids, batch.attention_mask)
        logprobs = core.token_logprobs(logits, batch.input_ids, temperature=batch.temperature)
    return replace(batch, sampler_logprobs=logprobs)


def run_in_process(config: RunConfig, parts: Parts, rollout: InProcessRollout) -> RunResult:
    """`sync` or `replay`."""
    size = config.rollout.groups_per_batch
    if config.mode == "sync":
        return run_sync(parts, rollout, steps=config.steps, groups_per_batch=size)
    return run_replay(
        parts, rollout, steps=config.steps, groups_per_batch=size, policy_lag=config.rollout.max_policy_lag
    )


def run_side_by_side(config: RunConfig, parts: Parts, rollout: RolloutParts) -> RunResult:
    """`async`."""
    return run_async(
        parts,
        rollout,
        steps=config.steps,
        groups_per_batch=config.rollout.groups_per_batch,
        max_policy_lag=config.rollout.max_policy_lag,
        on_bound=config.rollout.on_bound,
    )


def version_stamp(rollout: InProcessRollout) -> PublisherPort:
    """The publisher of a rollout that samples from the learner's own model."""
    return VersionStamp(rollout.engine)
