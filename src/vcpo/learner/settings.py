"""Which settings of VarianceControl exist, and which do not go together; torch-free messages of one line."""

from __future__ import annotations

from collections.abc import Sequence

from vcpo import core
from vcpo.errors import ConfigError

BASELINES = ("optimal", "group_mean", "leave_one_out", "length_weighted")
STEP_CONTROLS = ("ess", "none")


def check_settings(
    *,
    baseline: str,
    weights: str,
    weight_treatment: str,
    step_control: str,
    rule: str,
    apply: str,
    scale_rewards: str,
    aggregation: str,
    baseline_scope: str,
    constant_length: int | None,
) -> None:
    """ConfigError naming the argument, the value and what would be right."""
    _one_of("baseline", baseline, BASELINES)
    _one_of("weights", weights, ("paper", "estimator", "reference"))
    _one_of("weight_treatment", weight_treatment, tuple(core.weight_treatments))
    _one_of("step_control", step_control, STEP_CONTROLS)
    _one_of("rule", rule, ("sqrt", "linear"))
    _one_of("apply", apply, ("lr", "gradient"))
    _one_of("scale_rewards", scale_rewards, ("group", "batch", "none"))
    _one_of("aggregation", aggregation, tuple(core.aggregations))
    _one_of("baseline_scope", baseline_scope, ("group", "batch"))
    if weights == "estimator" and not weight_treatment.startswith(("sequence", "geometric", "none")):
        raise ConfigError(
            'weights="estimator" needs one factor per trajectory: use a sequence_* or geometric_* weight_treatment'
        )
    if baseline_scope == "batch" and scale_rewards == "group":
        raise ConfigError('baseline_scope="batch" goes with scale_rewards "batch" or "none", not "group"')
    if aggregation == "seq_mean_token_sum_norm" and not constant_length:
        raise ConfigError('aggregation="seq_mean_token_sum_norm" needs constant_length (tokens)')


def _one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
