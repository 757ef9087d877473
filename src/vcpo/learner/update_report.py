"""From what each row turned out to be to the numbers of one step; pure, on tensors of the whole batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vcpo import core
from vcpo.core.masking import masked_fill, masked_mean, masked_sum
from vcpo.learner.open_batch import COLUMNS, OpenBatch
from vcpo.metrics import UpdateReport


@dataclass(frozen=True)
class StepOutcome:
    """What `step` did; see UpdateReport for the meaning of each."""

    policy_version: int
    step: int
    skipped: str | None
    moments: core.WeightMoments
    lr_scale: float
    lr: float
    scales_lr: bool
    grad_norm: float
    grad_clip: float | None
    grad_clipped: bool
    reference: float


@torch.no_grad()
def row_figures(learner_logprobs: Tensor, sampler_logprobs: Tensor, action_mask: Tensor) -> dict[str, Tensor]:
    """Per-row sufficient statistics of one micro-batch: [m, s] each -> named [m]; sums, so that they merge exactly.

    kl_k1 and kl_k3 estimate KL(mu || pi) from the sampler's own tokens: k1 = -l, k3 = e^l - 1 - l.
    """
    ratios = core.log_ratios(learner_logprobs, sampler_logprobs, action_mask)
    mask = action_mask.bool()
    held = masked_fill(ratios, mask, -math.inf).double()
    return {
        "log_weight": ratios.sum(1),
        "log_ratio_abs_sum": ratios.abs().sum(1),
        "kl_k1_sum": -ratios.sum(1),
        "kl_k3_sum": masked_sum(torch.expm1(ratios) - ratios, mask),
        "token_log_m1": held.logsumexp(1),
        "token_log_m2": (2 * held).logsumexp(1),
        "sampler_logprob_sum": masked_sum(sampler_logprobs, mask),
    }


@torch.no_grad()
def make_report(
    open_batch: OpenBatch, table: Tensor, baseline: Tensor, outcome: StepOutcome, *, cap: float
) -> UpdateReport:
    """UpdateReport of the whole batch: table [B, columns] of all ranks, baseline [B]."""
    known = open_batch.known
    column = {name: table[:, i] for i, name in enumerate(COLUMNS)}
    log_weights = column["log_weight"]
    bad = core.quarantined(log_weights)
    carries = ~bad & (known.lengths > 0)
    scorable = ~known.unscorable
    advantage = torch.where(known.factors > 0, (known.rewards - baseline) / known.scales, 0.0)
    informative = (known.factors > 0) & carries
    tokens = max(int(known.lengths[carries].sum()), 1)
    loss = -torch.where(
        known.factors > 0, known.factors * (known.rewards - baseline) * column["weighted_logprob"], 0.0
    ).sum()
    norms = column["score_norm"]
    has_norms = carries & norms.isfinite()
    return UpdateReport(
        policy_version=outcome.policy_version,
        step=outcome.step,
        skipped=outcome.skipped,
        loss=float(loss) + open_batch.extra_loss,
        reward_mean=float(masked_mean(known.rewards, scorable)),
        reward_std=float(known.rewards[scorable].std(correction=0)) if bool(scorable.any()) else 0.0,
        advantage_abs_mean=float(advantage.nan_to_num(0.0).abs().mean()),
        n_trajectories=known.size,
        n_groups=len(known.group_ids.unique()),
        n_tokens=known.tokens,
        quarantined=int(bad.sum()),
        unscorable=int(known.unscorable.sum()),
        empty=int((known.lengths == 0).sum()),
        zero_variance_groups=len(known.group_ids[known.zero_variance & scorable].unique()),
        ess=float(outcome.moments.ess),
        ess_ratio=float(outcome.moments.ess_ratio),
        ess_ratio_truncated=float(core.ess_ratio(log_weights.clamp(max=math.log(cap)).where(~bad, torch.nan))),
        ess_ratio_informative=float(core.ess_ratio(log_weights[informative])) if bool(informative.any()) else 0.0,
        ess_ratio_token=_token_ess_ratio(column, carries, tokens),
        log_weight_mean=float(masked_mean(log_weights, carries)),
        log_weight_std=float(log_weights[carries].std(correction=0)) if bool(carries.any()) else 0.0,
        log_weight_max=float(log_weights[carries].max()) if bool(carries.any()) else 0.0,
        log_ratio_abs_mean=float(masked_sum(column["log_ratio_abs_sum"], carries)) / tokens,
        weight_mean=float(masked_mean(log_weights.exp(), carries)),
        truncated_share=float(masked_mean((log_weights > math.log(cap)).double(), carries)),
        kl_k1=float(masked_sum(column["kl_k1_sum"], carries)) / tokens,
        kl_k3=float(masked_sum(column["kl_k3_sum"], carries)) / tokens,
        score_norm_mean=float(masked_mean(norms, has_norms)) if bool(has_norms.any()) else None,
        score_norm_max=float(norms[has_norms].max()) if bool(has_norms.any()) else None,
        score_bias=_score_bias(log_weights, norms, has_norms, cap),
        lr_scale=outcome.lr_scale,
        lr=outcome.lr,
        lr_effective=outcome.lr * outcome.lr_scale if outcome.scales_lr or outcome.skipped else outcome.lr,
        grad_norm=outcome.grad_norm,
        grad_clip=outcome.grad_clip,
        grad_clipped=int(outcome.grad_clipped),
        reference=outcome.reference,
    )


def _token_ess_ratio(column: dict[str, Tensor], carries: Tensor, tokens: int) -> float:
    """Kish's ratio over single tokens: blind to drift that adds up along a trajectory, kept to be shown beside ess_ratio."""
    if not bool(carries.any()):
        return 0.0
    log_m1 = column["token_log_m1"][carries].logsumexp(0)
    log_m2 = column["token_log_m2"][carries].logsumexp(0)
    ratio = float((2 * log_m1 - log_m2).exp()) / tokens
    return ratio if math.isfinite(ratio) else 0.0


def _score_bias(log_weights: Tensor, norms: Tensor, use: Tensor, cap: float) -> float | None:
    """Share of sum_i w_i s_i that truncation cuts away, in [0, 1): it bounds the mean score that the baseline neglects."""
    if not bool((use & (log_weights > -math.inf)).any()):
        return None
    lw, s = log_weights[use], norms[use]
    top = lw.max()
    whole = ((lw - top).exp() * s).sum()
    kept = ((lw.clamp(max=math.log(cap)) - top).exp() * s).sum()
    return float(1 - kept / whole) if float(whole) > 0 else None
