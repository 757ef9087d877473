"""A parameter's gradient of every trajectory, not written out: what a rule finds, and what can be asked of it.

Of grad L_i the update needs two things: its squared norm, and its share in sum_i c_i grad L_i where c depends on all
norms. A part gives the first at once and the second later (retained: it holds inputs and output gradients until c is
known), or, where writing out one trajectory's gradient costs less, both in one go (fused; see `Share`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vcpo.score_norms import kernels

FUSED_ROWS = 128
"""Rows of a matrix that the fused way writes out at a time: enough for a product to be quick, little enough for the cache."""
FUSED_TRAJECTORIES = 8
"""How many trajectories' rows at a time."""


Rows = slice | Tensor
"""Some of a micro-batch's n trajectories, ascending: a slice where they stand together (no copy), else int64 indices."""


def as_rows(indices: Tensor) -> Rows:
    """[m] int64, ascending -> the same rows, as a slice where that is possible."""
    first, last = (int(indices[0]), int(indices[-1])) if len(indices) else (0, -1)
    return slice(first, last + 1) if last - first + 1 == len(indices) else indices


def _numbers(rows: Rows) -> Iterable[int]:
    return range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()


@dataclass(frozen=True)
class Share:
    """Trajectories whose coefficients hang on one unknown number b, and where both halves of their gradient go.

    c_i = direct_i + b beta_i: sum_i direct_i grad L_i is added to `gradients`, sum_i beta_i grad L_i to `shared`.
    """

    rows: Rows
    """Which m trajectories of the micro-batch."""
    direct: Tensor
    """[m] fp64."""
    beta: Tensor
    """[m] fp64."""
    gradients: Callable[[str], Tensor]
    """Parameter -> the tensor that its part of `direct` is added to."""
    shared: Callable[[str], Tensor]
    """The same for `beta`."""


class Part(Protocol):
    """What a rule found out about one module's own parameters, for n trajectories at once."""

    names: tuple[str, ...]
    """The parameters, by their name inside the module."""

    def squares(self) -> dict[str, Tensor]:
        """|| grad L_i ||^2 of each parameter: [n] fp64."""
        ...

    def add_combined(self, rows: Rows, coefficients: Tensor, into: Callable[[str], Tensor]) -> None:
        """into(name) += sum over `rows` of coefficients x grad L_i; coefficients [m] fp64."""
        ...

    def fused(self, shares: Sequence[Share]) -> dict[str, Tensor]:
        """`squares`, and in the same go both halves of every share; nothing needs to be kept afterwards."""
        ...

    def should_retain(self, shares: int) -> bool:
        """Whether keeping this part until the coefficients are known is cheaper than writing gradients out."""
        ...


class RetainedPart:
    """The fused way of a part for which it is nothing but the two retained steps."""

    names: tuple[str, ...]

    def squares(self) -> dict[str, Tensor]:
        """See Part."""
        raise NotImplementedError

    def add_combined(self, rows: Rows, coefficients: Tensor, into: Callable[[str], Tensor]) -> None:
        """See Part."""
        raise NotImplementedError

    def fused(self, shares: Sequence[Share]) -> dict[str, Tensor]:
        """Squares, then the two sums of each share."""
        for share in shares:
            self.add_combined(share.rows, share.direct, share.gradients)
            self.add_combined(share.rows, share.beta, share.shared)
        return self.squares()

    def should_retain(self, shares: int) -> bool:
        """Small per trajectory, so always."""
        return True


class Sums(RetainedPart):
    """A parameter so small that each trajectory's gradient is written out: norm weights, biases."""

    def __init__(self, name: str, gradients: Tensor) -> None:
        """gradients: [n, *shape of the parameter]."""
        self.names = (name,)
        self.gradients = gradients

    def squares(self) -> dict[str, Tensor]:
        return {self.names[0]: self.gradients.flatten(1).square().sum(1, dtype=torch.float64)}

    def add_combined(self, rows: Rows, coefficients: Tensor, into: Callable[[str], Tensor]) -> None:
        target = into(self.names[0])
        chosen = self.gradients.flatten(1)[rows].to(target.dtype)
        target.add_((coefficients.to(target.dtype) @ chosen).view_as(target))


class TokenTable(RetainedPart):
    """An embedding table: grad L_i has d_t in the row of the table that token t names."""

    def __init__(self, name: str, ids: Tensor, d: Tensor) -> None:
        """ids [n, T], d [n, T, p]: what each token adds to its row."""
        self.names = (name,)
        self.ids, self.d = ids, d

    def squares(self) -> dict[str, Tensor]:
        return {self.names[0]: kernels.token_sq_norms(self.ids, self.d)}

    def add_combined(self, rows: Rows, coefficients: Tensor, into: Callable[[str], Tensor]) -> None:
        target = into(self.names[0])
        scaled = self.d[rows].to(target.dtype) * coefficients.to(target.dtype)[:, None, None]
        target.index_add_(0, self.ids[rows].flatten(), scaled.flatten(0, 1))


class Outer:
    """A matrix whose gradient is left_i^T right_i over the tokens of trajectory i: Linear, Conv1D."""

    def __init__(
        self,
        name: str,
        left: Tensor,
        right: Tensor,
        *,
        input_is_left: bool = False,
        last: kernels.LastGram | None = None,
    ) -> None:
        """left [n, T, q], right [n, T, p]; the parameter is [q, p]. One of them is the module's input."""
        self.names = (name,)
        self.left, self.right = left, right
        self._input_is_left, self._last = input_is_left, last

    def squares(self) -> dict[str, Tensor]:
        x, d = (self.left, self.right) if self._input_is_left else (self.right, self.left)
        return {self.names[0]: kernels.matrix_sq_norms(x, d, self._last)}

    def add_combined(self, rows: Rows, coefficients: Tensor, into: Callable[[str], Tensor]) -> None:
        target = into(self.names[0])
        left, right = self._taken(rows)
        c = coefficients.to(target.dtype)[:, None, None]
        # The smaller side takes the coefficients: that is the only copy.
        if left.shape[2] <= right.shape[2]:
            left = left * c
        else:
            right = right * c
        _addmm(target, left.to(target.dtype).flatten(0, 1), right.to(target.dtype).flatten(0, 1))

    def fused(self, shares: Sequence[Share]) -> dict[str, Tensor]:
        """One trajectory's gradient is written out a few rows of the matrix at a time, and used three times there."""
        squares = torch.zeros(len(self.left), dtype=torch.float64, device=self.left.device)
        name = self.names[0]
        for share in shares:
            gradients, shared = share.gradients(name), share.shared(name)
            left, right = (kernels.upcast(x) for x in self._taken(share.rows))
            both = torch.stack([share.direct, share.beta]).to(right.dtype)
            found = torch.zeros(len(left), dtype=torch.float64, device=left.device)
            for rows in _slices(len(left), FUSED_TRAJECTORIES):
                transposed = left[rows].transpose(1, 2)
                for at in _slices(left.shape[2], FUSED_ROWS):
                    written = torch.bmm(transposed[:, at], right[rows])
                    flat = written.flatten(1)
                    found[rows] += torch.linalg.vector_norm(flat, dim=1).double().square_()
                    sums = (both[:, rows] @ flat).unflatten(1, written.shape[1:])
                    gradients[at] += sums[0]
                    shared[at] += sums[1]
            squares[share.rows] = found
        return {name: squares}

    def should_retain(self, shares: int) -> bool:
        """See `retain_is_cheaper`."""
        return retain_is_cheaper(self.left.shape[1], self.left.shape[2], self.right.shape[2])

    def _taken(self, rows: Rows) -> tuple[Tensor, Tensor]:
        return self.left[rows], self.right[rows]


KAPPA = 25.0
"""What writing a matrix of one trajectory out costs in multiplications per entry, on a CPU core; calibrate elsewhere."""


def retain_is_cheaper(tokens: int, q: int, p: int) -> bool:
    """Whether the Gram form of the norm and one product later cost less than each trajectory's matrix written out.

    T^2 (p + q) products against a matrix of p q entries that is read three times.
    """
    return 0.65 * tokens * tokens * (p + q) < KAPPA * p * q


class PerTrajectory:
    """A module that was run again on one trajectory alone: its parameters' gradients come one trajectory at a time."""

    def __init__(self, names: tuple[str, ...], n: int, gradients: Callable[[int], Mapping[str, Tensor]]) -> None:
        """gradients(row): parameter -> gradient of that trajectory; parameters that took none are left out."""
        self.names = names
        self._n, self._gradients = n, gradients

    def squares(self) -> dict[str, Tensor]:
        totals = {name: torch.zeros(self._n, dtype=torch.float64) for name in self.names}
        for row in range(self._n):
            for name, gradient in self._gradients(row).items():
                totals[name][row] = gradient.double().square().sum()
        return totals

    def add_combined(self, rows: Rows, coefficients: Tensor, into: Callable[[str], Tensor]) -> None:
        for row, coefficient in zip(_numbers(rows), coefficients.tolist(), strict=True):
            for name, gradient in self._gradients(row).items():
                into(name).add_(gradient, alpha=coefficient)

    def fused(self, shares: Sequence[Share]) -> dict[str, Tensor]:
        """Each trajectory is run again once."""
        totals = {name: torch.zeros(self._n, dtype=torch.float64) for name in self.names}
        for share in shares:
            both = zip(_numbers(share.rows), share.direct.tolist(), share.beta.tolist(), strict=True)
            for row, direct, beta in both:
                for name, gradient in self._gradients(row).items():
                    totals[name][row] = gradient.double().square().sum()
                    share.gradients(name).add_(gradient, alpha=direct)
                    share.shared(name).add_(gradient, alpha=beta)
        return totals

    def should_retain(self, shares: int) -> bool:
        """Never: it would run everything twice."""
        return False


def _addmm(target: Tensor, left: Tensor, right: Tensor) -> None:
    """target += left^T right."""
    target.addmm_(left.t(), right)


def _slices(count: int, step: int) -> Iterator[slice]:
    return (slice(start, min(count, start + step)) for start in range(0, count, step))
