"""What variance control costs: its step against the plain REINFORCE step, as paired ratios in one run."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vcpo import core
from vcpo.batch import Batch
from vcpo.forward import forward_logits
from vcpo.learner.variance_control import VarianceControl

Step = Callable[[], None]


def bench_overhead(
    *,
    tokens: int = 128,
    batch_size: int = 16,
    width: int = 256,
    layers: int = 4,
    vocabulary: int = 2048,
    repeats: int = 9,
    methods: tuple[str, ...] = ("length", "logit", "two_pass"),
    threads: int = 1,
) -> dict[str, Any]:
    """Time and peak memory of one optimizer step per score-norm method, relative to plain REINFORCE with group means.

    Each repeat times plain and method back to back and alternates which comes first; the ratio quoted is the median over
    repeats. Memory is the allocator's own peak over one step, above what was held before it.
    """
    torch.set_num_threads(threads)
    batch = _batch(tokens, batch_size, vocabulary)
    plain = _plain_step(_model(width, layers, vocabulary, tokens), batch)
    plain_peak = peak_bytes(plain)
    rows: list[dict[str, Any]] = []
    for method in methods:
        step = _controlled_step(_model(width, layers, vocabulary, tokens), batch, method)
        pairs = paired(plain, step, repeats)
        rows.append(
            {
                "score_norms": method,
                "step_s": statistics.median(b for _, b in pairs),
                "plain_step_s": statistics.median(a for a, _ in pairs),
                "time_ratio": statistics.median(b / a for a, b in pairs),
                "time_ratio_min": min(b / a for a, b in pairs),
                "time_ratio_max": max(b / a for a, b in pairs),
                "memory_ratio": peak_bytes(step) / plain_peak,
            }
        )
    settings = {"tokens": tokens, "batch_size": batch_size, "width": width, "layers": layers, "vocabulary": vocabulary}
    return {
        "settings": {**settings, "repeats": repeats, "threads": threads},
        "plain_peak_bytes": plain_peak,
        "rows": rows,
    }


def _model(width: int, layers: int, vocabulary: int, tokens: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=int(width * 2.5),
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        num_key_value_heads=max(1, width // 64),
        max_position_embeddings=tokens,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).train()


def _batch(tokens: int, batch_size: int, vocabulary: int) -> Batch:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (batch_size, tokens), generator=g)
    attention = torch.ones_like(ids, dtype=torch.bool)
    action = attention.clone()
    action[:, : tokens // 8] = False
    sampler = -7.6 + 0.01 * torch.randn(batch_size, tokens, generator=g)
    rewards = torch.randint(0, 2, (batch_size,), generator=g).float()
    return Batch(ids, attention, action, sampler, rewards, torch.arange(batch_size) // 8)


def _plain_step(model: torch.nn.Module, batch: Batch) -> Step:
    """REINFORCE with group-mean advantages and truncated sequence weights, as one would write it by hand."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    advantages: Tensor = batch.rewards - core.group_mean(batch.rewards, batch.group_ids)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        logits = forward_logits(model, batch.input_ids, batch.attention_mask)
        logprobs = core.token_logprobs(logits, batch.input_ids)
        del logits
        loss, _ = core.policy_losses["reinforce"](logprobs, batch.sampler_logprobs, advantages, batch.action_mask)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def _controlled_step(model: torch.nn.Module, batch: Batch, method: str) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    vc = VarianceControl(model, optimizer, score_norms=method)
    rows = torch.arange(len(batch))

    def step() -> None:
        with vc.batch(batch.rewards, batch.group_ids, batch.action_lengths):
            with vc.forward():
                logits = forward_logits(model, batch.input_ids, batch.attention_mask)
            if vc.needs_score_sq:
                logprobs, score_sq = core.token_logprobs(logits, batch.input_ids, with_score_sq=True)
            else:
                logprobs, score_sq = core.token_logprobs(logits, batch.input_ids), None
            del logits
            vc.backward(logprobs, batch.sampler_logprobs, batch.action_mask, rows=rows, score_sq=score_sq)
        vc.step()

    return step


def paired(a: Step, b: Step, repeats: int) -> list[tuple[float, float]]:
    """Seconds of a and of b, back to back; which comes first alternates."""
    for step in (a, b, a, b):
        step()
    pairs: list[tuple[float, float]] = []
    for i in range(repeats):
        order = (a, b) if i % 2 == 0 else (b, a)
        times = [_seconds(step) for step in order]
        pairs.append((times[0], times[1]) if i % 2 == 0 else (times[1], times[0]))
    return pairs


def _seconds(step: Step) -> float:
    """Processor seconds of this process: with one thread they are the step's own time, whatever else the machine does."""
    begin = time.process_time()
    step()
    return time.process_time() - begin


def peak_bytes(step: Step) -> int:
    """The most that one step held above what was held before it, from the allocator's own trace."""
    from torch.profiler import ProfilerActivity, profile

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted(
        (e["ts"], e["args"]["Bytes"])
        for e in events
        if e.get("name") == "[memory]" and e["args"].get("Device Type") == 0
    )
    held = peak = 0
    for _, size in changes:
        held += size
        peak = max(peak, held)
    return peak
