"""The page of `vcpo bench score-norms`: every figure beside its goal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vcpo.bench.evidence import origin_lines


def score_norms_page(evidence: dict[str, Any], notes: str = "") -> str:
    """Markdown; notes are what a person has to add."""
    lines = [
        "# What exact score norms cost",
        "",
        "One step of VarianceControl (forward, norms, baseline, gradient, clipping, AdamW) over the plain REINFORCE step of "
        "the same model and batch: processor time of one thread, plain and method back to back, median of the pairs and "
        "their range; peak bytes of the allocator within one step. fp32, 16 trajectories in 2 groups, an eighth of the "
        "tokens prompt; d = 256, 4 layers, V = 2048 unless the cell says otherwise.",
        "",
        "| cell | method | time / plain (range) | goal | met | peak bytes / plain | goal | met | norms: error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in evidence["cells"]:
        for row in cell["rows"]:
            lines.append(_line(cell, row))
    lines += ["", *_loop_line(evidence), *_error_lines(evidence), ""]
    if evidence["cuda"] is None:
        lines += [
            "No GPU was at hand: nothing here was measured on one, and the switch between keeping and writing out "
            "(`score_norms.parts.KAPPA`) is a CPU core's.",
            "",
        ]
    lines += [*([notes.strip(), ""] if notes.strip() else []), "## Where this comes from", *origin_lines(evidence)]
    return "\n".join(lines) + "\n"


def _line(cell: dict[str, Any], row: dict[str, Any]) -> str:
    goal, memory = time_goal(cell["cell"], row["method"]), memory_goal(cell, row["method"])
    found = row["memory_ratio"]
    error = "-" if row["norm_error"] is None else f"{row['norm_error']:.0e}"
    return (
        f"| {cell['cell']['name']} | {row['method']} | {row['time_ratio']:.3f} ({row['time_ratio_min']:.2f} - "
        f"{row['time_ratio_max']:.2f}) | {_limit(goal)} | {_met(row['time_ratio'], goal)} | {found:.3f} | "
        f"{_limit(memory)} | {_met(found, memory)} | {error} |"
    )


def time_goal(cell: dict[str, Any], method: str) -> float | None:
    """The goal for a method's time over the plain step, where there is one."""
    if method == "logit":
        return 1.02
    special = cell["lora_rank"] or cell["checkpointing"] or cell["micro_batch"]
    if special or not method.startswith("exact"):
        return None
    if method == "exact chunked":
        return 1.35
    if cell["vocabulary"] > 16384:
        return 1.18
    return 1.12 if cell["tokens"] >= 256 else 1.20 if cell["tokens"] >= 128 else 1.27


def memory_goal(cell: dict[str, Any], method: str) -> float | None:
    """Peak bytes over plain: 3 %, or with checkpointing one gradient-sized buffer per open group (two here)."""
    if method != "exact" or cell["cell"]["micro_batch"]:
        return None
    if cell["cell"]["checkpointing"]:
        return 1 + 2 * cell["gradient_bytes"] / cell["plain_peak_bytes"]
    return 1.03


def _limit(goal: float | None) -> str:
    return "-" if goal is None else f"<= {goal:.2f}"


def _met(found: float, goal: float | None) -> str:
    return "-" if goal is None else "yes" if found <= goal else "**no**"


def _loop_line(evidence: dict[str, Any]) -> Iterator[str]:
    for cell in evidence["cells"]:
        times = {row["method"]: row["time_ratio"] for row in cell["rows"]}
        if cell["cell"]["name"] == "T=64" and {"one by one", "exact"} <= times.keys():
            ratio = times["one by one"] / times["exact"]
            yield (
                f"Exact is {ratio:.2f} times as fast as one backward per trajectory at T = 64, B = "
                f"{cell['cell']['batch_size']} (goal: 1.5 times, {'met' if ratio >= 1.5 else '**missed**'})."
            )
            yield ""


def _error_lines(evidence: dict[str, Any]) -> Iterator[str]:
    yield "Largest error over all parameters against plain autograd (small model, self-check; norms and assembled gradient):"
    yield ""
    yield "| dtype | method | relative error | where |"
    yield "|---|---|---|---|"
    for row in evidence["errors"]:
        yield f"| {row['dtype']} | {row['method']} | {row['relative_error']:.1e} | {row['what']} of `{row['parameter']}` |"
