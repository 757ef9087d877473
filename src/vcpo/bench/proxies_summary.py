"""What the baselines that are compared would have done, from rewards, log weights, norms and inner products alone.

A row here is one prompt's trajectories as `proxies.measure` gives them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vcpo import core

CAP = 8.0
Row = dict[str, Tensor]


def baselines(row: Row) -> dict[str, Tensor]:
    """Every baseline that is compared, on one prompt's trajectories: name -> [n]."""
    r, lw, groups = row["rewards"], row["log_weights"], row["group_ids"]

    def optimal(norms: Tensor, **how: Any) -> Tensor:
        return core.optimal_baseline(r, lw, norms, groups, **how)

    return {
        "exact": optimal(row["exact"]),
        "logit": optimal(row["logit"]),
        "length": optimal(row["length"]),
        "weights alone": optimal(torch.ones_like(r)),
        "exact, for the truncated weight": optimal(row["exact"], weights="estimator", cap=CAP),
        "exact, leave one out": optimal(row["exact"], leave_one_out=True),
        "group mean": core.group_mean(r, groups),
        "group mean, leave one out": core.leave_one_out(r, groups),
        "none": torch.zeros_like(r),
    }


def moments(row: Row) -> dict[str, tuple[float, float]]:
    """Of a group's gradient under each baseline, over one prompt's groups: (trace of its covariance, squared norm of its
    mean), both unbiased, so the second may come out below 0."""
    weights = core.truncated_weights(row["log_weights"], CAP)
    groups = row["group_ids"].unique()
    own = (row["group_ids"][None, :] == groups[:, None]).double()
    k = len(groups)
    found = {}
    for name, baseline in baselines(row).items():
        c = weights * (row["rewards"] - baseline) * own / own.sum(1, keepdim=True)
        products = c @ row["products"] @ c.t()
        squares = products.diagonal().sum()
        mean_square = (products.sum() - squares) / (k * (k - 1))
        found[name] = (float(squares / k - mean_square), float(mean_square))
    return found


def summarise(rows: list[Row], draws: int = 2000) -> dict[str, Any]:
    """{"summary", "prompts"}: variances and squared means over the exact baseline's with 95 % bootstrap intervals over
    prompts, and how well norms and baselines agree; per prompt what they were made of."""
    found = [moments(row) for row in rows]
    names = list(found[0])
    table = torch.tensor([[own[name] for name in names] for own in found], dtype=torch.float64)  # [prompts, names, 2]
    picks = torch.randint(len(rows), (draws, len(rows)), generator=torch.Generator().manual_seed(0))
    ratios, drawn = _over_first(table.sum(0)), _over_first(table[picks].sum(1))
    weights = core.WeightMoments.from_log_weights(torch.cat([row["log_weights"] for row in rows]))
    of_groups = [row["log_weights"][row["group_ids"] == g] for row in rows for g in row["group_ids"].unique()]
    measured = [row["exact"].isfinite() for row in rows]
    errors = [(r["products"].diagonal().sqrt() / r["exact"] - 1)[own] for r, own in zip(rows, measured, strict=True)]
    summary = {
        "variance_over_exact": _with_intervals(names, ratios[:, 0], drawn[:, :, 0]),
        "squared_mean_over_exact": _with_intervals(names, ratios[:, 1], drawn[:, :, 1]),
        "squared_mean_over_variance": float(table[:, 0, 1].sum() / table[:, 0, 0].sum()),
        "agreement": {name: agreement(rows, name) for name in ("logit", "length", "weights alone", "group mean")},
        "ess_ratio": float(weights.ess_ratio),
        "ess_ratio_of_groups": float(torch.tensor([core.ess_ratio(lw) for lw in of_groups]).mean()),
        "truncated": float((torch.cat(of_groups).exp() > CAP).double().mean()),
        "reward": float(torch.cat([row["rewards"] for row in rows]).mean()),
        "tokens": float(torch.cat([row["lengths"] for row in rows]).double().mean()),
        "sketch_error": float(torch.cat(errors).abs().max()),
    }
    prompts = [{**_numbers(row), "moments": own} for row, own in zip(rows, found, strict=True)]
    return {"summary": summary, "prompts": prompts}


def noise_over_signal(
    moments_of: list[dict[str, tuple[float, float]]], draws: int = 2000
) -> dict[str, dict[str, float]]:
    """Variance over squared mean, relative to the exact baseline's, with 95 % intervals; from `moments` of every prompt.

    What is left of a variance once the learning rate has made up for a mean that the baseline shrank. An interval with a
    negative end says that the sign of a mean square is not known.
    """
    names = list(moments_of[0])
    table = torch.tensor([[own[name] for name in names] for own in moments_of], dtype=torch.float64)
    picks = torch.randint(len(table), (draws, len(table)), generator=torch.Generator().manual_seed(0))

    def ratios(sums: Tensor) -> Tensor:
        noise = sums[..., 0] / sums[..., 1]
        return noise / noise[..., :1]

    return _with_intervals(names, ratios(table.sum(0)), ratios(table[picks].sum(1)))


def agreement(rows: list[Row], name: str) -> dict[str, float]:
    """How log norms go with the exact ones within a prompt (correlation, and of ranks), and how far the baseline moves:
    over groups whose rewards differ, in units of reward. A baseline without norms of its own only moves."""
    moved = []
    for row in rows:
        found, mixed = baselines(row), ~core.zero_variance(row["rewards"], row["group_ids"])
        moved.append((found[name] - found["exact"]).abs()[mixed])
    every = torch.cat(moved)
    result = {"baseline_moved_mean": float(every.mean()), "baseline_moved_p95": float(every.quantile(0.95))}
    if name not in rows[0]:
        return result
    own = [row["exact"].isfinite() for row in rows]
    exact = [row["exact"][keep].log() for row, keep in zip(rows, own, strict=True)]
    proxy = [row[name][keep].log() for row, keep in zip(rows, own, strict=True)]
    return {
        "correlation_of_log_norms": _correlation(exact, proxy),
        "correlation_of_ranks": _correlation([_ranks(x) for x in exact], [_ranks(x) for x in proxy]),
        **result,
    }


def _correlation(a: list[Tensor], b: list[Tensor]) -> float:
    """Of values centred within each prompt."""
    centred = [torch.cat([x - x.mean() for x in part if len(x)]) for part in (a, b)]
    return float(torch.corrcoef(torch.stack(centred))[0, 1])


def _ranks(x: Tensor) -> Tensor:
    """0 for the smallest; equal values share their mean rank."""
    return (x[:, None] > x).double().sum(1) + (x[:, None] == x).double().sum(1) / 2


def _over_first(table: Tensor) -> Tensor:
    return table / table[..., :1, :]


def _with_intervals(names: list[str], ratios: Tensor, drawn: Tensor) -> dict[str, dict[str, float]]:
    low, high = drawn.nanquantile(0.025, dim=0), drawn.nanquantile(0.975, dim=0)
    return {n: {"ratio": float(ratios[i]), "low": float(low[i]), "high": float(high[i])} for i, n in enumerate(names)}


def _numbers(row: Row) -> dict[str, list[Any]]:
    """For JSON, which has no NaN: None where a norm was not needed."""
    kept = {k: v.tolist() for k, v in row.items() if k != "products"}
    return {k: [None if x != x else x for x in v] for k, v in kept.items()}
