"""The oracle: one trajectory at a time, alone, one backward each. Slow and obviously right."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vcpo.batch import Batch
from vcpo.score_norms.scoring import scoring_mode, trainable_parameters, trajectory_logprobs


def loop(model: nn.Module, batch: Batch) -> Tensor:
    """Score norm of each trajectory by a backward of its own: [n] fp64, >= 0.

    s_i = || grad_theta sum_t log pi(a_it) || over all trainable parameters (arXiv 2602.17616). A row without action
    tokens gives 0. The model's mode and every .grad are left as found.
    """
    norms = torch.zeros(len(batch), dtype=torch.float64, device=batch.input_ids.device)
    for row in torch.nonzero(batch.action_lengths).flatten().tolist():
        norms[row] = sum(squared_norm(g) for g in trajectory_gradient(model, batch, row).values()) ** 0.5
    return norms


def trajectory_gradient(model: nn.Module, batch: Batch, row: int) -> dict[str, Tensor]:
    """Gradient of one trajectory's log-prob: parameter name -> gradient of its shape, 0 where it has no influence."""
    parameters = trainable_parameters(model)
    with scoring_mode(model, gradients=True):
        logprob = trajectory_logprobs(model, batch.rows([row])).sum()
        return gradients(logprob, parameters)


def gradients(scalar: Tensor, parameters: dict[str, nn.Parameter], *, retain_graph: bool = False) -> dict[str, Tensor]:
    """d scalar / d parameter under each name, without touching any .grad; 0 where there is no path."""
    found = torch.autograd.grad(scalar, list(parameters.values()), retain_graph=retain_graph, allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(parameters.items(), found, strict=True)
    }


def squared_norm(gradient: Tensor) -> float:
    """Squared Euclidean norm, summed in fp64."""
    return float(gradient.detach().double().square().sum())
