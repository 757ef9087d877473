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
        asked = _asked(d)
        x, d = run.tokens(run.input)[:, asked], d[:, asked]
        left, right = (x, d) if transposed else (d, x)
        found.append(Outer("weight", left, right, input_is_left=transposed, last=run.last_gram))
    if "bias" in run.wanted:
        found.append(bias(d))
    return found


def _asked(d: Tensor) -> slice:
    """Without the tokens at either end that no trajectory has a gradient at: prompts, at the head and in the last layer.

    d: [n, T, q]. One feature tells where to look, the rest is looked at there alone.
    """
    tokens = d.shape[1]
    some = (d[:, :, :1] != 0).any(2).any(0).nonzero().flatten().tolist() or [0]
    first, end = some[0], some[-1] + 1
    if first > 0 and bool((d[:, :first] != 0).any()):
        first = 0
    if end < tokens and bool((d[:, end:] != 0).any()):
        end = tokens
    return slice(first, end)


def bias(d: Tensor) -> Part:
    """sum_t d_t: d [n, T, q]."""
    return Sums("bias", upcast(d).sum(1))
