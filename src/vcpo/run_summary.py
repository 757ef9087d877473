"""What a run came to, in a few numbers, from its rows. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vcpo import run_dir as files

if TYPE_CHECKING:
    from vcpo.config import RunConfig
    from vcpo.pipeline import Evaluation, RunResult

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The end of a run. None: not measured."""

    mode: str
    steps: int
    skipped_steps: int
    ended_early: str | None
    heldout_prompts: int
    reward_before: float | None
    """Mean reward on the held-out prompts, before the first step and after the last."""
    reward_after: float | None
    reward_gain: float | None
    reward_after_standard_error: float | None
    policy_lag_median: int | None
    """Over all trained trajectories, versions."""
    policy_lag_max: int | None
    max_policy_lag: int
    """The bound."""
    ess_ratio_min: float | None
    ess_ratio_max: float | None
    lr_effective_min: float | None
    lr_effective_max: float | None
    tokens: int
    wall_s: float
    tokens_per_s: float | None
    batch_wait_s: float
    bound_wait_s: float
    groups_trained: int
    groups_dropped: int
    groups_dropped_by_reason: Mapping[str, int]
    sampler_restarts: int
    run_dir: str
    policy: str
    picture: str

    def to_dict(self) -> dict[str, Any]:
        """Field name -> value."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The summary for a person; the picture's path comes last."""
        found = [f"done        {self.steps} steps in {clock_time(self.wall_s)}"]
        if self.skipped_steps:
            found.append(f"skipped     {self.skipped_steps} steps")
        if self.ended_early:
            found.append(f"ended early {self.ended_early}")
        if self.reward_before is not None and self.reward_after is not None and self.reward_gain is not None:
            found.append(
                f"reward      {self.reward_before:.3f} before, {self.reward_after:.3f} after: "
                f"{self.reward_gain:+.3f} on {self.heldout_prompts} held-out prompts"
            )
        if self.policy_lag_median is not None:
            found.append(
                f"policy lag  median {self.policy_lag_median}, largest {self.policy_lag_max} "
                f"(bound {self.max_policy_lag}), over all trained trajectories"
            )
        if self.ess_ratio_min is not None and self.lr_effective_min is not None:
            found.append(f"ess ratio   {self.ess_ratio_min:.3f} to {self.ess_ratio_max:.3f}")
            found.append(f"lr          {self.lr_effective_min:.1e} to {self.lr_effective_max:.1e} effective")
        waits = f"learner waited {self.batch_wait_s:.1f} s for groups, {self.bound_wait_s:.1f} s at the lag bound"
        speed = "" if self.tokens_per_s is None else f"{self.tokens_per_s:.0f} tokens/s"
        found.append(f"speed       {speed}{f', {waits}' if self.mode == 'async' else ''}")
        if self.groups_dropped or self.sampler_restarts:
            found.append(f"losses      {self.groups_dropped} groups dropped, {self.sampler_restarts} sampler restarts")
        return [*found, f"policy      {self.policy}", f"picture     {self.picture}"]


def summarize(
    rows: Sequence[Row],
    result: RunResult,
    evaluations: Mapping[int, Evaluation],
    *,
    config: RunConfig,
    folder: Path,
) -> RunSummary:
    """The summary of a run from its rows, the pipeline's result and the evaluations by step."""
    trained = [r for r in rows if r.get("ess_ratio") is not None]
    before, after = evaluations.get(0), evaluations.get(result.steps)
    lags = _merged(r.get("policy_lag_histogram") or {} for r in trained)
    ess, lr = _range(trained, "ess_ratio"), _range(trained, "lr_effective")
    tokens = sum(int(r.get("n_tokens") or 0) for r in trained)
    reward_before = before.reward_mean if before else None
    reward_after = after.reward_mean if after else None
    return RunSummary(
        mode=config.mode,
        steps=result.steps,
        skipped_steps=sum(bool(r.get("skipped")) for r in trained),
        ended_early=result.ended_early,
        heldout_prompts=config.evaluation.prompts,
        reward_before=reward_before,
        reward_after=reward_after,
        reward_gain=None if reward_before is None or reward_after is None else reward_after - reward_before,
        reward_after_standard_error=after.standard_error if after else None,
        policy_lag_median=_median(lags),
        policy_lag_max=max(lags, default=None),
        max_policy_lag=config.lag_bound,
        ess_ratio_min=ess[0],
        ess_ratio_max=ess[1],
        lr_effective_min=lr[0],
        lr_effective_max=lr[1],
        tokens=tokens,
        wall_s=result.wall_s,
        tokens_per_s=tokens / result.wall_s if result.wall_s > 0 else None,
        batch_wait_s=sum(r.get("batch_wait_s") or 0.0 for r in trained),
        bound_wait_s=sum(r.get("bound_wait_s") or 0.0 for r in trained),
        groups_trained=result.counts.trained,
        groups_dropped=result.counts.dropped_total,
        groups_dropped_by_reason=dict(result.counts.dropped),
        sampler_restarts=max((int(r.get("sampler_restarts") or 0) for r in trained), default=0),
        run_dir=str(folder),
        policy=str(folder / files.POLICY),
        picture=str(folder / files.PICTURE),
    )


def clock_time(seconds: float) -> str:
    """Seconds as 0:41, 12:05 or 1:02:03."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def _range(rows: Sequence[Row], key: str) -> tuple[float | None, float | None]:
    values = [float(r[key]) for r in rows if r.get(key) is not None and math.isfinite(r[key])]
    return min(values, default=None), max(values, default=None)


def _merged(histograms: Iterable[Mapping[str, int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for histogram in histograms:
        total.update({int(lag): count for lag, count in histogram.items()})
    return total


def _median(histogram: Mapping[int, int]) -> int | None:
    """The lower median of the values counted."""
    seen, half = 0, (sum(histogram.values()) + 1) // 2
    for value, count in sorted(histogram.items()):
        seen += count
        if seen >= half:
            return value
    return None
