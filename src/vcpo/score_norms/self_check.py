"""Start-up check: do the taps give, on this very model, what true autograd gives?

Two things are compared, parameter by parameter (the total would hide a layer: a skipped q_proj is 4e-6 of it): the
squared norm of one ragged trajectory's gradient, and the gradient assembled with coefficients made of the norms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vcpo.batch import Batch
from vcpo.distributed import ProcessGroup, broadcast, gather_rows, is_sharded, rank, reduce_gradients
from vcpo.errors import ScoreNormError
from vcpo.score_norms.gradient_sum import GradientSum
from vcpo.score_norms.loop import gradients, squared_norm, trajectory_gradient
from vcpo.score_norms.parts import Share
from vcpo.score_norms.scoring import scoring_mode, trajectory_logprobs
from vcpo.score_norms.taps import Taps, norms_from_squares

TOLERANCE = {"norm": {torch.float64: 1e-6, torch.float32: 1e-4}, "gradient": {torch.float64: 1e-6, torch.float32: 1e-4}}
"""Largest relative error by the coarsest dtype at work. fp64 models of transformers hold fp32 inside."""
COARSE = {"norm": 1e-2, "gradient": 5e-2}
"""The same for bf16 and fp16, where autograd's own gradient, summed in that dtype, is a percent off."""
NEGLIGIBLE = 1e-7
"""Errors are relative to the parameter's own squared norm, or to this share of the total where that is larger."""


@dataclass(frozen=True)
class SelfCheckResult:
    """What the check found; `parameter` is where the error is largest, also when it passed."""

    ok: bool
    parameter: str
    relative_error: float
    """Of the squared norm ("norm") or of the assembled gradient's norm of difference ("gradient"); NaN reads as inf."""
    what: Literal["norm", "gradient"]


def self_check(model: nn.Module, batch: Batch, method: str = "two_pass") -> SelfCheckResult:
    """Compare a method that rests on the taps with plain autograd, on this model and batch: one result, never a fallback.

    One ragged trajectory, not the first where there is another, runs alone through autograd; then a gradient with
    coefficients made of the norms is assembled through the taps and compared with the same numbers as constants and
    no taps. The model's mode and every .grad are left as found. ValueError for a method that cannot be checked;
    ScoreNormError when the taps refuse the model, or no trajectory has an action.
    """
    if method not in ("two_pass", "exact"):
        raise ValueError(
            f"self_check knows 'exact' and 'two_pass' (loop is the reference, the others proxies); got {method!r}"
        )
    row = _ragged_row(batch)
    with scoring_mode(model, gradients=True):
        with Taps(model) as taps:
            logprobs = trajectory_logprobs(model, batch)
            squares = taps.squared_norms(logprobs)
            coefficients = _coefficients(squares)
            if method == "exact":
                squares, assembled = _single_pass(taps, logprobs, coefficients)
            else:
                assembled = gradients((coefficients * logprobs).sum(), taps.parameters)
        plain = gradients((coefficients.detach() * trajectory_logprobs(model, batch)).sum(), taps.parameters)
    norm = _compare_norms(squares, trajectory_gradient(model, batch, row), row, taps.parameters)
    return norm if not norm.ok else _worse(norm, _compare_gradients(assembled, plain, taps.parameters))


def _single_pass(
    taps: Taps, trajectory_logprobs: Tensor, coefficients: Tensor, *, retain_graph: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Squares and sum_i c_i grad L_i by the single pass, c split into both halves of two shares as an update does."""
    n = len(trajectory_logprobs)
    total = GradientSum(taps.parameters)
    b = 0.7
    shares: list[Share] = []
    sums = [GradientSum(taps.parameters) for _ in range(min(2, n))]
    for first, held in enumerate(sums):
        rows = torch.arange(first, n, 2, device=coefficients.device)
        direct = 0.4 * coefficients.detach()[rows]
        beta = (coefficients.detach()[rows] - direct) / b
        shares.append(Share(rows, direct, beta, total.slot, held.slot))
    found = taps.single_pass(trajectory_logprobs, shares, retain_graph=retain_graph)
    found.combine(slice(0, n), coefficients.detach(), total.slot)
    for held in sums:
        held.add_to(total, b)
    return found.squares, {name: total.slot(name) for name in taps.parameters}


def check_in_graph(
    taps: Taps, trajectory_logprobs: Tensor, squares: Mapping[str, Tensor], row: int, method: str = "two_pass"
) -> SelfCheckResult:
    """The same check where only the graph is at hand: trajectory_logprobs [n] with graph, `squares` from the taps.

    The graph is kept. One trajectory's gradient comes from its own entry of trajectory_logprobs, so a forward that
    mixes trajectories is not seen here, as it is by `self_check`.
    """
    one = gradients(trajectory_logprobs[row], taps.parameters, retain_graph=True)
    norm = _compare_norms(squares, one, row, taps.parameters)
    if not norm.ok:
        return norm
    coefficients = _coefficients(squares)
    plain = gradients((coefficients.detach() * trajectory_logprobs).sum(), taps.parameters, retain_graph=True)
    if method == "exact":
        again, assembled = _single_pass(taps, trajectory_logprobs, coefficients, retain_graph=True)
        norm = _compare_norms(again, one, row, taps.parameters)
    elif coefficients.requires_grad:
        assembled = gradients((coefficients * trajectory_logprobs).sum(), taps.parameters, retain_graph=True)
    else:  # without history the two gradients are one and the same
        return norm
    return _worse(norm, _compare_gradients(assembled, plain, taps.parameters))


def check_sharded(
    taps: Taps,
    trajectory_logprobs: Tensor,
    squares: Mapping[str, Tensor],
    with_actions: Tensor,
    group: ProcessGroup | None = None,
) -> SelfCheckResult | None:
    """The norms of one trajectory against an ordinary backward, where parameters live in pieces (FSDP2).

    The trajectory is the last with actions (with_actions: [n] bool) on the first rank that has one; None when no rank
    has. Collective: every rank runs the same backward, the others with weight 0, and all come to the same verdict. The
    graph is kept and `.grad` put back as it was; gradient sync is on afterwards.
    """
    row = int(with_actions.nonzero().flatten()[-1]) if bool(with_actions.any()) else -1
    rows, _ = gather_rows(torch.tensor([row], device=with_actions.device), group)
    holders = (rows >= 0).nonzero().flatten()
    if not len(holders):
        return None
    holder = int(holders[0])
    mine = rank(group) == holder
    before = {name: p.grad for name, p in taps.parameters.items()}
    for p in taps.parameters.values():
        p.grad = None
    reduce_gradients(taps.model)  # unreduced, this gradient would stay behind inside FSDP2 and join the batch's
    (float(mine) * trajectory_logprobs[row]).backward(retain_graph=True)
    names = list(taps.parameters)
    found = torch.stack([squares[name][row].detach() for name in names])
    true = torch.stack([_squared_everywhere(taps.parameters[name].grad, found) for name in names])
    for name, p in taps.parameters.items():
        p.grad = before[name]
    whole = torch.tensor([not is_sharded(taps.parameters[name]) for name in names])
    found, of_holder = broadcast(found, holder, group), broadcast(true.clone(), holder, group)
    sizes = dict(zip(names, torch.where(whole.to(true.device), of_holder, true).tolist(), strict=True))
    floor = NEGLIGIBLE * sum(sizes.values())
    errors = {n: _ratio(abs(float(sq) - sizes[n]), max(sizes[n], floor)) for n, sq in zip(names, found, strict=True)}
    return _result(errors, "norm", taps.parameters)


def _squared_everywhere(gradient: Tensor | None, like: Tensor) -> Tensor:
    """Squared norm in fp64 over all pieces; of a gradient that is not in pieces, this rank's own."""
    if gradient is None:
        return like.new_zeros((), dtype=torch.float64)
    norm = torch.linalg.vector_norm(gradient.double())
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()


def _ragged_row(batch: Batch) -> int:
    """A trajectory with actions, shorter than the batch is wide and not the first, as far as there is one."""
    lengths, used = batch.action_lengths.tolist(), batch.attention_mask.bool().sum(1).tolist()
    candidates = [i for i, actions in enumerate(lengths) if actions > 0]
    if not candidates:
        raise ScoreNormError("the self-check needs a trajectory with action tokens; this batch has none")
    return max(candidates, key=lambda i: (i > 0, used[i] < batch.input_ids.shape[1], used[i]))


def _coefficients(squares: Mapping[str, Tensor]) -> Tensor:
    """Coefficients of both signs that depend on all norms, as advantages do. Not detached: that is what is checked."""
    norms = norms_from_squares(squares)
    return 1.5 * norms / norms.mean() - 1


def _compare_norms(
    squares: Mapping[str, Tensor], reference: Mapping[str, Tensor], row: int, parameters: Mapping[str, nn.Parameter]
) -> SelfCheckResult:
    true = {name: squared_norm(g) for name, g in reference.items()}
    floor = NEGLIGIBLE * sum(true.values())
    errors = {n: _ratio(abs(float(squares[n][row].detach()) - sq), max(sq, floor)) for n, sq in true.items()}
    return _result(errors, "norm", parameters)


def _compare_gradients(
    assembled: Mapping[str, Tensor], plain: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]
) -> SelfCheckResult:
    true = {name: squared_norm(g) for name, g in plain.items()}
    floor = NEGLIGIBLE * sum(true.values())
    errors = {n: math.sqrt(_ratio(squared_norm(assembled[n] - g), max(true[n], floor))) for n, g in plain.items()}
    return _result(errors, "gradient", parameters)


def _ratio(error: float, size: float) -> float:
    """error / size, where 0 / 0 is no error and NaN is the largest one."""
    if error == 0:
        return 0.0
    return error / size if size > 0 and math.isfinite(error) and math.isfinite(size) else math.inf


def _result(
    errors: Mapping[str, float], what: Literal["norm", "gradient"], parameters: Mapping[str, nn.Parameter]
) -> SelfCheckResult:
    worst = max(errors, key=lambda name: errors[name])
    return SelfCheckResult(errors[worst] <= _tolerance(parameters, what), worst, errors[worst], what)


def _tolerance(parameters: Mapping[str, nn.Parameter], what: Literal["norm", "gradient"]) -> float:
    dtypes = {p.dtype for p in parameters.values()}
    devices = {p.device.type for p in parameters.values()}
    dtypes |= {torch.get_autocast_dtype(d) for d in devices if torch.is_autocast_enabled(d)}
    return max(TOLERANCE[what].get(dtype, COARSE[what]) for dtype in dtypes)


def _worse(a: SelfCheckResult, b: SelfCheckResult) -> SelfCheckResult:
    return b if (not b.ok, b.relative_error) > (not a.ok, a.relative_error) else a
