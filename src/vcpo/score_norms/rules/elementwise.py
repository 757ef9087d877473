"""Norm layers: the weight multiplies feature by feature, so a trajectory's gradient is small enough to form."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from vcpo.score_norms.module_run import ModuleRun
from vcpo.score_norms.rules.kernels import upcast, vector_sq_norms


def layer_norm(run: ModuleRun) -> dict[str, Tensor]:
    """torch.nn.LayerNorm. weight: || sum_t d_t * xhat_t ||^2, bias: || sum_t d_t ||^2."""
    module = run.module
    assert isinstance(module, nn.LayerNorm)
    return _affine(run, lambda x: F.layer_norm(x, module.normalized_shape, eps=module.eps))


def rms_norm(run: ModuleRun) -> dict[str, Tensor]:
    """torch.nn.RMSNorm. weight: || sum_t d_t * xhat_t ||^2."""
    module = run.module
    assert isinstance(module, nn.RMSNorm)
    return _affine(run, lambda x: F.rms_norm(x, list(module.normalized_shape), eps=module.eps))


def elementwise(run: ModuleRun) -> dict[str, Tensor]:
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
    return {"weight": grad.flatten(1).square().sum(1, dtype=torch.float64)}


def _affine(run: ModuleRun, normalise: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    d = upcast(run.rows(run.grad))
    features = run.module.get_parameter(run.wanted[0]).numel()
    found = {}
    if "weight" in run.wanted:
        xhat = upcast(normalise(run.rows(run.input)))  # not upcast before: the default eps goes by the input's dtype
        found["weight"] = vector_sq_norms((d * xhat).reshape(run.n, -1, features))
    if "bias" in run.wanted:
        found["bias"] = vector_sq_norms(d.reshape(run.n, -1, features))
    return found
