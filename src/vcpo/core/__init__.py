"""The mathematics of VCPO as pure functions: tensors and keyword numbers in, tensors out. Imports torch alone."""

from vcpo.core.masking import check_rows, check_vector, masked_fill, masked_mean, masked_sum
from vcpo.core.weights import (
    log_ratios,
    quarantined,
    row_is_quarantined,
    trajectory_log_weights,
    truncated_weights,
    weight_treatments,
)

__all__ = [
    "check_rows",
    "check_vector",
    "log_ratios",
    "masked_fill",
    "masked_mean",
    "masked_sum",
    "quarantined",
    "row_is_quarantined",
    "trajectory_log_weights",
    "truncated_weights",
    "weight_treatments",
]
