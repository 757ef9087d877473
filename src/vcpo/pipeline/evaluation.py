"""Measuring the policy on prompts that it is not trained on."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from vcpo.pipeline.parts import Collect, Scorer
from vcpo.pipeline.rows import mean_reward
from vcpo.types import Prompt


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean reward over prompts, each prompt counting the same."""

    reward_mean: float | None
    """Mean over the prompts of each one's mean reward; None when nothing could be scored."""
    standard_error: float | None
    """Of that mean, over prompts: sd / sqrt(n). None for fewer than two prompts."""
    n: int
    """Prompts with at least one scorable trajectory."""
    unscorable: int
    """Trajectories without a reward, left out."""


def evaluate(collect: Collect, prompts: Sequence[Prompt], scorer: Scorer) -> Evaluation:
    """Sample and score these prompts. The seed and the number of trajectories per prompt are `collect`'s."""
    groups = [scorer.score_group(g) for g in collect(prompts, first_group_id=0)] if prompts else []
    means = [m for m in (mean_reward([g]) for g in groups) if m is not None]
    return Evaluation(
        reward_mean=statistics.fmean(means) if means else None,
        standard_error=statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None,
        n=len(means),
        unscorable=sum(t.reward is None for g in groups for t in g.trajectories),
    )
