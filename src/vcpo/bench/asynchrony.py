"""What running side by side is worth: the same recipe, taking turns and asynchronously, for equal steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vcpo.bench.stability import cell_path, run_vcpo_train
from vcpo.metrics import read_jsonl

OVERLAP_SLACK = 1.2
"""The goal: asynchronous wall time <= 1.2 x max(g, l) / (g + l) of the synchronous one."""


def bench_asynchrony(
    *, steps: int = 40, max_policy_lag: int = 4, repeats: int = 3, out: Path, report: Callable[[str], None] = print
) -> dict[str, Any]:
    """Wall seconds of the training loop (start-up left out), each mode at its best of 1 or 2 learner threads.

    g and l are the generation and learner seconds of the faster synchronous setting. Runs alternate; the pair quoted is
    the one with the median ratio.
    """
    pairs: list[dict[str, Any]] = []
    for repeat in range(repeats):
        sync = min((_run("sync", threads, steps, 0, out, repeat) for threads in (1, 2)), key=lambda r: r["wall_s"])
        side_by_side = min(
            (_run("async", threads, steps, max_policy_lag, out, repeat) for threads in (1, 2)),
            key=lambda r: r["wall_s"],
        )
        g, learn = sync["rollout_s"], sync["learner_s"]
        bound = max(g, learn) / (g + learn)
        pairs.append(
            {
                "generation_s": g,
                "learner_s": learn,
                "sync_wall_s": sync["wall_s"],
                "sync_threads": sync["threads"],
                "async_wall_s": side_by_side["wall_s"],
                "async_threads": side_by_side["threads"],
                "async_batch_wait_s": side_by_side["batch_wait_s"],
                "ratio": side_by_side["wall_s"] / sync["wall_s"],
                "overlap_bound": bound,
                "ratio_over_bound": side_by_side["wall_s"] / sync["wall_s"] / bound,
            }
        )
        report("  " + "  ".join(f"{k} {v:.2f}" for k, v in pairs[-1].items()))
    middle = sorted(pairs, key=lambda p: p["ratio_over_bound"])[len(pairs) // 2]
    return {"steps": steps, "max_policy_lag": max_policy_lag, "goal": OVERLAP_SLACK, "median": middle, "pairs": pairs}


def _run(mode: str, threads: int, steps: int, lag: int, out: Path, repeat: int) -> dict[str, Any]:
    folder = out / f"{mode}-{threads}threads-{repeat}"
    settings = [f'mode="{mode}"', f"learner.threads={threads}", f"steps={steps}", f"rollout.max_policy_lag={lag}"]
    run_vcpo_train(cell_path(), [*settings, "evaluation.prompts=0", f'run_dir="{folder}"'], threads=threads)
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if row["step"] > 0]
    total = {name: sum(row[name] for row in rows) for name in ("rollout_s", "learner_s", "batch_wait_s")}
    return {**total, "threads": threads, "wall_s": rows[-1]["wall_s"]}
