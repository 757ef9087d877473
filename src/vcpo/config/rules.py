"""Which settings must go together, and which are allowed and probably not meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vcpo.config.sections import RunConfig


def broken_rules(config: RunConfig) -> Iterator[str]:
    """One line for each pair of settings that do not go together, and for settings that are not available yet."""
    yield from _policy_rules(config)
    yield from _rollout_rules(config)
    yield from _variance_control_rules(config)
    yield from _loss_rules(config)


def _policy_rules(config: RunConfig) -> Iterator[str]:
    policy = config.policy
    if (policy.path is None) == (policy.architecture is None):
        state = "neither is" if policy.path is None else "both are"
        yield f"[policy] needs exactly one of path and architecture, {state} set"
    if policy.architecture is None:
        return
    if not isinstance(policy.architecture.get("model_type"), str):
        yield '[policy.architecture] needs model_type, for example model_type = "llama"'
    if policy.tokenizer is None:
        yield 'policy.tokenizer is missing: a fresh architecture has none of its own; "characters" serves'


def _rollout_rules(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if config.lag_bound > 0 and not rollout.sampler_logprobs:
        yield (
            f"rollout.sampler_logprobs = false with max_policy_lag = {config.lag_bound}: old trajectories cannot be "
            "weighted without the log-probs recorded at sampling time; set it to true, or the lag to 0"
        )
    if rollout.partial_rollouts:
        yield "rollout.partial_rollouts = true is not available yet: a group given up at the bound is dropped and counted"
    if rollout.num_generations < 2 and config.variance_control.baseline_scope == "group":
        yield (
            f"rollout.num_generations = {rollout.num_generations}: the baseline of a group compares its trajectories, "
            "so it must be 2 or more"
        )


def _variance_control_rules(config: RunConfig) -> Iterator[str]:
    vc = config.variance_control
    if vc.score_norms == "logit" and config.learner.chunk_vocabulary:
        yield 'learner.chunk_vocabulary = true does not go with variance_control.score_norms = "logit": use "exact"'
    if vc.step_control == "closed_loop":
        yield 'variance_control.step_control = "closed_loop" is not available yet: use "ess"'
    if vc.reference == "auto" and vc.step_control != "ess":
        yield 'variance_control.reference = "auto" needs step_control = "ess": nothing else looks at the reference'
    if vc.weights == "estimator" and vc.weight_treatment.startswith("token"):
        yield (
            'variance_control.weights = "estimator" needs one factor per trajectory: use a sequence_* or geometric_* '
            "weight_treatment"
        )
    if vc.baseline_scope == "batch" and vc.scale_rewards == "group":
        yield 'variance_control.baseline_scope = "batch" goes with scale_rewards = "batch" or "none", not "group"'
    if vc.aggregation == "seq_mean_token_sum_norm" and vc.constant_length is None:
        yield 'variance_control.aggregation = "seq_mean_token_sum_norm" needs constant_length (tokens)'


def _loss_rules(config: RunConfig) -> Iterator[str]:
    options = config.learner.loss_options
    for name in ("weight_treatment", "cap", "aggregation"):
        if name in options:
            yield f"learner.loss_options.{name}: set variance_control.{name} instead"
    if options and config.learner.loss == "reinforce":
        yield 'learner.loss_options: the loss "reinforce" takes none; its weights are set in [variance_control]'


def config_warnings(config: RunConfig) -> list[str]:
    """One line for each setting that is allowed and probably not meant."""
    found = []
    if config.learner.lr == 0:
        found.append("learner.lr is 0: the policy will not change")
    elif config.learner.lr_warmup_steps >= config.steps:
        found.append(
            f"learner.lr_warmup_steps is {config.learner.lr_warmup_steps}, so {config.steps} steps never reach lr"
        )
    if config.mode == "replay" and config.steps <= config.rollout.max_policy_lag:
        found.append(f"all {config.steps} batches are sampled by the first policy: steps is not above max_policy_lag")
    if config.mode == "async" and config.rollout.max_policy_lag == 0:
        found.append('max_policy_lag = 0 makes samplers and learner take turns, as mode = "sync" does in one process')
    return found
