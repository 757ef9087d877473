"""The page and the picture of a stability grid, generated from its JSON."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vcpo.bench.evidence import origin_lines

COLOURS = {"sync": "#4d4d4d", "tis": "#d55e00", "vcpo": "#0072b2", "ess": "#009e73", "opob": "#cc79a7"}
STYLES = ("-", "--", ":")
LABELS = {
    "sync": "synchronous (lag 0)",
    "tis": "sequence TIS",
    "vcpo": "VCPO (paper)",
    "ess": "ess step alone",
    "opob": "optimal baseline alone",
}


def stability_page(evidence: dict[str, Any], picture: str, notes: str = "") -> str:
    """Markdown: what happened per method over the seeds, and per run."""
    grid, runs = evidence["grid"], evidence["runs"]
    lines = [
        f"# Stability, grid `{grid['name']}`",
        "",
        f"Task running sums, replay mode, {grid['steps']} optimizer steps of 16 prompts x 8 trajectories; seeds "
        f"{', '.join(map(str, grid['seeds']))}. Reward is that of the current policy, before it is trained on.",
        "",
        *([notes.strip(), ""] if notes.strip() else []),
        "| method | lr | lag | collapsed | final reward per seed | steps to .8 | steps to .9 | last tenth |",
        "|---|---|---|---|---|---|---|---|",
        *(_method_row(method, lr, lag, part) for (method, lr, lag), part in _by_setting(runs)),
        "",
        "final: mean of the last 10 steps; collapsed: 5-step peak over .5 and final under half of it; C@n: its onset, the "
        "first step whose 5-step mean is under .7 of the peak so far; steps to a level: first 5-step mean that reaches it.",
        "",
        f"![reward, ess_ratio and gradient norm per method]({picture})",
        "",
        "## Where this comes from",
        *origin_lines(evidence),
        f"- wall time: {evidence['wall_s']:.0f} s for all runs, warm start included when it was not cached",
    ]
    return "\n".join(lines) + "\n"


def plot_stability(evidence: dict[str, Any], path: Path) -> None:
    """Reward, ess_ratio and gradient norm over steps: one thin line a seed, one thick line the mean."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rates = sorted({run["lr"] for run in evidence["runs"]})
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.4), layout="constrained")
    panels = (
        ("reward_current", "reward of the current policy"),
        ("ess_ratio", "ess_ratio"),
        ("grad_norm", "gradient norm"),
    )
    for axis, (name, title) in zip(axes, panels, strict=True):
        for (method, lr, lag), part in _by_setting(evidence["runs"]):
            colour = COLOURS.get(method, "#009e73")
            curves = [[float("nan") if v is None else v for v in run["curves"][name]] for run in part]
            for curve in curves:
                axis.plot(range(1, len(curve) + 1), curve, color=colour, alpha=0.3, linewidth=0.8)
            mean = [sum(values) / len(values) for values in zip(*curves, strict=False)]
            style = STYLES[rates.index(lr) % len(STYLES)]
            label = (
                f"{LABELS.get(method, method)}{f', lag {lag}' if lag else ''}{f', lr {lr:g}' if len(rates) > 1 else ''}"
            )
            axis.plot(range(1, len(mean) + 1), mean, color=colour, linewidth=2.2, linestyle=style, label=label)
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlabel("optimizer step")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    axes[0].set_ylim(0, 1.02)
    axes[1].set_ylim(0, 1.02)
    axes[2].set_yscale("log")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _by_setting(runs: Iterable[dict[str, Any]]) -> Iterable[tuple[tuple[str, float, int], list[dict[str, Any]]]]:
    settings: dict[tuple[str, float, int], list[dict[str, Any]]] = {}
    for run in runs:
        settings.setdefault((run["method"], run["lr"], run["lag"]), []).append(run)
    return settings.items()


def _method_row(method: str, lr: float, lag: int, runs: list[dict[str, Any]]) -> str:
    finals = " ".join(_number(r["final"]) + (f" (C@{r['onset']})" if r["collapsed"] else "") for r in runs)
    collapsed = f"{sum(r['collapsed'] for r in runs)} of {len(runs)}"
    to_80, to_90 = (" ".join("-" if r[key] is None else str(r[key]) for r in runs) for key in ("to_80", "to_90"))
    last = " ".join(_number(r["last_decile"]) for r in runs)
    return f"| {LABELS.get(method, method)} | {lr:g} | {lag} | {collapsed} | {finals} | {to_80} | {to_90} | {last} |"


def _number(value: float) -> str:
    return f"{value:.2f}".lstrip("0") if value < 1 else f"{value:.2f}"
