"""Embedding tables: gradients of equal token ids within a trajectory add before they are squared."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vcpo.score_norms.module_run import ModuleRun
from vcpo.score_norms.parts import Part, TokenTable


def token_gradients(run: ModuleRun) -> tuple[Tensor, Tensor]:
    """Token ids [n, T] and what each adds to the gradient of its row of the table [n, T, p]."""
    module = run.module
    if getattr(module, "scale_grad_by_freq", False) or getattr(module, "max_norm", None) is not None:
        raise run.error("uses scale_grad_by_freq or max_norm, which mixes trajectories")
    ids = run.rows(run.input).reshape(run.n, -1)
    d = run.tokens(run.grad)
    padding = getattr(module, "padding_idx", None)
    if padding is not None:  # autograd gives this row of the table no gradient
        d = torch.where((ids == padding)[..., None], 0, d)
    return ids, d


def scaled_token_gradients(run: ModuleRun) -> tuple[Tensor, Tensor]:
    """The same for a table whose output is multiplied by `module.embed_scale`."""
    ids, d = token_gradients(run)
    return ids, d * run.module.get_buffer("embed_scale").to(d.dtype)


def embedding(run: ModuleRun) -> list[Part]:
    """torch.nn.Embedding. weight: d_t in the row of each token."""
    return [TokenTable("weight", *token_gradients(run))]


def scaled_embedding(run: ModuleRun) -> list[Part]:
    """Gemma3's embedding: the table's output times `embed_scale`."""
    return [TokenTable("weight", *scaled_token_gradients(run))]


TOKEN_GRADIENTS: dict[object, Callable[[ModuleRun], tuple[Tensor, Tensor]]] = {
    embedding: token_gradients,
    scaled_embedding: scaled_token_gradients,
}
