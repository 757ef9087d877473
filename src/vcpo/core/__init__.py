"""The mathematics of VCPO as pure functions: tensors and keyword numbers in, tensors out. Imports torch alone."""

from vcpo.core.advantages import advantages, group_scale, whiten, zero_variance
from vcpo.core.aggregation import aggregate, aggregation_factors, aggregations
from vcpo.core.baselines import (
    baselines,
    batch_mean,
    group_mean,
    leave_one_out,
    length_weighted,
    log_baseline_weights,
    optimal_baseline,
    second_best,
    weighted_baseline,
)
from vcpo.core.divergences import divergences, kl_k1, kl_k2, kl_k3
from vcpo.core.ess import WeightMoments, effective_sample_size, ess_ratio
from vcpo.core.logprobs import token_logprobs
from vcpo.core.losses import policy_losses
from vcpo.core.masking import check_rows, check_vector, masked_fill, masked_mean, masked_sum
from vcpo.core.rejection import batch_normalized, kept_actions
from vcpo.core.step_scaling import lr_scale
from vcpo.core.token_baseline import optimal_token_baseline
from vcpo.core.weights import (
    log_ratios,
    quarantined,
    row_is_quarantined,
    trajectory_log_weights,
    truncated_weights,
    weight_treatments,
)

__all__ = [
    "WeightMoments",
    "advantages",
    "aggregate",
    "aggregation_factors",
    "aggregations",
    "baselines",
    "batch_mean",
    "batch_normalized",
    "check_rows",
    "check_vector",
    "divergences",
    "effective_sample_size",
    "ess_ratio",
    "group_mean",
    "group_scale",
    "kept_actions",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "leave_one_out",
    "length_weighted",
    "log_baseline_weights",
    "log_ratios",
    "lr_scale",
    "masked_fill",
    "masked_mean",
    "masked_sum",
    "optimal_baseline",
    "optimal_token_baseline",
    "policy_losses",
    "quarantined",
    "row_is_quarantined",
    "second_best",
    "token_logprobs",
    "trajectory_log_weights",
    "truncated_weights",
    "weight_treatments",
    "weighted_baseline",
    "whiten",
    "zero_variance",
]
