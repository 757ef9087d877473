"""Score norms from one forward: the norm of the score with respect to the logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vcpo import core
from vcpo.batch import Batch
from vcpo.forward import forward_logits
from vcpo.score_norms.scoring import scoring_mode


def logit_norms(score_sq: Tensor, action_mask: Tensor) -> Tensor:
    """sqrt(sum_t score_sq_it) over action tokens: [n, s], [n, s] -> [n] fp64, in [0, sqrt(2 L_i)], no gradient.

    score_sq = 1 - 2 p(a) + sum_v p(v)^2 as `core.token_logprobs(..., with_score_sq=True)` gives it: the squared norm of
    grad log pi(a) with respect to the logits (after temperature). A proxy for the norm over the parameters
    (arXiv 2602.17616 uses the latter). What stands at masked positions is never read.
    """
    mask = core.check_rows(action_mask, score_sq=score_sq)
    per_token = torch.where(mask, score_sq.detach().double(), 0.0).clamp(min=0)
    return per_token.sum(1).sqrt()


def logit(model: nn.Module, batch: Batch) -> Tensor:
    """Score-norm proxy of each trajectory from a forward without gradients: [n] fp64, >= 0; see `logit_norms`."""
    ids = torch.where(batch.attention_mask.bool(), batch.input_ids, 0)
    with scoring_mode(model, gradients=False):
        logits = forward_logits(model, batch.input_ids, batch.attention_mask)
        _, score_sq = core.token_logprobs(logits, ids, temperature=batch.temperature, with_score_sq=True)
    return logit_norms(score_sq, batch.action_mask)
