"""What exact score norms cost: time, peak memory and error of every method, over lengths, widths, vocabularies, LoRA."""

from __future__ import annotations

import gc
import math
import multiprocessing
import statistics
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vcpo import core, score_norms
from vcpo.batch import Batch
from vcpo.bench.evidence import provenance
from vcpo.bench.overhead import Step, paired, peak_bytes
from vcpo.forward import forward_hidden, forward_logits
from vcpo.learner.variance_control import VarianceControl

METHODS = ("length", "logit", "exact", "two_pass", "one by one")


@dataclass(frozen=True)
class Cell:
    """One model and batch, and the methods that are timed on it."""

    name: str
    tokens: int
    width: int = 256
    layers: int = 4
    vocabulary: int = 2048
    batch_size: int = 16
    methods: tuple[str, ...] = ("exact",)
    lora_rank: int = 0
    checkpointing: bool = False
    micro_batch: int | None = None
    """Trajectories in a micro-batch; groups are of 8, so 4 cuts each in two."""
    repeats: int = 7


CELLS = (
    Cell("T=64", 64, methods=METHODS, repeats=9),
    Cell("T=128", 128, methods=METHODS, repeats=9),
    Cell("T=256", 256, methods=METHODS[:4], repeats=5),
    Cell("T=512", 512, repeats=5),
    Cell("d=768 T=64", 64, 768, 2),
    Cell("d=768 T=128", 128, 768, 2, repeats=5),
    Cell("d=768 T=256", 256, 768, 2, repeats=5),
    Cell("V=32k T=128", 128, vocabulary=32768, methods=("exact", "exact chunked"), repeats=5),
    Cell("V=32k T=256", 256, vocabulary=32768, methods=("exact", "exact chunked"), repeats=5),
    Cell("LoRA r=8 T=128", 128, methods=("exact", "two_pass"), lora_rank=8),
    Cell("checkpointing T=256", 256, methods=("exact", "two_pass"), checkpointing=True, repeats=5),
    Cell("cut groups T=128", 128, methods=("exact", "two_pass"), micro_batch=4),
)
"""One thread, fp32; d = 256 with 4 layers and V = 2048 where the name does not say otherwise; 16 trajectories in 2 groups."""


def bench_score_norms(
    cells: tuple[Cell, ...] = CELLS, *, command: str, report: Callable[[str], None] = print
) -> dict[str, Any]:
    """Every cell in a process of its own: times relative to the plain step as medians over pairs, peak bytes, errors."""
    found: list[dict[str, Any]] = []
    for cell in cells:
        # A fresh interpreter each: the allocator's history of one cell is not the next one's.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as one:
            found.append(one.submit(measure, cell).result())
        for row in found[-1]["rows"]:
            report(f"{cell.name:22s} {row['method']:14s} {row['time_ratio']:.3f}x  memory {row['memory_ratio']:.3f}x")
    return {**provenance(command), "seeds": [0], "cells": found, "errors": small_errors(), "cuda": _cuda()}


def measure(cell: Cell) -> dict[str, Any]:
    """One cell; called in a process of its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    batch = make_batch(cell)
    plain = plain_step(make_model(cell), batch, cell)
    peak = peak_bytes(plain)
    rows = [_row(cell, batch, method, plain, peak) for method in cell.methods]
    gradient = sum(p.numel() * p.element_size() for p in make_model(cell).parameters() if p.requires_grad)
    return {"cell": asdict(cell), "plain_peak_bytes": peak, "gradient_bytes": gradient, "rows": rows}


def _row(cell: Cell, batch: Batch, method: str, plain: Step, plain_peak: int) -> dict[str, Any]:
    model = make_model(cell)
    step, used = (
        one_by_one_step(model, batch) if method == "one by one" else controlled_step(model, batch, cell, method)
    )
    pairs = paired(plain, step, cell.repeats)
    peak = peak_bytes(step)
    if used() not in (method, method.split()[0]):
        raise RuntimeError(f"{cell.name}: {method} gave way to {used()}; its figures would be another method's")
    ratios = [b / a for a, b in pairs]
    row = {
        "method": method,
        "step_s": statistics.median(b for _, b in pairs),
        "plain_step_s": statistics.median(a for a, _ in pairs),
        "time_ratio": statistics.median(ratios),
        "time_ratio_min": min(ratios),
        "time_ratio_max": max(ratios),
        "pairs": len(pairs),
        "memory_ratio": peak / plain_peak,
        "extra_bytes": peak - plain_peak,
        "norm_error": None,
    }
    if method in ("exact", "two_pass") and not cell.checkpointing:
        few = batch.rows(range(3))
        true = score_norms.loop(model, few)
        row["norm_error"] = float(((score_norms.methods[method](model, few) - true) / true).abs().max())
    del step, model
    gc.collect()
    return row


def make_model(cell: Cell, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A Llama of the cell's size, randomly initialised."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = max(1, cell.width // 64)
    config = LlamaConfig(
        vocab_size=cell.vocabulary,
        hidden_size=cell.width,
        intermediate_size=int(cell.width * 2.5),
        num_hidden_layers=cell.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=cell.tokens,
        tie_word_embeddings=False,
    )
    with _default_dtype(dtype):
        model: nn.Module = LlamaForCausalLM(config)
    if cell.lora_rank:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=cell.lora_rank, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, lora)  # type: ignore[arg-type]
    if cell.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    return model.train()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def make_batch(cell: Cell) -> Batch:
    """Full rows of random tokens, an eighth of them prompt, in groups of 8 with rewards 0 and 1."""
    g = torch.Generator().manual_seed(0)
    n = cell.batch_size
    ids = torch.randint(0, cell.vocabulary, (n, cell.tokens), generator=g)
    attention = torch.ones_like(ids, dtype=torch.bool)
    action = attention.clone()
    action[:, : cell.tokens // 8] = False
    sampler = -math.log(cell.vocabulary) + 0.01 * torch.randn(n, cell.tokens, generator=g)
    rewards = torch.randint(0, 2, (n,), generator=g).float()
    return Batch(ids, attention, action, sampler, rewards, torch.arange(n) // 8)


def _parts(batch: Batch, cell: Cell) -> list[Tensor]:
    return list(torch.arange(len(batch)).split(cell.micro_batch or len(batch)))


def plain_step(model: nn.Module, batch: Batch, cell: Cell) -> Step:
    """REINFORCE with group-mean advantages and truncated sequence weights, as one would write it by hand."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6)
    advantages = batch.rewards - core.group_mean(batch.rewards, batch.group_ids)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for part in _parts(batch, cell):
            micro = batch.rows(part)
            logits = forward_logits(model, micro.input_ids, micro.attention_mask)
            logprobs = core.token_logprobs(logits, micro.input_ids)
            del logits
            loss, _ = core.policy_losses["reinforce"](
                logprobs, micro.sampler_logprobs, advantages[part], micro.action_mask, normalizer=float(len(batch))
            )
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def one_by_one_step(model: nn.Module, batch: Batch) -> tuple[Step, Callable[[], str]]:
    """Norms as they are usually taken: micro-batches of one trajectory, a backward each into a second gradient buffer.

    With c_i = direct_i + b beta_i each trajectory's gradient is added to both sums, so b may come at the end.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-6)
    groups = batch.group_ids.unique()

    def step() -> None:
        totals = [torch.zeros_like(p) for p in parameters]
        waiting = {int(g): [torch.zeros_like(p) for p in parameters] for g in groups}
        norms, log_weights = torch.zeros(len(batch)), torch.zeros(len(batch))
        for i in range(len(batch)):
            one = batch.rows([i])
            logprobs = core.token_logprobs(forward_logits(model, one.input_ids, one.attention_mask), one.input_ids)
            lw = core.trajectory_log_weights(logprobs.detach(), one.sampler_logprobs, one.action_mask)
            gradients = torch.autograd.grad(core.masked_sum(logprobs, one.action_mask).sum(), parameters)
            norms[i] = torch.nn.utils.get_total_norm(gradients)
            log_weights[i] = lw[0]
            beta = float(core.truncated_weights(lw, 8.0)) / float(one.action_lengths) / len(batch)
            for total, held, gradient in zip(totals, waiting[int(one.group_ids)], gradients, strict=True):
                total.add_(gradient, alpha=-beta * float(one.rewards))
                held.add_(gradient, alpha=beta)
        b = core.optimal_baseline(batch.rewards, log_weights, norms, batch.group_ids)
        for group, sums in waiting.items():
            for total, held in zip(totals, sums, strict=True):
                total.add_(held, alpha=float(b[batch.group_ids == group][0]))
        for p, total in zip(parameters, totals, strict=True):
            p.grad = total
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return step, lambda: "one by one"


def controlled_step(model: nn.Module, batch: Batch, cell: Cell, method: str) -> tuple[Step, Callable[[], str]]:
    """The same step under VarianceControl, and which method it used in the end."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6)
    name, chunked = method.split()[0], method.endswith("chunked")
    vc = VarianceControl(model, optimizer, score_norms=name)

    def logprobs(micro: Batch) -> tuple[Tensor, Tensor | None]:
        with vc.forward():
            if chunked:
                hidden, head = forward_hidden(model, micro.input_ids, micro.attention_mask)
                return score_norms.chunked_token_logprobs(hidden, head, micro.input_ids), None
            logits = forward_logits(model, micro.input_ids, micro.attention_mask)
        if vc.needs_score_sq:
            return core.token_logprobs(logits, micro.input_ids, with_score_sq=True)
        return core.token_logprobs(logits, micro.input_ids), None

    def step() -> None:
        with vc.batch(batch.rewards, batch.group_ids, batch.action_lengths):
            for part in _parts(batch, cell):
                micro = batch.rows(part)
                found, score_sq = logprobs(micro)
                vc.backward(found, micro.sampler_logprobs, micro.action_mask, rows=part, score_sq=score_sq)
        vc.step()

    return step, lambda: vc.score_norms


def small_errors() -> list[dict[str, Any]]:
    """Per-parameter norms and assembled gradient against plain autograd, fp64 and fp32, on a small model: largest error."""
    cell = Cell("small", 48, 64, 2, 300, 8)
    found = []
    for dtype in (torch.float64, torch.float32):
        for method in ("exact", "two_pass"):
            result = score_norms.self_check(make_model(cell, dtype), make_batch(cell), method)
            found.append(
                {
                    "dtype": str(dtype).removeprefix("torch."),
                    "method": method,
                    "parameter": result.parameter,
                    "what": result.what,
                    "relative_error": result.relative_error,
                }
            )
    return found


def _cuda() -> str | None:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
