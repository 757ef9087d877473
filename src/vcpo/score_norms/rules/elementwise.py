"""Norm layers: the weight multiplies feature by feature, so a trajectory's gradient is small enough to form."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from vcpo.score_norms.kernels import upcast
from vcpo.score_norms.module_run import ModuleRun
from vcpo.score_norms.parts import Part, Sums


def layer_norm(run: ModuleRun) -> list[Part]:
    """torch.nn.LayerNorm. weight: || sum_t d_t * xhat_t ||^2, bias: || sum_t d_t ||^2."""
    module = run.module
    assert isinstance(module, nn.LayerNorm)
    return _affine(run, lambda x: F.layer_norm(x, module.normalized_shape, eps=module.eps))


def rms_norm(run: ModuleRun) -> list[Part]:
    """torch.nn.RMSNorm. weight: || sum_t d_t * xhat_t ||^2."""
    module = run.module
    assert isinstance(module, nn.RMSNorm)
    return _affine(run, lambda x: F.rms_norm(x, list(module.normalized_shape), eps=module.eps))


def elementwise(run: ModuleRun) -> list[Part]:
    """A module whose only parameter is a weight [p] that broadcasts against [..., p], each feature with its own.

    The module runs once more with one copy of the weight per trajectory, and the copies take the gradients: whether
    it multiplies by w or by 1 + w is the module's own affair.
    """
    x, d = upcast(run.rows(run.input)), upcast(run.rows(run.grad))
    weight = upcast(run.module.get_parameter("weight").detach())
    copies = weight.expand(run.n, *[1] * (x.ndim - 2), -1).contiguous().requires_grad_()
    with torch.enable_grad():
        output = functional_call(run.module, {"weight": copies}, (x,))
    (grad,) = torch.autograd.grad(output, copies, d)
    return [Sums("weight", grad.reshape(run.n, *weight.shape))]


def _affine(run: ModuleRun, normalise: Callable[[Tensor], Tensor]) -> list[Part]:
    d = upcast(run.rows(run.grad))
    shape = run.module.get_parameter(run.wanted[0]).shape
    found: list[Part] = []
    if "weight" in run.wanted:
        xhat = upcast(normalise(run.rows(run.input)))  # not upcast before: the default eps goes by the input's dtype
        found.append(Sums("weight", (d * xhat).reshape(run.n, -1, *shape).sum(1)))
    if "bias" in run.wanted:
        found.append(Sums("bias", d.reshape(run.n, -1, *shape).sum(1)))
    return found
