"""Log-probs straight from the last hidden states, a slice of the vocabulary at a time; with score norms where taps are armed.

At a vocabulary of 150k the logits of a batch, and again their gradient, are its largest tensors. Here neither is ever
whole: the forward keeps one number per token, the backward makes each slice of the logits again, takes from it the
gradient of the hidden states and of that slice of the head, and lets it go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vcpo.score_norms.kernels import upcast
from vcpo.score_norms.parts import FUSED_TRAJECTORIES, Share

SLICE = 256
"""Vocabulary entries at a time in the backward: a slice of eight trajectories' logits stays in the cache."""
FORWARD_ELEMENTS = 2**20
"""Logits at a time in the forward."""


Visit = Callable[["HeadSlices"], bool]
"""What the backward asks first: whether somebody collects, and if so takes everything from these slices."""


class HeadSlices:
    """d log pi / d logits of every token, slice by slice of the vocabulary, for n trajectories of T tokens."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, log_total: Tensor, grad: Tensor, temperature: float
    ) -> None:
        """hidden [n, T, p], weight [V, p], targets, log_total, grad [n, T]; log_total: log sum_v exp(logit_v / temperature)."""
        # A token that nobody asks about has no gradient; whatever stands there (NaN behind padding) must not spread.
        asked = grad != 0
        hidden, log_total = torch.where(asked[..., None], hidden, 0.0), torch.where(asked, log_total, 0.0)
        self.hidden, self.weight = hidden, weight
        self.grad_hidden = torch.zeros_like(hidden)
        """Filled by `slices` when asked for."""
        self._targets, self._log_total, self._grad, self._temperature = targets, log_total, grad, temperature

    def slices(self, rows: slice, *, grad_hidden: bool) -> Iterator[tuple[slice, Tensor]]:
        """Each slice of the vocabulary and [m, T, slice] of the gradient with respect to it, for these trajectories."""
        for start in range(0, len(self.weight), SLICE):
            at = slice(start, min(start + SLICE, len(self.weight)))
            d = self._gradient(rows, self.weight[at], self._targets[rows] - start)
            if grad_hidden:
                self.grad_hidden[rows] += d @ self.weight[at]
            yield at, d

    def named(self, ids: Tensor) -> Tensor:
        """[n, T', p]: the rows of each trajectory's head gradient that its own tokens ids [n, T'] name."""
        found = []
        for row, own in enumerate(ids):
            same = own[None, :] == self._targets[row, :, None]
            d = self._softmax(slice(row, row + 1), self.weight[own])[0].neg_() + same
            found.append((d * self._scale(slice(row, row + 1))[0]).t() @ self.hidden[row])
        return torch.stack(found)

    def _gradient(self, rows: slice, weight: Tensor, targets: Tensor) -> Tensor:
        d = self._softmax(rows, weight)
        scale = self._scale(rows)
        d.mul_(-scale)
        inside = (targets >= 0) & (targets < len(weight))
        at = torch.where(inside, targets, 0)[..., None]
        return d.scatter_add_(2, at, torch.where(inside[..., None], scale, 0.0))

    def _softmax(self, rows: slice, weight: Tensor) -> Tensor:
        logits = self.hidden[rows] @ weight.t()
        return logits.div_(self._temperature).sub_(self._log_total[rows][..., None]).exp_()

    def _scale(self, rows: slice) -> Tensor:
        return (self._grad[rows] / self._temperature)[..., None]


class ChunkedHead:
    """The head as a part (see `parts.Part`): never retained, its gradient is written out slice by slice."""

    def __init__(self, slices: HeadSlices) -> None:
        self.names: tuple[str, ...] = ("weight",)
        self._slices = slices

    def squares(self) -> dict[str, Tensor]:
        everyone = slice(0, len(self._slices.hidden))
        nothing = torch.zeros(everyone.stop, dtype=torch.float64, device=self._slices.hidden.device)
        return self.fused([Share(everyone, nothing, nothing, _nowhere, _nowhere)])

    def add_combined(self, rows: Any, coefficients: Tensor, into: Callable[[str], Tensor]) -> None:
        raise NotImplementedError("a chunked head is never retained")

    def should_retain(self, shares: int) -> bool:
        return False

    def fused(self, shares: Sequence[Share]) -> dict[str, Tensor]:
        """Also fills the hidden states' gradient, as every slice passes by here once."""
        slices = self._slices
        squares = torch.zeros(len(slices.hidden), dtype=torch.float64, device=slices.hidden.device)
        for share in shares:
            for rows in _blocks(share.rows, len(slices.hidden)):
                self._block(share, rows, squares)
        return {"weight": squares}

    def _block(self, share: Share, rows: tuple[slice, slice], squares: Tensor) -> None:
        """`rows`: the same trajectories as the micro-batch and as the share count them."""
        here, there = rows
        both = torch.stack([share.direct[there], share.beta[there]])
        wanted = share.gradients is not _nowhere
        hidden = self._slices.hidden[here]
        for at, d in self._slices.slices(here, grad_hidden=True):
            written = torch.bmm(d.transpose(1, 2), hidden)
            flat = written.flatten(1)
            squares[here] += torch.linalg.vector_norm(flat, dim=1).double().square_()
            if wanted:
                sums = (both.to(flat.dtype) @ flat).unflatten(1, written.shape[1:])
                share.gradients("weight")[at] += sums[0]
                share.shared("weight")[at] += sums[1]


def _nowhere(name: str) -> Tensor:
    raise KeyError(name)


def _blocks(rows: slice | Tensor, n: int) -> Iterator[tuple[slice, slice]]:
    """Up to eight neighbours at a time: their rows in the micro-batch, and their places in the share."""
    numbers = list(range(*rows.indices(n))) if isinstance(rows, slice) else rows.tolist()
    start = 0
    while start < len(numbers):
        stop = start + 1
        while stop < len(numbers) and numbers[stop] == numbers[stop - 1] + 1 and stop - start < FUSED_TRAJECTORIES:
            stop += 1
        yield slice(numbers[start], numbers[stop - 1] + 1), slice(start, stop)
        start = stop


class _TakenLogProb(torch.autograd.Function):
    """log softmax(hidden weight^T / temperature)[target]: [n, T] from hidden [n, T, p]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, visit: Any, anchor: Tensor
    ) -> Tensor:
        flat, wanted = upcast(hidden).flatten(0, 1), targets.flatten()
        wide = upcast(weight)
        log_total, picked = flat.new_empty(len(flat)), flat.new_empty(len(flat))
        step = max(1, FORWARD_ELEMENTS // len(weight))
        for start in range(0, len(flat), step):
            at = slice(start, start + step)
            logits = (flat[at] @ wide.t()).div_(temperature)
            picked[at] = logits.gather(1, wanted[at, None]).squeeze(1)
            log_total[at] = logits.logsumexp(1)
        ctx.save_for_backward(hidden, weight, targets, log_total.view(targets.shape))
        ctx.temperature, ctx.visit = temperature, visit
        return (picked - log_total).view(targets.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_total = ctx.saved_tensors
        asked = _asked(grads[0])
        slices = HeadSlices(
            upcast(hidden[:, asked]),
            upcast(weight),
            targets[:, asked],
            log_total[:, asked],
            upcast(grads[0][:, asked]),
            ctx.temperature,
        )
        grad_hidden = torch.zeros_like(hidden)
        if ctx.visit is not None and ctx.visit(slices):
            grad_hidden[:, asked] = slices.grad_hidden.to(hidden.dtype)
            return grad_hidden, None, None, None, None, None
        grad_weight = torch.zeros_like(slices.weight) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), FUSED_TRAJECTORIES):
            rows = slice(start, start + FUSED_TRAJECTORIES)
            states = slices.hidden[rows].flatten(0, 1)
            for at, d in slices.slices(rows, grad_hidden=True):
                if grad_weight is not None:
                    grad_weight[at].addmm_(d.flatten(0, 1).t(), states)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_hidden[:, asked] = slices.grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _asked(grad: Tensor) -> slice:
    """Without the tokens at either end that no trajectory asks about, such as prompts: grad [n, T]."""
    some = (grad != 0).any(0).nonzero().flatten().tolist() or [0]
    return slice(some[0], some[-1] + 1)


def chunked_token_logprobs(hidden: Tensor, head: nn.Linear, input_ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """`core.token_logprobs(head(hidden), input_ids, temperature=...)` without the logits: [n, s], column 0 is 0.

    hidden: [n, s, p], the last hidden states with their graph. head: the plain linear layer that makes logits of them,
    without bias and nothing after it. Inside `vc.forward()` or between `Taps.arm` and `mute` its score norms are
    taken too. ValueError for a head with a bias, a wrong shape or a temperature that is not above 0.
    """
    from vcpo.score_norms.taps import armed_taps  # the taps know this module; here they are only asked

    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ValueError(f"chunked log-probs need a plain linear head without bias, got {head}")
    if hidden.ndim != 3 or hidden.shape[:2] != input_ids.shape or hidden.shape[2] != head.in_features:
        raise ValueError(
            f"hidden must be [n, s, {head.in_features}] with input_ids [n, s], got {tuple(hidden.shape)} and "
            f"{tuple(input_ids.shape)}"
        )
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be above 0 and finite, got {temperature}")
    # One column is predicted by the one before it; the last predicts nothing and its gradient is 0.
    targets = torch.nn.functional.pad(input_ids[:, 1:], (0, 1))

    def run(visit: Visit | None, anchor: Tensor | None) -> Tensor:
        return _TakenLogProb.apply(hidden, head.weight, targets, temperature, visit, anchor)  # type: ignore[no-any-return]

    taps = armed_taps(head)
    taken = run(None, None) if taps is None else taps.chunked_head(head, hidden, run)
    return torch.nn.functional.pad(taken[:, :-1], (1, 0))
