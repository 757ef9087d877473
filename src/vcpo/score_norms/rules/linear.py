"""Linear layers, and GPT-2's Conv1D, which is one with its weight transposed."""

from __future__ import annotations

from torch import Tensor

from vcpo.score_norms.module_run import ModuleRun
from vcpo.score_norms.rules.kernels import matrix_sq_norms, vector_sq_norms


def linear(run: ModuleRun) -> dict[str, Tensor]:
    """weight: || sum_t d_t x_t^T ||^2, bias: || sum_t d_t ||^2, over the tokens of each trajectory."""
    d = run.tokens(run.grad)
    found = {}
    if "weight" in run.wanted:
        found["weight"] = matrix_sq_norms(run.tokens(run.input), d)
    if "bias" in run.wanted:
        found["bias"] = vector_sq_norms(d)
    return found
