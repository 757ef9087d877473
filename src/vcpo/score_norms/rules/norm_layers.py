"""Norm layers: the weight multiplies feature by feature, so a trajectory's gradient is small enough to form."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
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


def rms_norm_of_transformers(run: ModuleRun) -> list[Part]:
    """transformers' RMSNorms over the last dimension, w xhat or (1 + w) xhat. weight: sum_t d_t * xhat_t.

    They normalise in fp32 whatever comes in; so is it here.
    """
    module = run.module
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    x, d = run.tokens(run.input.to(torch.float32)), upcast(run.tokens(run.grad))
    features = x.shape[-1]
    rstd = (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_() / features + eps).rsqrt_()
    # Three passes over [n, T, p] and one temporary: this runs for every norm of every layer.
    gradients = (d * rstd).mul_(x).sum(1)
    return [Sums("weight", gradients)]


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
