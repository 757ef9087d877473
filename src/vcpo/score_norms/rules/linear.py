"""Linear layers, and GPT-2's Conv1D, which is one with its weight transposed."""

from __future__ import annotations

from torch import Tensor

from vcpo.score_norms.kernels import upcast
from vcpo.score_norms.module_run import ModuleRun
from vcpo.score_norms.parts import Outer, Part, Sums


def linear(run: ModuleRun) -> list[Part]:
    """torch.nn.Linear. weight [q, p]: sum_t d_t x_t^T, bias: sum_t d_t, over the tokens of each trajectory."""
    return _parts(run, transposed=False)


def conv1d(run: ModuleRun) -> list[Part]:
    """transformers' Conv1D. weight [p, q]: sum_t x_t d_t^T."""
    return _parts(run, transposed=True)


def _parts(run: ModuleRun, *, transposed: bool) -> list[Part]:
    d = run.tokens(run.grad)
    found: list[Part] = []
    if "weight" in run.wanted:
        x = run.tokens(run.input)
        left, right = (x, d) if transposed else (d, x)
        found.append(Outer("weight", left, right, input_is_left=transposed, last=run.last_gram))
    if "bias" in run.wanted:
        found.append(bias(d))
    return found


def bias(d: Tensor) -> Part:
    """sum_t d_t: d [n, T, q]."""
    return Sums("bias", upcast(d).sum(1))
