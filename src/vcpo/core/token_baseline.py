"""The optimal token baseline: one baseline per group and step instead of one per group (arXiv 2602.07078)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vcpo.core.groups import float_type, group_index, group_max, group_sum
from vcpo.core.masking import check_rows


@torch.no_grad()
def optimal_token_baseline(
    returns: Tensor,
    score_sq: Tensor,
    action_mask: Tensor,
    group_ids: Tensor,
    *,
    log_weights: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    """Per-token baseline of a group from cumulated squared score norms; returns, score_sq, mask [n, s] -> [n, s].

    b_g(k) = sum_i v_ik G_ik / sum_i v_ik,  v_ik = sum_{t <= k} w_it^2 q_it (arXiv 2602.07078), summed over the members
    that have a k-th action: G_ik the reward still to come, q_it the squared score norm of token t (for instance
    `score_sq` of `token_logprobs`), w_it = exp(log_weights), [n, s] per token or [n] per trajectory, 1 by default.
    `steps` [n, s] int says which tokens are compared; by default the k-th action with the k-th, so that padding and
    tool output do not matter. 0 at masked positions. A step that no member carries weight at has b = G. Tokens whose
    return, weight or norm is not a number carry none. ValueError when shapes do not agree.
    """
    mask = check_rows(action_mask, returns=returns, score_sq=score_sq)
    index, count = group_index(group_ids)
    if len(index) != len(mask):
        raise ValueError(f"need one group id for each of the {len(mask)} rows, got {len(index)}")
    v = _cumulated(score_sq, log_weights, mask, index, count)
    step = (mask.cumsum(1) - 1).clamp(min=0) if steps is None else steps.where(mask, 0)
    cell, cells = group_index((index.unsqueeze(1) * (step.max() + 1 if step.numel() else 1) + step).flatten())
    known = mask & returns.isfinite() & (v > 0)
    gain = torch.where(known, returns.double(), 0.0)
    total = group_sum(torch.where(known, v, 0.0).flatten(), cell, cells)
    summed = group_sum(torch.where(known, v * gain, 0.0).flatten(), cell, cells)
    mean = (summed / torch.where(total > 0, total, 1.0))[cell].view_as(gain)
    own = torch.where(returns.isfinite(), returns.double(), 0.0)
    baseline = torch.where((total > 0)[cell].view_as(mask), mean, own)
    return torch.where(mask, baseline, 0.0).to(float_type(returns))


def _cumulated(score_sq: Tensor, log_weights: Tensor | None, mask: Tensor, index: Tensor, count: int) -> Tensor:
    """v_ik relative to the largest weight of the group, so that no weight overflows; [n, s], 0 at masked positions."""
    lw = torch.zeros_like(score_sq, dtype=torch.float64) if log_weights is None else log_weights.double()
    lw = lw.unsqueeze(1) if lw.ndim == 1 else lw
    if lw.shape not in (score_sq.shape, (len(score_sq), 1)):
        raise ValueError(f"log_weights must be {tuple(score_sq.shape)} or [{len(score_sq)}], got {tuple(lw.shape)}")
    usable = mask & lw.isfinite() & score_sq.isfinite() & (score_sq > 0)
    lw = torch.where(usable, lw, -math.inf)
    highest = lw.amax(1) if lw.shape[1] else lw.new_full((len(lw),), -math.inf)
    top = group_max(highest, index, count)[index].unsqueeze(1)
    q = torch.where(usable, score_sq.double() * (2 * (lw - top)).exp(), 0.0)
    return q.cumsum(1).masked_fill(~mask, 0.0)
