"""Exact score norms of a whole batch from one pass of their own, by taps."""

from __future__ import annotations

from torch import Tensor, nn

from vcpo.batch import Batch
from vcpo.score_norms.scoring import scoring_mode, trajectory_logprobs
from vcpo.score_norms.taps import Taps, norms_from_squares


def two_pass(model: nn.Module, batch: Batch) -> Tensor:
    """Score norm of each trajectory, all at once: [n] fp64, >= 0; equal to `loop` up to rounding.

    One forward and one backward that differentiates with respect to activations only. The gradient of the update is
    a second, ordinary backward, so any loss may follow. The model's mode and every .grad are left as found.
    ScoreNormError when a module or parameter is used in a way that has no exact rule; `loop` then still works.
    """
    with scoring_mode(model, gradients=True), Taps(model) as taps:
        squares = taps.squared_norms(trajectory_logprobs(model, batch), retain_graph=False)
    return norms_from_squares(squares)
