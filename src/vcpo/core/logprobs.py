"""Log-probs of the taken tokens from logits, with the score's logit norm from the same pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 2**17, "other": 2**25}
"""Logits worked on at a time: on a CPU what stays in a core's cache, elsewhere what hides the cost of a launch."""


@overload
def token_logprobs(
    logits: Tensor, input_ids: Tensor, *, temperature: float = ..., with_score_sq: Literal[False] = ...
) -> Tensor: ...
@overload
def token_logprobs(
    logits: Tensor, input_ids: Tensor, *, temperature: float = ..., with_score_sq: Literal[True]
) -> tuple[Tensor, Tensor]: ...
@overload
def token_logprobs(
    logits: Tensor, input_ids: Tensor, *, temperature: float = ..., with_score_sq: bool
) -> Tensor | tuple[Tensor, Tensor]: ...


def token_logprobs(
    logits: Tensor, input_ids: Tensor, *, temperature: float = 1.0, with_score_sq: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-prob in nats of each token given those before it; logits [n, s, V], input_ids [n, s] -> [n, s], <= 0.

    Column j speaks of token j and is read from the logits of column j - 1; column 0 is 0. The softmax is taken over
    logits / temperature. fp64 stays fp64, everything else gives fp32. A token id outside [0, V) gives NaN.

    With `with_score_sq` also sum_v (1[v = token] - p_v)^2 = 1 - 2 p + sum_v p_v^2, in [0, 2], without gradient: the
    squared norm of the gradient of the log-prob with respect to logits / temperature, the summand of the "logit" score
    norm (arXiv 2602.17616, the score norms of its optimal baseline).

    Differentiable once. Besides the logits themselves only three numbers per token are kept for the backward.
    ValueError when shapes do not fit or the temperature is not a positive number.
    """
    if logits.ndim != 3 or input_ids.shape != logits.shape[:2] or logits.shape[2] == 0:
        raise ValueError(
            f"need logits [n, s, V] and input_ids [n, s], got {tuple(logits.shape)} and {tuple(input_ids.shape)}"
        )
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be a positive, finite number, got {temperature}")
    # Row r of the flat logits predicts the next token; the last column predicts nothing and is dropped below. Keeping
    # it makes the flat view free of copies.
    targets = torch.roll(input_ids, -1, 1).reshape(-1).long()
    known = (targets >= 0) & (targets < logits.shape[2])
    flat = logits.reshape(-1, logits.shape[2])
    rest = (torch.where(known, targets, 0), temperature, with_score_sq)
    picked, score_sq = cast(
        tuple[Tensor, Tensor],
        _TakenLogProb.apply(flat, *rest),  # pyright: ignore[reportUnknownMemberType]
    )
    logprobs = _shift(torch.where(known, picked, math.nan), input_ids)
    return (logprobs, _shift(torch.where(known, score_sq, math.nan), input_ids)) if with_score_sq else logprobs


def _shift(values: Tensor, input_ids: Tensor) -> Tensor:
    """[n * s] numbers about the next token -> [n, s] about this token, 0 in column 0."""
    per_next = values.view(input_ids.shape)
    return torch.nn.functional.pad(per_next[:, :-1], (1, 0)) if input_ids.shape[1] else per_next


class _TakenLogProb(torch.autograd.Function):
    """log softmax(logits / T)[target] per row, row chunk by row chunk; the backward recomputes the softmax.

    Autograd's own log_softmax + gather keeps a full fp32 copy and fills a second one with zeros in the backward. The
    largest logit is subtracted before the division, so that finite logits cannot overflow at a small temperature.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, with_score_sq: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        rows = len(logits)
        largest, total, logprobs = (torch.empty(rows, dtype=dtype, device=logits.device) for _ in range(3))
        score_sq = torch.empty(rows if with_score_sq else 0, dtype=dtype, device=logits.device)
        for at, powers in _row_chunks(logits, dtype):
            block = logits[at].to(dtype)
            torch.amax(block, 1, out=largest[at])
            _scaled(block, largest[at], temperature, out=powers)
            logprobs[at] = powers.gather(1, targets[at, None]).squeeze(1)
            torch.sum(powers.exp_(), 1, out=total[at])
            if with_score_sq:
                torch.linalg.vector_norm(powers, dim=1, out=score_sq[at])  # pyright: ignore[reportUnknownMemberType]
        logprobs -= total.log()
        if with_score_sq:
            score_sq.div_(total).square_().sub_(logprobs.exp(), alpha=2).add_(1).clamp_(min=0)
        ctx.save_for_backward(logits, targets, largest, total)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(score_sq)
        return logprobs, score_sq

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None, None, None]:
        logits, targets, largest, total = ctx.saved_tensors
        coefficient = grads[0] / ctx.temperature
        per_weight = -coefficient / total
        nobody_asks = (coefficient == 0) & ~largest.isfinite()
        grad_logits = torch.empty_like(logits)
        for at, powers in _row_chunks(logits, largest.dtype, grad_logits):
            _scaled(logits[at].to(largest.dtype), largest[at], ctx.temperature, out=powers)
            powers.exp_().mul_(per_weight[at, None]).scatter_add_(1, targets[at, None], coefficient[at, None])
            if powers.dtype != logits.dtype:
                grad_logits[at] = powers
        # 0 * NaN is NaN: a row without gradient gets exactly 0 also where its logits are not numbers. Rare, and a pass
        # over [n, s, V] costs as much as the exponentials, hence the question first.
        if nobody_asks.any():
            grad_logits[nobody_asks] = 0
        return grad_logits, None, None, None


def _scaled(block: Tensor, largest: Tensor, temperature: float, *, out: Tensor) -> None:
    torch.sub(block, largest[:, None], out=out)
    if temperature != 1.0:
        out.div_(temperature)


def _row_chunks(logits: Tensor, dtype: torch.dtype, store: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the rows, each with room for its [rows, V]: inside `store` where the dtype allows, else reused."""
    rows, width = logits.shape
    step = max(1, CHUNK_ELEMENTS["cpu" if logits.device.type == "cpu" else "other"] // width)
    in_place = store is not None and store.dtype == dtype
    room = store if in_place else torch.empty(min(step, rows), width, dtype=dtype, device=logits.device)
    assert room is not None
    for start in range(0, rows, step):
        at = slice(start, min(start + step, rows))
        yield at, room[at] if in_place else room[: at.stop - start]
