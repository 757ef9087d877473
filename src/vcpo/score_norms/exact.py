"""Exact score norms inside the one backward of the update."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vcpo.batch import Batch
from vcpo.score_norms.gradient_sum import GradientSum
from vcpo.score_norms.parts import Share
from vcpo.score_norms.scoring import scoring_mode, trajectory_logprobs
from vcpo.score_norms.taps import Taps, norms_from_squares


def exact(model: nn.Module, batch: Batch) -> Tensor:
    """Score norm of each trajectory: [n] fp64, >= 0; equal to `loop` up to rounding.

    Called like this it gives the norms alone, as `two_pass` does; what it is for is `Taps.single_pass`, where the same
    backward also gives the gradient with coefficients made of the norms (VarianceControl with score_norms="exact").
    The model's mode and every .grad are left as found. ScoreNormError when a module or parameter is used in a way that
    has no exact rule; `loop` then still works.
    """
    with scoring_mode(model, gradients=True), Taps(model) as taps:
        logprobs = trajectory_logprobs(model, batch)
        zeros = torch.zeros(len(logprobs), dtype=torch.float64, device=logprobs.device)
        unused = GradientSum(taps.parameters)
        everyone = Share(slice(0, len(zeros)), zeros, zeros, unused.slot, unused.slot)
        return norms_from_squares(taps.single_pass(logprobs, [everyone]).squares)
