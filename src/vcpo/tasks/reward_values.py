"""What a reward function may give back, and how it may fail: the same words whether it ran on a thread or in a worker."""

from __future__ import annotations

import math
import traceback
from numbers import Real
from typing import Any

_LARGEST = 3.4e38  # rewards travel as fp32: anything beyond it would arrive as inf


class RewardFailure(Exception):
    """One call failed. kind: "raised", "timeout", "wrong_length", "wrong_type" or "died"; the text completes a sentence."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


def checked_rewards(returned: Any, count: int) -> list[float | None]:
    """`count` numbers, None where one is None, NaN or beyond fp32; RewardFailure for anything else."""
    if hasattr(returned, "tolist") and not isinstance(returned, list | tuple):  # arrays and tensors
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        raise RewardFailure(
            "wrong_type", f"returned {_show(returned)}, not a list with one number or None per completion"
        )
    if len(returned) != count:
        raise RewardFailure("wrong_length", f"returned {len(returned)} rewards for {count} completions")
    return [_reward(value, i) for i, value in enumerate(returned)]


def raised(exc: BaseException) -> RewardFailure:
    """The failure of a function that raised `exc`: its type, text and place in one line."""
    frames = traceback.extract_tb(exc.__traceback__)
    at = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return RewardFailure("raised", f"raised {type(exc).__name__}: {' '.join(str(exc).split())[:200]}{at}")


def too_slow(timeout_s: float) -> RewardFailure:
    """The failure of a call that did not end in time."""
    return RewardFailure(
        "timeout", f"did not return within its time limit of {timeout_s:g} s: make it faster or raise the limit"
    )


def _reward(value: Any, index: int) -> float | None:
    if hasattr(value, "item") and not isinstance(value, Real):  # 0-d arrays and tensors
        value = value.item() if getattr(value, "ndim", 0) == 0 else value
    if value is None:
        return None
    if not isinstance(value, Real):
        raise RewardFailure("wrong_type", f"returned {_show(value)} as reward {index}, not a number or None")
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and abs(number) <= _LARGEST else None


def _show(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())[:60]
    except Exception:  # a repr may raise whatever it likes
        text = "that cannot be shown"
    return f"{type(value).__name__} {text}"
