"""Every option of a run: frozen, checked, with its unit beside it. One TOML file is one run. No torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from vcpo.config.rules import broken_rules

Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Probability = Annotated[float, Ge(0), Le(1)]
Beta = Annotated[float, Ge(0), Lt(1)]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class PolicyConfig(Section):
    """The model to train: a Hugging Face folder or hub id, or a fresh one from an architecture."""

    path: str | None = None
    """Folder or hub id of a causal language model. Exactly one of `path` and `architecture`."""
    architecture: dict[str, Any] | None = None
    """Keyword arguments of the model's transformers config, `model_type` among them; weights are random."""
    tokenizer: str | None = None
    """`characters` (one token a character of the task's alphabet), or a folder or hub id; unset: the one of `path`."""
    initialization: Literal["transformers", "torch"] = "transformers"
    """Fresh weights of an `architecture`: one std for all (transformers), or embeddings N(0, 1) and linear layers by their
    fan-in (torch), which keeps optimizer steps small beside the weights in narrow models."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and forward passes."""


class TaskConfig(Section):
    """Where prompts and rewards come from; `vcpo tasks` lists the names."""

    name: str
    """A name that `vcpo tasks` lists."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of that task."""


class WarmStartConfig(Section):
    """Supervised training on the task's demonstrations before RL; cached by its settings."""

    steps: CountOrZero = 0
    """Supervised optimizer steps; 0: no warm start."""
    batch_size: Count = 64
    """Demonstrations per step."""
    lr: Positive = 3e-3
    """Peak learning rate."""
    lr_schedule: Literal["cosine", "constant"] = "cosine"
    """After a short warm-up: down to 0, or constant. A constant rate ends in a flatter place, where RL moves less abruptly."""
    noise: Probability = 0.0
    """Chance that a part of a demonstration is replaced at random: how much is left for RL to learn."""
    seed: CountOrZero = 0
    """Seed of demonstrations and fresh weights; not the run's, so that runs of several seeds share one warm start."""
    cache_dir: str = ".vcpo-cache"
    """Folder in which finished warm starts are kept."""


class RolloutConfig(Section):
    """How trajectories are sampled and how far the samplers may fall behind the learner."""

    groups_per_batch: Count = 16
    """Groups (prompts) in one optimizer batch."""
    num_generations: Count = 8
    """Trajectories per group."""
    max_new_tokens: Count = 48
    """Longest trajectory, tokens; a longer one is cut."""
    max_prompt_tokens: Count = 512
    """Longest prompt, tokens; a longer one is refused."""
    temperature: Positive = 1.0
    """Sampling temperature; the learner's log-probs are taken at the same one."""
    max_policy_lag: CountOrZero = 4
    """Bound k on the policy lag of every trained token, versions. Exact in `replay`; not used in `sync`."""
    on_bound: Literal["wait", "drop"] = "wait"
    """At the bound: the learner waits for slow groups, or the oldest are aborted and counted. `async` only."""
    num_samplers: Count = 1
    """Sampler processes. `async` only."""
    threads_per_sampler: Count = 1
    """CPU threads of each sampler process."""
    weight_sync: Literal["shared_memory", "safetensors"] = "shared_memory"
    """How new weights reach the samplers: a memory-mapped file, or files that are renamed into place."""
    max_restarts: CountOrZero = 2
    """How often a dead or silent sampler is started again, over the whole run, before the run ends with an error."""
    silence_timeout_s: Positive = 60.0
    """Seconds without a word after which a sampler counts as dead."""
    short_groups: Literal["train", "refill"] = "train"
    """A group that lost a trajectory: trained with what is left, or sampled again."""
    partial_rollouts: bool = False
    """Whether a group given up at the bound keeps its tokens and goes on later. Not available yet."""
    reward_timeout_s: Positive = 30.0
    """Seconds that the reward function may take for one group."""
    reward_memory_gb: Positive = 8.0
    """Address space of a process that runs the reward function, GiB."""
    reward_workers: Count = 1
    """Processes that run the reward function, at most."""
    on_reward_error: Literal["stop", "unscorable"] = "stop"
    """A reward function that raises or hangs: end the run, or count the group as unscorable and go on."""
    sampler_logprobs: bool = True
    """Use the log-probs that samplers recorded; false: the learner's own in their place, which is right at lag 0 only."""


class LearnerConfig(Section):
    """The optimizer (AdamW), its schedule and its loss."""

    lr: NotNegative = 2e-3
    """Base learning rate after warm-up, before any scaling by the effective sample size."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; `linear` and `cosine` end at 0 after `steps`."""
    lr_warmup_steps: CountOrZero = 5
    """Steps over which the learning rate rises linearly."""
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), strict=False)
    """AdamW's decay rates of the first and second moment."""
    eps: Positive = 1e-8
    """AdamW's epsilon."""
    weight_decay: NotNegative = 0.0
    """AdamW's decoupled weight decay, per unit of learning rate."""
    max_tokens_per_micro_batch: Count = 8192
    """Largest micro-batch, tokens with padding; smaller needs less memory and gives the same step."""
    chunk_vocabulary: bool = False
    """Never hold a micro-batch's logits whole: less memory where the vocabulary is large, more time; not with `logit` norms."""
    threads: Count = 1
    """CPU threads of the learner."""
    loss: Literal["reinforce", "ppo_clip"] = "reinforce"
    """The policy loss: truncated importance-weighted REINFORCE (the paper's), or PPO's clipped ratio as in GRPO."""
    loss_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the loss; those of `reinforce` stand in [variance_control]."""


class VarianceControlConfig(Section):
    """The step size and the baseline (arXiv 2602.17616); defaults are the paper's."""

    score_norms: Literal["auto", "loop", "two_pass", "exact", "logit", "length"] = "auto"
    """How the size of grad log pi of a trajectory is measured or estimated, for `baseline = "optimal"`."""
    baseline: Literal["optimal", "group_mean", "leave_one_out", "length_weighted"] = "optimal"
    """What is subtracted from the rewards of a group."""
    weights: Literal["paper", "estimator", "reference"] = "paper"
    """Which importance weights enter the optimal baseline."""
    weight_treatment: Literal[
        "none",
        "sequence_truncate",
        "token_truncate",
        "geometric_truncate",
        "sequence_mask",
        "token_mask",
        "geometric_mask",
    ] = "sequence_truncate"
    """What is done to large importance weights in the loss."""
    cap: Positive = 8.0
    """Largest importance weight in the loss."""
    step_control: Literal["ess", "none", "closed_loop"] = "ess"
    """What scales the step: the effective sample size, or nothing."""
    reference: Annotated[float, Gt(0), Le(1)] | Literal["auto"] = 1.0
    """The ess_ratio at which a full step is taken; `auto`: measured on trajectories of lag 0."""
    rule: Literal["sqrt", "linear"] = "sqrt"
    """Power of ess_ratio / reference: `sqrt` for Adam-type optimizers, `linear` for SGD-type."""
    apply: Literal["lr", "gradient"] = "lr"
    """What is scaled: the learning rate of the step, or the clipped gradient before the moments."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Which standard deviation the advantages are divided by."""
    std_eps: NotNegative = 0.0
    """Added to that standard deviation."""
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"] = (
        "seq_mean_token_mean"
    )
    """How token losses become one number."""
    constant_length: Count | None = None
    """Divisor of the aggregation `seq_mean_token_sum_norm`, tokens."""
    baseline_scope: Literal["group", "batch"] = "group"
    """One baseline per group, or one for the whole batch."""
    max_grad_norm: Positive | Literal["running_median", "off"] = 1.0
    """Gradient clipping threshold; `running_median`: 1.5 times the median of recent norms; `off`: none."""


class EvaluationConfig(Section):
    """Measuring the policy on held-out prompts, one trajectory each."""

    prompts: CountOrZero = 256
    """Held-out prompts, always the same; 0: no evaluation."""
    every: CountOrZero = 0
    """Optimizer steps between evaluations; 0: only before and after."""
    temperature: Positive = 1.0
    """Sampling temperature of the evaluation."""


class RunConfig(Section):
    """One run. `broken_rules` below lists what must go together."""

    seed: CountOrZero = 0
    """Seed of prompts and sampling, and of fresh weights where there is no warm start."""
    run_dir: str = "runs/run"
    """Folder of the run's files; a recipe that sets none gets runs/NAME after its file name."""
    mode: Literal["async", "sync", "replay"] = "async"
    """`async`: samplers and learner side by side. `sync`: in turns, lag 0. `replay`: one process, exactly lag k."""
    steps: Count = 60
    """Optimizer steps."""
    policy: PolicyConfig
    task: TaskConfig
    warm_start: WarmStartConfig = WarmStartConfig()
    rollout: RolloutConfig = RolloutConfig()
    learner: LearnerConfig = LearnerConfig()
    variance_control: VarianceControlConfig = VarianceControlConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def lag_bound(self) -> int:
        """The lag that can really occur, versions: 0 in `sync` mode whatever `max_policy_lag` says."""
        return 0 if self.mode == "sync" else self.rollout.max_policy_lag

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        for broken in broken_rules(self):
            raise ValueError(broken)
        return self
