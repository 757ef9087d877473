"""All speed figures of this machine in one go, and the page made of them."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vcpo.bench.asynchrony import bench_asynchrony
from vcpo.bench.engine import bench_engine
from vcpo.bench.evidence import origin_lines, provenance
from vcpo.bench.overhead import bench_overhead
from vcpo.bench.stability import cell_path, run_vcpo_train
from vcpo.bench.startup import bench_startup
from vcpo.metrics import read_jsonl


def bench_speed(*, out: Path, command: str, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Start-up, engine, overhead at T = 128, one replay run of the stability cell, synchronous against asynchronous."""
    report("start-up ...")
    startup = bench_startup()
    report("embedded engine ...")
    engine = bench_engine()
    report("one replay run of the stability cell ...")
    replay = _replay_run(out / "replay")
    report("taking turns against side by side ...")
    asynchrony = bench_asynchrony(out=out / "asynchrony", report=report)
    report("overhead of variance control ...")
    overhead = bench_overhead()
    figures = {"startup": startup, "engine": engine, "replay": replay, "asynchrony": asynchrony, "overhead": overhead}
    return {**provenance(command), "seeds": [0], **figures}


def _replay_run(folder: Path) -> dict[str, Any]:
    """Processor seconds of the whole process and of the training loop alone (80 steps, lag 16, one thread)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run_vcpo_train(cell_path(), [f'run_dir="{folder}"'], threads=1)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if row["step"] > 0]
    return {
        "steps": len(rows),
        "process_cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "loop_wall_s": round(rows[-1]["wall_s"], 1),
        "rollout_s": round(sum(row["rollout_s"] for row in rows), 1),
        "learner_s": round(sum(row["learner_s"] for row in rows), 1),
    }


def speed_page(evidence: dict[str, Any], notes: str = "") -> str:
    """Markdown of the figures, each beside its goal; notes are what a person has to add."""
    engine, replay, overhead = evidence["engine"], evidence["replay"], evidence["overhead"]
    middle = evidence["asynchrony"]["median"]
    starts = {row["what"]: row["wall_s"] for row in evidence["startup"]["rows"]}
    shape = overhead["settings"]
    goals = {"length": ("<= 1.02", "within 5 %"), "logit": ("<= 1.05", "-")}
    lines = [
        "# Speed and memory",
        "",
        "| what | figure | goal |",
        "|---|---|---|",
        *(
            f"| `{name}` | {seconds:.2f} s | {'<= 0.30 s' if 'vcpo' in name else 'the bare interpreter'} |"
            for name, seconds in starts.items()
        ),
        f"| embedded engine: {engine['trajectories']} trajectories of {engine['tokens_mean']:.0f} tokens, one core | "
        f"{engine['cpu_s']:.3f} s | <= 0.25 s |",
        f"| replay run of the stability cell, {replay['steps']} steps, one core | {replay['loop_wall_s']:.0f} s "
        f"({replay['process_cpu_s']:.0f} s processor time with start-up) | <= 40 s |",
        f"| asynchronous / synchronous wall time, {evidence['asynchrony']['steps']} equal steps | {middle['ratio']:.2f} "
        f"({middle['ratio_over_bound']:.2f} x perfect overlap) | <= 1.2 x perfect overlap |",
        "",
        "Perfect overlap is max(g, l) / (g + l) of the faster synchronous setting (1 or 2 threads): generation "
        f"g = {middle['generation_s']:.1f} s, learner l = {middle['learner_s']:.1f} s, synchronous wall "
        f"{middle['sync_wall_s']:.1f} s ({middle['sync_threads']} threads), asynchronous wall {middle['async_wall_s']:.1f} s "
        f"({middle['async_threads']} learner threads beside one sampler; median of {len(evidence['asynchrony']['pairs'])} pairs).",
        "",
        *([notes.strip(), ""] if notes.strip() else []),
        f"## What variance control costs over plain REINFORCE (T = {shape['tokens']}, B = {shape['batch_size']}, "
        f"d = {shape['width']}, {shape['layers']} layers, V = {shape['vocabulary']}, fp32, one thread)",
        "| score_norms | time ratio, median (min - max) | goal | peak memory ratio | goal |",
        "|---|---|---|---|---|",
        *(
            f"| {row['score_norms']} | {row['time_ratio']:.3f} ({row['time_ratio_min']:.3f} - {row['time_ratio_max']:.3f}) | "
            f"{goals.get(row['score_norms'], ('-', '-'))[0]} | {row['memory_ratio']:.3f} | "
            f"{goals.get(row['score_norms'], ('-', '-'))[1]} |"
            for row in overhead["rows"]
        ),
        "",
        f"Ratios of processor time, plain and controlled step back to back, {shape['repeats']} pairs.",
        "",
        "## Where this comes from",
        *origin_lines(evidence),
    ]
    return "\n".join(lines) + "\n"
