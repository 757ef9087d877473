"""From the effective sample size to the size of the step."""

from __future__ import annotations

from torch import Tensor

EXPONENTS = {"sqrt": 0.5, "linear": 1.0}
"""rule -> p: "sqrt" for Adam-type optimizers, "linear" for SGD-type ones."""


def lr_scale(ess_ratio: float | Tensor, *, reference: float = 1.0, rule: str = "sqrt") -> float:
    """What the learning rate is multiplied by for this step, in [0, 1]; never above 1.

    lr_scale = min(1, ess_ratio / reference)^p, p = 1/2 for "sqrt", 1 for "linear" (arXiv 2602.17616). `reference` is
    the ess_ratio at which the full step is taken, in (0, 1]. ValueError for an ess_ratio that is not a number in
    [0, 1], so that a bad number can never become a full step.
    """
    if rule not in EXPONENTS:
        raise ValueError(f"rule must be one of {', '.join(EXPONENTS)}, got {rule!r}")
    if not 0 < reference <= 1:
        raise ValueError(f"reference must be in (0, 1], got {reference}")
    ratio = float(ess_ratio)
    if not 0 <= ratio <= 1 + 1e-6:
        raise ValueError(f"ess_ratio must be in [0, 1], got {ratio}")
    return min(1.0, ratio / reference) ** EXPONENTS[rule]
