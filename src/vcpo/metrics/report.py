"""UpdateReport: what one optimizer step did, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """One optimizer step in numbers; `vcpo.metrics.METRICS` says the unit and the meaning of each.

    Plain Python numbers, so a report outlives the tensors it came from. None means "not measured in this step", never
    zero. A skipped step says why in `skipped`; its `lr_scale` and `lr_effective` are 0 and its version did not rise.
    """

    policy_version: int
    """Version of the weights after the step (unchanged when it was skipped)."""
    step: int
    skipped: str | None = None

    loss: float | None = None
    reward_mean: float | None = None
    reward_std: float | None = None
    advantage_abs_mean: float | None = None

    n_trajectories: int
    n_groups: int
    n_tokens: int
    quarantined: int = 0
    unscorable: int = 0
    empty: int = 0
    zero_variance_groups: int = 0

    ess: float
    ess_ratio: float
    ess_ratio_truncated: float | None = None
    ess_ratio_informative: float | None = None
    ess_ratio_token: float | None = None

    log_weight_mean: float | None = None
    log_weight_std: float | None = None
    log_weight_max: float | None = None
    log_ratio_abs_mean: float | None = None
    weight_mean: float | None = None
    truncated_share: float | None = None
    kl_k1: float | None = None
    kl_k3: float | None = None

    score_norm_mean: float | None = None
    score_norm_max: float | None = None
    score_bias: float | None = None

    lr_scale: float
    lr: float
    lr_effective: float
    grad_norm: float | None = None
    grad_clip: float | None = None
    grad_clipped: int = 0
    reference: float | None = None
    learner_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Field name -> value, in the order above."""
        return {f.name: getattr(self, f.name) for f in fields(self)}
