"""The page of `vcpo bench proxies`."""

from __future__ import annotations

from typing import Any

from vcpo.bench.evidence import origin_lines
from vcpo.bench.proxies_summary import noise_over_signal


def proxies_page(evidence: dict[str, Any], notes: str = "") -> str:
    """Markdown; notes are what a person has to add."""
    settings, lags = evidence["settings"], evidence["lags"]
    first = lags[0]["summary"]
    lines = [
        "# Do cheap score norms make as good a baseline?",
        "",
        f"Model {evidence['model']}; one-digit addition of reasoning-gym in chat form, reward 1 when the last number written "
        f"is the answer; {settings['prompts']} prompts x {settings['groups']} groups x {settings['members']} trajectories of "
        f"at most {settings['max_new_tokens']} tokens (mean {first['tokens']:.1f}), mean reward {first['reward']:.2f}; "
        f"{evidence['mixed_groups']} of {settings['prompts'] * settings['groups']} groups have rewards that differ. Sampled "
        f"once, with the weights as loaded; measured after VCPO updates on other prompts (AdamW, lr {settings['lr']:g}).",
        "",
        *([notes.strip(), ""] if notes.strip() else []),
        *(line for part in lags for line in _lag_lines(part, settings)),
        "## How to read it",
        "",
        "variance: trace of the covariance, over groups of one prompt, of the group gradient "
        f"sum_i min(w_i, {settings['cap']:g}) (R_i - b) g_i / N, summed over prompts, relative to the exact optimal baseline's; "
        "below 1 is better than exact. squared mean: the same of the squared norm of the mean gradient. A baseline that "
        "contains the own sample also shrinks the mean, which a learning rate could undo: what counts then is noise: "
        "variance over squared mean, again relative to exact. Intervals: 95 %, bootstrap over prompts; both moments are "
        "unbiased within a prompt.",
        "",
        "Correlations are within a prompt. Moves are over groups whose rewards differ, in units of reward (0 to 1). Inner "
        f"products come from sketches of {settings['sketch']} dimensions; their norms were at most "
        f"{max(part['summary']['sketch_error'] for part in lags):.1e} off the exact ones.",
        "",
        "## Where this comes from",
        *origin_lines(evidence),
    ]
    return "\n".join(lines) + "\n"


def _lag_lines(part: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    summary = part["summary"]
    means = summary["squared_mean_over_exact"]
    noise = noise_over_signal([prompt["moments"] for prompt in part["prompts"]])
    return [
        f"## Policy lag {part['lag']}: ess_ratio {summary['ess_ratio_of_groups']:.2f} within groups, "
        f"{summary['ess_ratio']:.2f} over all",
        "",
        f"{100 * summary['truncated']:.1f} % of the weights are above {settings['cap']:g}. Squared mean over variance of the "
        f"exact baseline: {summary['squared_mean_over_variance']:.3f}.",
        "",
        "| baseline | variance / exact | interval | squared mean / exact | interval | noise / exact | interval |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {name} | {row['ratio']:.3f} | {_range(row)} | {means[name]['ratio']:.3f} | {_range(means[name])} | "
            f"{noise[name]['ratio']:.3f} | {_range(noise[name])} |"
            for name, row in summary["variance_over_exact"].items()
        ),
        "",
        "| baseline | log norms: correlation with exact | ranks | baseline moves by (mean) | (95th percentile) |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {_or_dash(row, 'correlation_of_log_norms')} | {_or_dash(row, 'correlation_of_ranks')} | "
            f"{row['baseline_moved_mean']:.4f} | {row['baseline_moved_p95']:.4f} |"
            for name, row in summary["agreement"].items()
        ),
        "",
    ]


def _range(row: dict[str, float]) -> str:
    return f"{row['low']:.3f} - {row['high']:.3f}"


def _or_dash(row: dict[str, float], key: str) -> str:
    return f"{row[key]:.3f}" if key in row else "-"
