"""The page of `vcpo bench proxies`."""

from __future__ import annotations

from typing import Any

from vcpo.bench.evidence import origin_lines


def proxies_page(evidence: dict[str, Any], notes: str = "") -> str:
    """Markdown; notes are what a person has to add."""
    summary, settings = evidence["summary"], evidence["settings"]
    per_prompt = summary["ess_ratio_of_groups"]
    updates = evidence["updates"]
    lines = [
        "# Do cheap score norms make as good a baseline?",
        "",
        f"Model {evidence['model']}; one-digit addition of reasoning-gym in chat form; {settings['prompts']} prompts x "
        f"{settings['groups']} groups x {settings['members']} trajectories of at most {settings['max_new_tokens']} tokens "
        f"(mean {summary['tokens']:.1f}), mean reward {summary['reward']:.2f}. Sampled with the weights as loaded, measured "
        f"{settings['lag']} VCPO updates on other prompts later (AdamW, lr {settings['lr']:g}; their own ess_ratio "
        f"{min(u['ess_ratio'] for u in updates):.2f} to {max(u['ess_ratio'] for u in updates):.2f}): ess_ratio "
        f"{summary['ess_ratio']:.2f} over all, {min(per_prompt):.2f} to {max(per_prompt):.2f} per prompt."
        if updates
        else f"Model {evidence['model']}, lag 0.",
        "",
        "Variance (trace of the covariance over groups of one prompt, summed over prompts) of the group gradient "
        f"sum_i min(w_i, {settings['cap']:g}) (R_i - b) g_i / N, relative to the exact optimal baseline's; 95 % bootstrap "
        "intervals over prompts. Below 1 is better than exact.",
        "",
        "| baseline | variance / exact | interval |",
        "|---|---|---|",
        *(
            f"| {name} | {row['ratio']:.3f} | {row['low']:.3f} - {row['high']:.3f} |"
            for name, row in summary["variance_over_exact"].items()
        ),
        "",
        "| proxy | correlation of log norms with the exact ones | baseline moves by (mean) | (95th percentile) |",
        "|---|---|---|---|",
        *(
            f"| {name} | {row['correlation_of_log_norms']:.3f} | {row['baseline_moved_mean']:.4f} | "
            f"{row['baseline_moved_p95']:.4f} |"
            for name, row in summary["agreement"].items()
        ),
        "",
        "Moves are over trajectories of groups whose rewards differ, in units of reward (0 to 1).",
        f"Inner products of gradients come from sketches of {settings['sketch']} dimensions; their norms were at most "
        f"{summary['sketch_error']:.1e} off the exact ones.",
        "",
        *([notes.strip(), ""] if notes.strip() else []),
        "## Where this comes from",
        *origin_lines(evidence),
    ]
    return "\n".join(lines) + "\n"
