"""Effective sample size of an optimizer batch, from two log moments that merge exactly.

ess = (sum_i w_i)^2 / sum_i w_i^2 with w_i = exp(lw_i)   (Kish 1965; arXiv 2602.17616), only ever computed as
log ess = 2 logsumexp(lw) - logsumexp(2 lw). There is no epsilon: a constant added to all log weights changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vcpo.core.masking import check_vector
from vcpo.core.weights import quarantined

LARGEST_LOG_WEIGHT = 1e300
"""Finite log weights are held inside +-this, where their double is still a number."""


@dataclass(frozen=True)
class WeightMoments:
    """What a set of trajectories contributes to the ess; micro-batches and ranks merge these, never their ratios."""

    log_m1: Tensor
    """[] fp64: logsumexp(lw), -inf when nothing carries weight."""
    log_m2: Tensor
    """[] fp64: logsumexp(2 lw), -inf when nothing carries weight."""
    count: int
    """B: all trajectories, quarantined and empty ones too."""

    @classmethod
    @torch.no_grad()
    def from_log_weights(cls, log_weights: Tensor, valid: Tensor | None = None) -> WeightMoments:
        """Moments of log weights [n], nats. NaN and +inf, and rows where `valid` [n] is False, count but weigh nothing.

        n may be 0 (a rank without rows). ValueError when the shapes are not [n].
        """
        check_vector(log_weights=log_weights)
        weightless = quarantined(log_weights)
        if valid is not None:
            check_vector(log_weights=log_weights, valid=valid)
            weightless = weightless | ~valid.bool()
        bounded = log_weights.double().clamp(-LARGEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT)
        lw = torch.where(weightless | log_weights.isneginf(), -math.inf, bounded)
        return cls(log_m1=lw.logsumexp(0), log_m2=(2 * lw).logsumexp(0), count=len(lw))

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> WeightMoments:
        """The moments of no trajectories: the neutral element of `merge`."""
        return cls.from_log_weights(torch.empty(0, dtype=torch.float64, device=device))

    def merge(self, other: WeightMoments) -> WeightMoments:
        """The moments of both sets of trajectories together, as if computed in one piece."""
        return WeightMoments(
            log_m1=torch.logaddexp(self.log_m1, other.log_m1.to(self.log_m1.device)),
            log_m2=torch.logaddexp(self.log_m2, other.log_m2.to(self.log_m2.device)),
            count=self.count + other.count,
        )

    @property
    def ess(self) -> Tensor:
        """[] fp64: how many equally weighted trajectories these are worth, in [1, count], or 0 without any weight."""
        nothing = self.log_m1.isneginf()
        log_ess = torch.where(nothing, -math.inf, 2 * torch.where(nothing, 0.0, self.log_m1) - self.log_m2)
        # The bounds hold in exact arithmetic; rounding may step over them by an ulp.
        return torch.where(nothing, 0.0, log_ess.exp().clamp(min=1.0, max=float(max(self.count, 1))))

    @property
    def ess_ratio(self) -> Tensor:
        """[] fp64: ess / count, in [0, 1]; 0 when nothing carries weight."""
        return self.ess / max(self.count, 1)


def effective_sample_size(log_weights: Tensor) -> Tensor:
    """How many equally weighted trajectories these n are worth; log weights [n] in nats -> [] fp64 in [1, n], or 0.

    ess = (sum_i w_i)^2 / sum_i w_i^2 (Kish 1965; arXiv 2602.17616), in log space. -inf is an ordinary weight 0; NaN and
    +inf are quarantined: they carry no weight. 0 when nothing carries weight. ValueError for an empty input.
    """
    return _moments(log_weights).ess


def ess_ratio(log_weights: Tensor) -> Tensor:
    """`effective_sample_size` / B, B counting all log weights given, quarantined ones too; [n] -> [] in [0, 1]."""
    return _moments(log_weights).ess_ratio


def _moments(log_weights: Tensor) -> WeightMoments:
    check_vector(log_weights=log_weights)
    if len(log_weights) == 0:
        raise ValueError("log_weights must hold at least one trajectory, got none")
    return WeightMoments.from_log_weights(log_weights)
