"""What a reward curve came to: peak, collapse and its onset, steps to a level, the last tenth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WINDOW = 5


def describe(rewards: Sequence[float]) -> dict[str, Any]:
    """Figures of one run from the current policy's reward at each step (at least one).

    peak: largest mean over 5 steps; final: mean of the last 10; collapsed: peak > .5 and final < half the peak; onset:
    first step whose 5-step mean is under .7 of the peak so far (when collapsed); to_80, to_90: first step whose 5-step mean
    reaches .8, .9; last_decile: mean of the last tenth of the run; dip: lowest 5-step mean after to_90.
    """
    means = [_mean(rewards[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(rewards))]
    settled = means[WINDOW - 1 :] or means
    peak, final = max(settled), _mean(rewards[-10:])
    collapsed = peak > 0.5 and final < peak / 2
    to_90 = _first_at_least(means, 0.9)
    after = means[to_90 - 1 :] if to_90 is not None else []
    return {
        "first": round(rewards[0], 4),
        "peak": round(peak, 4),
        "final": round(final, 4),
        "last_decile": round(_mean(rewards[-max(1, len(rewards) // 10) :]), 4),
        "collapsed": collapsed,
        "onset": _onset(means) if collapsed else None,
        "to_80": _first_at_least(means, 0.8),
        "to_90": to_90,
        "dip": round(min(after), 4) if after else None,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _first_at_least(means: Sequence[float], level: float) -> int | None:
    """Step, from 1, never before a full window."""
    return next((i + 1 for i, m in enumerate(means) if i + 1 >= WINDOW and m >= level), None)


def _onset(means: Sequence[float]) -> int | None:
    peak = 0.0
    for i, m in enumerate(means):
        if i + 1 < WINDOW:
            continue
        peak = max(peak, m)
        if peak > 0.5 and m < 0.7 * peak:
            return i + 1
    return None
