"""Columns of a metrics row that follow from the groups of a batch alone. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from vcpo.types import TrajectoryGroup


def lag_columns(groups: Sequence[TrajectoryGroup], policy_version: int) -> dict[str, Any]:
    """The realised policy lag of every trajectory that a learner at `policy_version` trains now, in versions.

    Counted from the oldest action token, and split at the version its group completed with: in flight + in queue. A
    trajectory without actions has no lag. Histograms map a lag (as text, for JSON) to trajectories.
    """
    born = [(t.oldest_version, g.completed_version) for g in groups for t in g.trajectories]
    spans = [(oldest, completed) for oldest, completed in born if oldest is not None]
    lags = [policy_version - oldest for oldest, _ in spans]
    in_flight = [completed - oldest for oldest, completed in spans]
    in_queue = [policy_version - completed for _, completed in spans]
    return {
        "policy_lag_median": statistics.median(lags) if lags else None,
        "policy_lag_max": max(lags, default=None),
        "policy_lag_histogram": _histogram(lags),
        "policy_lag_in_flight_mean": statistics.fmean(in_flight) if lags else None,
        "policy_lag_in_flight_histogram": _histogram(in_flight),
        "policy_lag_in_queue_mean": statistics.fmean(in_queue) if lags else None,
        "policy_lag_in_queue_histogram": _histogram(in_queue),
    }


def batch_columns(groups: Sequence[TrajectoryGroup]) -> dict[str, Any]:
    """Mean reward over the scorable trajectories and mean completion length in action tokens."""
    lengths = [sum(t.actions) for g in groups for t in g.trajectories]
    return {
        "reward_mean": mean_reward(groups),
        "completion_length_mean": statistics.fmean(lengths) if lengths else None,
    }


def mean_reward(groups: Sequence[TrajectoryGroup]) -> float | None:
    """Mean over the trajectories that have a finite reward; None when none has."""
    rewards = [t.reward for g in groups for t in g.trajectories if t.reward is not None and math.isfinite(t.reward)]
    return statistics.fmean(rewards) if rewards else None


def _histogram(values: Sequence[int]) -> dict[str, int]:
    return {str(value): count for value, count in sorted(Counter(values).items())}
