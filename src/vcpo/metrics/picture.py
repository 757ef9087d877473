"""One picture of a run: reward, effective sample size, step size, gradient norm, realised lag."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]

# Okabe and Ito's palette: tells apart for colour-blind readers and in print.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#5A5A5A"
INK = "#222222"

_STYLE: Any = {
    "font.size": 10.5,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.edgecolor": "#9A9A9A",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "legend.frameon": True,
    "legend.framealpha": 0.85,
    "legend.edgecolor": "none",
    "legend.fontsize": 9.5,
    "figure.facecolor": "white",
}


def plot_run(rows: Rows, path: str | Path, *, title: str = "", max_policy_lag: int | None = None) -> Path:
    """Draw the rows of a run's metrics as one PNG of 1200 x 900 pixels and return its path.

    Rows as `read_jsonl` gives them; missing or non-finite values leave gaps. `title` stands on top;
    `max_policy_lag` [versions] draws the bound into the lag panel.
    """
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        run_figure(rows, title=title, max_policy_lag=max_policy_lag).savefig(path, format="png")
    return Path(path)


def run_figure(rows: Rows, *, title: str = "", max_policy_lag: int | None = None) -> Figure:
    """The figure that `plot_run` writes, in matplotlib's style of the moment; no window is opened."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(12, 9), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplot_mosaic([["reward", "reward"], ["ess", "lr"], ["grad", "lag"]], height_ratios=[1.25, 1, 1])
    _reward(axes["reward"], rows)
    _ess(axes["ess"], rows)
    _step_size(axes["lr"], rows)
    _gradient(axes["grad"], rows)
    _lag(axes["lag"], rows, max_policy_lag)
    last = max((int(r["step"]) for r in rows if r.get("step") is not None), default=1)
    for name, ax in axes.items():
        ax.set_label(name)
        ax.set_xlim(0, max(last, 1) * 1.02)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    for name in ("grad", "lag"):
        axes[name].set_xlabel("optimizer step")
    if title:
        figure.suptitle(title, x=0.012, ha="left", fontsize=14, fontweight="bold")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.03, hspace=0.04)  # pyright: ignore
    return figure


def _series(rows: Rows, key: str) -> tuple[list[float], list[float]]:
    """Steps and values of one metric; a missing or non-finite value is NaN, which draws a gap."""
    points = [(float(r["step"]), r[key]) for r in rows if key in r and r.get("step") is not None]
    values = [float(v) if isinstance(v, int | float) and math.isfinite(v) else math.nan for _, v in points]
    return [x for x, _ in points], values


def _draw(ax: Axes, rows: Rows, key: str, label: str, **style: Any) -> bool:
    x, y = _series(rows, key)
    if all(math.isnan(v) for v in y):
        return False
    # A line of one point is invisible, so few points get markers.
    ax.plot(x, y, label=label, marker="o" if len(x) < 3 else None, markersize=4, **style)
    return True


def _running_mean(values: list[float], width: int = 5) -> list[float]:
    means = []
    for i in range(len(values)):
        window = [v for v in values[max(0, i - width + 1) : i + 1] if not math.isnan(v)]
        means.append(sum(window) / len(window) if window else math.nan)
    return means


def _reward(ax: Axes, rows: Rows) -> None:
    ax.set_title("Reward")
    ax.set_ylabel("mean reward")
    x, y = _series(rows, "reward_mean")
    if x:
        ax.plot(x, y, color=BLUE, alpha=0.35, linewidth=1.2, label="training batch")
        smooth, whose = (x, y), "training batch"
        if any("reward_current" in r for r in rows):  # with lag, the batch trained says what an older policy could do
            smooth, whose = _series(rows, "reward_current"), "current policy"
        ax.plot(smooth[0], _running_mean(smooth[1]), color=BLUE, linewidth=2.2, label=f"{whose}, mean of 5 steps")
    marks = [(a, b) for a, b in zip(*_series(rows, "eval_reward"), strict=True) if not math.isnan(b)]
    if marks:
        mx, my = [a for a, _ in marks], [b for _, b in marks]
        ax.plot(mx, my, color=RED, linestyle=(0, (1, 2)), linewidth=1.2)
        ax.plot(mx, my, "D", color=RED, markersize=8, clip_on=False, zorder=5, label="held-out prompts")
        _mark_text(ax, marks[0], "before")
        if len(marks) > 1:
            _mark_text(ax, marks[-1], "after")
    drawn = [v for v in [*y, *(b for _, b in marks)] if not math.isnan(v)]
    if drawn and min(drawn) >= 0 and max(drawn) <= 1:
        ax.set_ylim(0, 1.05)
    _legend(ax, "lower right")


def _mark_text(ax: Axes, mark: tuple[float, float], word: str) -> None:
    at_end = word == "after"
    ax.annotate(
        f"{word} {mark[1]:.2f}",
        mark,
        xytext=(-10, 11) if at_end else (10, -16),
        textcoords="offset points",
        ha="right" if at_end else "left",
        color=RED,
        fontweight="bold",
        zorder=6,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5},
    )


def _ess(ax: Axes, rows: Rows) -> None:
    ax.set_title("Effective sample size")
    ax.set_ylabel("ess / trajectories")
    _draw(ax, rows, "ess_ratio_truncated", "truncated weights", color=ORANGE, linestyle="--")
    _draw(ax, rows, "ess_ratio", "raw weights", color=BLUE)
    ax.set_ylim(0, 1.05)
    _legend(ax, "best")


def _step_size(ax: Axes, rows: Rows) -> None:
    ax.set_title("Step size")
    ax.set_ylabel("learning rate")
    _draw(ax, rows, "lr", "lr (schedule)", color=GREY, linestyle="--")
    _draw(ax, rows, "lr_effective", "lr effective (scaled by ess)", color=GREEN)
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
    _legend(ax, "best")


def _gradient(ax: Axes, rows: Rows) -> None:
    ax.set_title("Gradient norm (before clipping)")
    ax.set_ylabel("norm, log scale")
    norms = [v for v in _series(rows, "grad_norm")[1] if v > 0]
    _draw(ax, rows, "grad_clip", "clipping threshold", color=RED, linestyle="--", linewidth=1.3)
    _draw(ax, rows, "grad_norm", "gradient norm", color=BLUE)
    if norms:
        ax.set_yscale("log", nonpositive="mask")
        _log_ticks(ax)
    _legend(ax, "best")


def _log_ticks(ax: Axes) -> None:
    """Plain numbers on the log axis, and enough of them where the norms span less than a decade or two."""
    from matplotlib.ticker import LogLocator, NullFormatter

    ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=7))
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())


def _lag(ax: Axes, rows: Rows, bound: int | None) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_title("Realised policy lag")
    ax.set_ylabel("lag [versions]")
    _draw(ax, rows, "policy_lag_max", "largest of the batch", color=ORANGE, linewidth=4, drawstyle="steps-mid")
    _draw(ax, rows, "policy_lag_median", "median of the batch", color=BLUE, drawstyle="steps-mid")
    if bound is not None:
        ax.axhline(bound, color=RED, linestyle="--", linewidth=1.3, label=f"bound {bound}")
    top = max([v for v in _series(rows, "policy_lag_max")[1] if not math.isnan(v)] + [bound or 0, 1])
    ax.set_ylim(0, top * 1.25)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(ax, "upper right", columns=3)


def _legend(ax: Axes, where: Any, columns: int = 1) -> None:
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc=where, ncols=columns)
