"""Squared norms per trajectory from inputs and output gradients, in bounded memory.

In fp32 at least. One row of a matrix is summed in that dtype (a cast of everything costs a copy), the rest in fp64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

MAX_ELEMENTS = 2**24
"""Elements that one temporary may hold (64 MiB in fp32)."""


def upcast(x: Tensor) -> Tensor:
    """fp64 as it is, everything else as fp32: products of bf16 sums lose whole percents to cancellation."""
    return x if x.dtype == torch.float64 else x.float()


class LastGram:
    """x x^T of the last input seen: q, k and v, or gate and up, are fed the same one, one after the other."""

    def __init__(self) -> None:
        self._seen: Tensor | None = None
        self._key: tuple[object, ...] = ()
        self._gram: Tensor | None = None

    def of(self, x: Tensor) -> Tensor:
        """[n, T, T], made anew unless the last input was this very one."""
        key = (x.data_ptr(), x.shape, x.stride(), x.dtype, x._version)
        if self._gram is None or key != self._key:
            wide = upcast(x)
            self._gram = wide @ wide.transpose(1, 2)
            # The tensor is held too, so that its memory cannot become another's.
            self._seen, self._key = x, key
        return self._gram


def matrix_sq_norms(x: Tensor, d: Tensor, last: LastGram | None = None) -> Tensor:
    """|| sum_t d_t x_t^T ||^2 of each trajectory: x [n, T, p], d [n, T, q] -> [n] fp64.

    Two ways of the same number; the cheaper one is taken: the Gram form <x x^T, d d^T> over pairs of tokens,
    T^2 (p + q) products, or the matrix itself, T p q. `last` spares x x^T where modules share their input x.
    """
    tokens, p, q = x.shape[1], x.shape[2], d.shape[2]
    if last is not None and tokens * (p + q) <= p * q and len(x) * tokens * tokens <= MAX_ELEMENTS:
        wide = upcast(d)
        pairs = (wide @ wide.transpose(1, 2)).mul_(last.of(x))
        return pairs.sum(2).sum(1, dtype=torch.float64).clamp(min=0)
    form = _gram if tokens * (p + q) <= p * q else _materialised
    return torch.cat([form(upcast(x[at]), upcast(d[at])) for at in _row_chunks(len(x), min(tokens * tokens, p * q))])


def token_sq_norms(ids: Tensor, d: Tensor) -> Tensor:
    """Squared norm of each trajectory's gradient of an embedding table: ids [n, T], d [n, T, p] -> [n] fp64.

    Gradients of equal ids within a trajectory add before they are squared.
    """
    n = len(ids)
    rows = torch.arange(n, device=ids.device)[:, None]
    span = int(ids.max()) + 1 if ids.numel() else 1
    keys, slot = torch.unique(ids + rows * span, return_inverse=True)
    d = upcast(d)
    sums = d.new_zeros(len(keys), d.shape[2]).index_add_(0, slot.flatten(), d.flatten(0, 1))
    squares = sums.square().sum(1, dtype=torch.float64)
    return squares.new_zeros(n).index_add_(0, keys // span, squares)


def head_gradient_at(ids: Tensor, x: Tensor, d: Tensor) -> Tensor:
    """The rows of each trajectory's head gradient sum_t d_t x_t^T that its own tokens name: [n, T, p].

    ids [n, T], x [n, S, p] into the head, d [n, S, V] at its logits. Only columns of d that are named are read, so
    neither the logits' gradient nor a [V, p] matrix per trajectory has to be kept.
    """
    found = []
    for at in _row_chunks(len(ids), d.shape[1] * ids.shape[1]):
        named = d[at].gather(2, ids[at, None, :].expand(-1, d.shape[1], -1))
        found.append(upcast(named).transpose(1, 2) @ upcast(x[at]))
    return torch.cat(found)


def _gram(x: Tensor, d: Tensor) -> Tensor:
    total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for at in _chunks(x.shape[1], len(x) * x.shape[1]):
        pairs = (x[:, at] @ x.transpose(1, 2)).mul_(d[:, at] @ d.transpose(1, 2))
        total += pairs.sum(2).sum(1, dtype=torch.float64)
    return total.clamp(min=0)  # a sum of squares that rounding may leave a hair below 0


def _materialised(x: Tensor, d: Tensor) -> Tensor:
    total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for at in _chunks(d.shape[2], len(x) * x.shape[2]):
        total += torch.linalg.vector_norm(d[:, :, at].transpose(1, 2) @ x, dim=2).double().square().sum(1)
    return total


def _row_chunks(n: int, elements_per_row: int) -> Iterator[slice]:
    return _chunks(n, elements_per_row) if n else iter([slice(0, 0)])


def _chunks(count: int, elements_each: int) -> Iterator[slice]:
    step = max(1, MAX_ELEMENTS // max(1, elements_each))
    return (slice(start, start + step) for start in range(0, count, step))
