"""One token per row: log-probs after temperature, and the inverse of the cumulative distribution at given uniforms."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def sample_tokens(logits: Tensor, uniforms: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Sample one token per row and say with what log-prob in nats it was sampled.

    token_i = min {k : sum_{j <= k} p_ij > u_i},  p_i = softmax(logits_i / temperature): row i depends on its own logits
    and uniform only. The log-prob is that of `core.token_logprobs`: float32, or float64 for float64 logits.
    Shapes: logits [n, V], uniforms [n] float64 in [0, 1 - 2^-52]; returns int64 [n] and float [n]. A NaN or +inf logit
    gives a log-prob that is not finite: the caller must look.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    if temperature != 1.0:  # the largest is taken off first: finite logits cannot overflow at a small temperature
        logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    # The last entry is 1 up to rounding; scaling by it, and uniforms of 52 bits, make u < total strictly: a token of
    # probability 0 at the end of the vocabulary can never be chosen.
    at = (uniforms * cumulative[:, -1]).unsqueeze(1)
    tokens = torch.searchsorted(cumulative, at, right=True).clamp_(max=logits.shape[1] - 1)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


def uniforms(seed: int, count: int) -> np.ndarray:
    """`count` numbers in [0, 1 - 2^-52], float64: number t depends on `seed` (63 bits) and t alone, whatever `count` is.

    Raw output of the Philox counter generator, whose stream numpy keeps the same between versions.
    """
    raw = np.random.Philox(key=seed).random_raw(count)
    return (raw >> np.uint64(12)) * 2.0**-52
