"""Baselines: what is subtracted from a trajectory's reward, chiefly the off-policy optimal one (arXiv 2602.17616).

All of them are a weighted mean of the rewards of a group (all trajectories of one prompt),

    b_g = sum_{i in g} v_i R_i / sum_{i in g} v_i,

and differ in v: 1 is the plain group mean, L the length-weighted one, a^2 s^2 the optimal one. v lives in log space and
is normalised by a softmax over the group: no epsilon, no overflow, and a common factor of all weights cancels.

The rules that hold for every baseline here, with R the row's own reward:
- An unscorable row (reward NaN or infinite) takes part in no statistic; its own entry is 0 and `advantages` gives it 0.
- A group without any v, a lone scorable row and a group of equal rewards get b = R for each row, hence no gradient.
- Statistics are fp64 inside; the result has the rewards' type and carries no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from vcpo.core.groups import float_type, group_index, group_max, group_softmax, group_spread, group_sum, scorable
from vcpo.core.masking import check_vector
from vcpo.core.weights import quarantined

BASELINE_WEIGHTS = ("paper", "estimator", "reference")


@torch.no_grad()
def weighted_baseline(rewards: Tensor, log_v: Tensor, group_ids: Tensor, *, leave_one_out: bool = False) -> Tensor:
    """Each group's mean reward under the weights v = exp(log_v), spread over its rows; all [n] -> [n].

    b_g = sum v_i R_i / sum v_i; with `leave_one_out` a row's own term is left out of both sums. log_v of -inf, +inf or
    NaN carries no weight. Concatenate (rewards, log_v, group_ids) of several micro-batches or ranks to get the baseline
    of groups that were cut: nothing else is needed. ValueError unless all three are vectors of one length.
    """
    check_vector(rewards=rewards, log_v=log_v, group_ids=group_ids)
    index, count = group_index(group_ids)
    values, known = scorable(rewards)
    usable = known & ~quarantined(log_v)
    log_v = torch.where(usable, log_v.double(), -math.inf)
    mean_of = _mean_of_others if leave_one_out else _mean
    mean, carried = mean_of(values, log_v, index, count)
    informative = carried & (group_spread(rewards, index, count) > 0)[index]
    return torch.where(informative & known, mean, values).to(float_type(rewards))


def _mean(values: Tensor, log_v: Tensor, index: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Weighted mean of each row's group, and whether anything there carries weight; [n], [n] bool."""
    v, total = group_softmax(log_v, index, count)
    mean = group_sum(v * values, index, count) / total.clamp(min=1)
    return mean[index], (total > 0)[index]


def _mean_of_others(values: Tensor, log_v: Tensor, index: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The same over the other rows of the group.

    Subtracting a row's own term is accurate only while the rest is not small against it. At most one row per group
    holds more than half of the weight; its baseline is the mean of the group without that row, summed afresh.
    """
    v, total = group_softmax(log_v, index, count)
    rest = total[index] - v
    dominant = v > rest
    without_dominant, others_carry = _mean(values, torch.where(dominant, -math.inf, log_v), index, count)
    mean = (group_sum(v * values, index, count)[index] - v * values) / torch.where(rest > 0, rest, 1.0)
    return torch.where(dominant, without_dominant, mean), torch.where(dominant, others_carry, rest > 0)


@torch.no_grad()
def log_baseline_weights(
    log_weights: Tensor,
    score_norms: Tensor,
    *,
    weights: str = "paper",
    cap: float | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Log of the weight each reward has in the optimal baseline; all [n] -> [n] fp64, -inf where a row carries none.

    log v_i = 2 log a_i + 2 log s_i (arXiv 2602.17616), with s_i the score norm, w_i = exp(log_weights_i) and

        "paper"      a_i = w_i                   the paper's formula
        "estimator"  a_i = min(w_i, cap)         the factor of the gradient really taken
        "reference"  a_i = w_i min(w_i, cap)     what the paper's released code computes: for reproduction only

    `lengths` (action tokens) divides a_i by L_i in every mode: give it where the loss divides by it. `cap` is the
    truncation of the loss weight; "paper" does not use it. No weight: log weight NaN, +inf or -inf; score norm 0 or
    not finite; length 0. ValueError: unknown `weights`, a missing or non-positive `cap`, shapes that do not agree.
    """
    check_vector(log_weights=log_weights, score_norms=score_norms, **({} if lengths is None else {"lengths": lengths}))
    log_w = log_weights.double()
    if weights == "paper":
        log_a = log_w
    elif weights == "estimator":
        log_a = log_w.clamp(max=_log_cap(weights, cap))
    elif weights == "reference":
        log_a = log_w + log_w.clamp(max=_log_cap(weights, cap))
    else:
        raise ValueError(f"unknown weights {weights!r}: use one of {', '.join(BASELINE_WEIGHTS)}")
    carries = log_w.isfinite() & score_norms.isfinite() & (score_norms > 0)
    if lengths is not None:
        carries = carries & (lengths > 0)
        log_a = log_a - torch.where(carries, lengths.double(), 1.0).log()
    log_s = torch.where(carries, score_norms.double(), 1.0).log()
    return torch.where(carries, 2 * (log_a + log_s), -math.inf)


def _log_cap(weights: str, cap: float | None) -> float:
    if cap is None:
        raise ValueError(
            f"weights={weights!r} needs cap, the truncation of the loss weight (8.0 in the paper), got None"
        )
    if not 0 < cap < math.inf:
        raise ValueError(f"cap must be a positive, finite number, got {cap}")
    return math.log(cap)


def optimal_baseline(
    rewards: Tensor,
    log_weights: Tensor,
    score_norms: Tensor,
    group_ids: Tensor,
    *,
    weights: str = "paper",
    cap: float | None = None,
    lengths: Tensor | None = None,
    leave_one_out: bool = False,
) -> Tensor:
    """The baseline that minimises the variance of a group's importance-weighted gradient; all [n] -> [n].

    b*_g = sum_{i in g} v_i R_i / sum_{i in g} v_i,  v_i = a_i^2 s_i^2 (arXiv 2602.17616): the argmin over b of
    sum_i ||a_i (R_i - b) g_i||^2, where s_i = ||g_i|| is the score norm and a_i the factor of g_i in the gradient. The
    modes of a_i (`weights`, `cap`, `lengths`) are those of `log_baseline_weights`, the exceptions those of this module.
    Range: within the rewards of the group. For one baseline over the whole batch give every row the same group id.
    `leave_one_out` takes b from the other members: unbiased, but of higher variance where it was measured.
    ValueError as `log_baseline_weights`, and for vectors of different lengths.
    """
    check_vector(rewards=rewards, log_weights=log_weights, score_norms=score_norms, group_ids=group_ids)
    log_v = log_baseline_weights(log_weights, score_norms, weights=weights, cap=cap, lengths=lengths)
    return weighted_baseline(rewards, log_v, group_ids, leave_one_out=leave_one_out)


def group_mean(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Mean reward of the row's group; [n], [n] -> [n]. The baseline of GRPO (arXiv 2402.03300) and Dr. GRPO."""
    return weighted_baseline(rewards, torch.zeros_like(rewards, dtype=torch.float64), group_ids)


def batch_mean(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Mean reward of the whole batch, whatever the groups; [n], [n] -> [n]."""
    check_vector(rewards=rewards, group_ids=group_ids)
    return group_mean(rewards, torch.zeros_like(group_ids))


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Mean reward of the other members of the row's group; [n], [n] -> [n]. The baseline of RLOO (arXiv 2402.14740).

    b_i = sum_{j != i} R_j / (N - 1); a row without scorable others gets its own reward.
    """
    return weighted_baseline(rewards, torch.zeros_like(rewards, dtype=torch.float64), group_ids, leave_one_out=True)


def length_weighted(rewards: Tensor, group_ids: Tensor, *, lengths: Tensor) -> Tensor:
    """Length-weighted mean reward of the row's group; all [n] -> [n]. The baseline of OPO (arXiv 2505.23585).

    b_g = sum L_i R_i / sum L_i, L_i the action tokens: the optimal baseline on policy where ||g_i||^2 grows like L_i.
    """
    check_vector(rewards=rewards, lengths=lengths)
    return weighted_baseline(rewards, lengths.double().log(), group_ids)


@torch.no_grad()
def second_best(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Second-largest reward of the group for its best row, the own reward for all others; [n], [n] -> [n].

    Only a best row that beats all others learns, by its margin: the pass@k objective with k = the group's size
    (arXiv 2503.19595). Two equal best rewards: no gradient.
    """
    check_vector(rewards=rewards, group_ids=group_ids)
    index, count = group_index(group_ids)
    values, known = scorable(rewards)
    best = known & (values == group_max(torch.where(known, values, -math.inf), index, count)[index])
    runner_up = group_max(torch.where(known & ~best, values, -math.inf), index, count)[index]
    alone_at_top = best & (group_sum(best.double(), index, count) == 1)[index] & ~runner_up.isneginf()
    return torch.where(alone_at_top, runner_up, values).to(float_type(rewards))


Baseline = Callable[..., Tensor]
"""f(rewards, group_ids, *, log_weights=None, score_norms=None, lengths=None, **params) -> [n]: the one signature of
`baselines`; each reads what it needs and names what is missing."""


def _from_rewards(baseline: Callable[[Tensor, Tensor], Tensor]) -> Baseline:
    """A baseline of rewards alone, under the common signature."""

    def f(
        rewards: Tensor,
        group_ids: Tensor,
        *,
        log_weights: Tensor | None = None,
        score_norms: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        return baseline(rewards, group_ids)

    f.__name__, f.__doc__ = baseline.__name__, baseline.__doc__
    return f


def _length_weighted(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    log_weights: Tensor | None = None,
    score_norms: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    return length_weighted(rewards, group_ids, lengths=_needed("length_weighted", lengths=lengths))


def _optimal(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    log_weights: Tensor | None = None,
    score_norms: Tensor | None = None,
    lengths: Tensor | None = None,
    weights: str = "paper",
    cap: float | None = None,
    leave_one_out: bool = False,
) -> Tensor:
    return optimal_baseline(
        rewards,
        _needed("optimal", log_weights=log_weights),
        _needed("optimal", score_norms=score_norms),
        group_ids,
        weights=weights,
        cap=cap,
        lengths=lengths,
        leave_one_out=leave_one_out,
    )


def _needed(baseline: str, **argument: Tensor | None) -> Tensor:
    (name, value), *_ = argument.items()
    if value is None:
        raise ValueError(f"the baseline {baseline!r} needs {name}, one number per trajectory; it was not given")
    return value


baselines: Mapping[str, Baseline] = {
    "optimal": _optimal,
    "group_mean": _from_rewards(group_mean),
    "leave_one_out": _from_rewards(leave_one_out),
    "length_weighted": _length_weighted,
    "batch_mean": _from_rewards(batch_mean),
    "second_best": _from_rewards(second_best),
}
