"""What ess_ratio counts as "on-policy": a number, or calibrated from trajectories of the learner's own version."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

DECAY = 0.9
FLOOR, CEILING = 0.5, 1.0
MISMATCH_BELOW = 0.7


@dataclass
class _Pool:
    log_m1: float = -math.inf
    log_m2: float = -math.inf
    count: float = 0.0
    seen: int = 0


class Reference:
    """The denominator of lr_scale = min(1, ess_ratio / reference)^p (method.md, "The effective sample size and the step").

    `"auto"` pools the weight moments of trajectories whose every token the learner's own version sampled: two kernels
    that compute the same policy differently spread the weights even at lag 0, and that spread is not staleness. The pool
    forgets by 0.9 a step, the ratio is kept in [0.5, 1], and it is 1 until a whole batch of such trajectories was seen.
    """

    def __init__(self, rule: float | str) -> None:
        number = isinstance(rule, (int, float)) and not isinstance(rule, bool)
        if not (rule == "auto" or (number and 0.0 < float(rule) <= 1.0)):
            raise ValueError(f'reference must be a number in (0, 1] or "auto", got {rule!r}')
        self._rule = rule
        self._pool = _Pool()
        self._batch_size = 0
        self._warned = False

    @property
    def needs_lags(self) -> bool:
        """Whether `observe` has to be fed."""
        return self._rule == "auto"

    def observe(self, log_m1: float, log_m2: float, count: int, batch_size: int) -> None:
        """Take in the moments (log sum w, log sum w^2, number) of this step's lag-0 trajectories, out of `batch_size`."""
        if not self.needs_lags or count == 0:
            return
        pool = self._pool
        self._batch_size = batch_size
        keep = math.log(DECAY)
        pool.log_m1 = _logaddexp(pool.log_m1 + keep, log_m1)
        pool.log_m2 = _logaddexp(pool.log_m2 + keep, log_m2)
        pool.count = pool.count * DECAY + count
        pool.seen += count
        if self.value < MISMATCH_BELOW and not self._warned:
            self._warned = True
            warnings.warn(
                f"ess_ratio of trajectories at lag 0 is {self.value:.2f}: sampler and learner compute different "
                "log-probs for the same weights; check temperature, top-p, dtype and weight sync",
                stacklevel=3,
            )

    @property
    def value(self) -> float:
        """The reference now, in (0, 1]."""
        if not isinstance(self._rule, str):
            return float(self._rule)
        pool = self._pool
        if pool.seen == 0 or pool.seen < self._batch_size or not math.isfinite(pool.log_m2):
            return CEILING
        ratio = math.exp(2 * pool.log_m1 - pool.log_m2) / pool.count
        return min(CEILING, max(FLOOR, ratio))

    def state_dict(self) -> dict[str, Any]:
        pool = self._pool
        return {
            "log_m1": pool.log_m1,
            "log_m2": pool.log_m2,
            "count": pool.count,
            "seen": pool.seen,
            "batch_size": self._batch_size,
            "warned": self._warned,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batch_size = state["batch_size"]
        self._warned = state["warned"]
        self._pool = _Pool(state["log_m1"], state["log_m2"], state["count"], state["seen"])


def _logaddexp(a: float, b: float) -> float:
    high, low = max(a, b), min(a, b)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))
