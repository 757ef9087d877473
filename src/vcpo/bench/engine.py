"""How fast the embedded decode engine writes trajectories, on the stability benchmark's policy."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import torch

from vcpo import build
from vcpo.bench.stability import cell_path
from vcpo.config import load_config
from vcpo.tasks import make_task


def bench_engine(*, repeats: int = 9, threads: int = 1) -> dict[str, Any]:
    """Seconds for one optimizer batch of rollouts (16 prompts x 8 trajectories), prompts encoded and text decoded.

    Processor seconds of this process beside wall seconds: with one thread the first are what a quiet core would take.
    """
    torch.set_num_threads(threads)
    config = load_config(str(cell_path()))
    task = make_task(config.task.name, **config.task.options)
    policy = build.build_policy(config, task)
    rollout = build.build_rollout(config, policy)
    prompts = list(itertools.islice(task.train_prompts(0), config.rollout.groups_per_batch))
    cpu, wall, lengths = [], [], []
    for repeat in range(repeats + 2):
        begin = time.process_time(), time.perf_counter()
        groups = rollout(prompts, first_group_id=repeat * len(prompts))
        end = time.process_time(), time.perf_counter()
        if repeat < 2:
            continue
        cpu.append(end[0] - begin[0])
        wall.append(end[1] - begin[1])
        lengths += [len(t.token_ids) for g in groups for t in g.trajectories]
    return {
        "trajectories": sum(len(g.trajectories) for g in groups),
        "tokens_mean": round(statistics.mean(lengths), 1),
        "parameters": sum(p.numel() for p in policy.model.parameters()),
        "threads": threads,
        "repeats": repeats,
        "cpu_s": round(statistics.median(cpu), 4),
        "cpu_s_max": round(max(cpu), 4),
        "wall_s": round(statistics.median(wall), 4),
    }
