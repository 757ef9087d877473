"""Importance weights and rejection against verl, TRL and AReaL; their loss weights and masks, not their metrics.

What is translated here: verl compares ratio bounds with mu / pi, so learner and sampler change places; verl writes the
two bounds as "low_high", and one bound b of a ratio as [1 / b, b]; TRL writes 1 where nothing is trained, we 0; AReaL's
sequence ratio is the geometric mean, its k3 that of KL(learner || sampler), and "filtered" counts clamped tokens too. A sampler
log-prob of NaN is a ratio of 1 in TRL; ours quarantines the trajectory.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vcpo import core

FAMILY = "importance_weights"
UNBOUNDED = 1e300


def arguments(case) -> tuple[Tensor, Tensor, Tensor]:
    return case.inputs["old_log_prob"], case.inputs["rollout_log_prob"], case.inputs["mask"].bool()


def bounds(threshold: float | str) -> tuple[float | None, float]:
    """verl's "low_high" or one number."""
    parts = [float(x) for x in str(threshold).split("_")]
    return (parts[0], parts[1]) if len(parts) == 2 else (None, parts[0])


def verl_weights(case, learner: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
    low, cap = bounds(case.params["rollout_is_threshold"])
    kind = "truncate" if low is None else "mask"
    treatment = core.weight_treatments[f"{case.params['rollout_is']}_{kind}"]
    weights = treatment(learner, sampler, mask, cap=cap, low=low or 0.0)
    return core.batch_normalized(weights, mask) if case.params.get("rollout_is_batch_normalize") else weights


def verl_kept(rule: str, threshold: str, learner: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
    level, measure = rule.rsplit("_", 1)
    level = level.removeprefix("seq_")
    low, high = bounds(threshold)
    if measure == "k1":
        low = 1 / high if low is None else low
        return core.kept_actions(sampler, learner, mask, level=level, measure="ratio", low=low, high=high)
    return core.kept_actions(learner, sampler, mask, level=level, measure=measure, high=high)


def check_verl(case) -> None:
    learner, sampler, mask = arguments(case)
    kept = mask
    if "rollout_rs" in case.params:
        rules = case.params["rollout_rs"].split(",")
        thresholds = str(case.params["rollout_rs_threshold"]).split(",")
        for rule, threshold in zip(rules, thresholds, strict=True):
            kept = kept & verl_kept(rule, threshold, learner, sampler, mask)
    assert torch.equal(kept, case.outputs["mask"].bool())
    if "rollout_is" in case.params:
        weights = verl_weights(case, learner, sampler, mask)
        ours = torch.where(mask, weights, 0.0)
        torch.testing.assert_close(ours, case.outputs["weights"], rtol=1e-10, atol=1e-12)
    else:
        assert case.outputs["weights"] is None


def check_trl(case) -> None:
    learner, sampler, mask = arguments(case)
    low, cap = case.params.get("vllm_clip_min") or 0.0, case.params["vllm_clip_max"]
    weights = core.weight_treatments[case.params["vllm_mode"]](learner, sampler, mask, cap=cap, low=low)
    expected = case.outputs["importance_sampling_ratio"]
    quarantined = core.row_is_quarantined(learner, sampler, mask)
    weights = torch.where(mask if weights.shape == mask.shape else mask.any(1, keepdim=True), weights, 1.0)
    torch.testing.assert_close(weights[~quarantined], expected[~quarantined], rtol=1e-10, atol=1e-12)
    known = mask & ~sampler.isnan()
    if quarantined.any():
        assert (weights[quarantined][mask[quarantined]] == 0).all()
    assert torch.equal(quarantined, (mask & ~known).any(1))


def check_areal(case) -> None:
    learner, sampler, mask = arguments(case)
    rule = {"level": "token", "action": "mask", "metric": "ratio", "agg": "mean", "lower": None} | case.params["rs"]
    low, high, measure = rule["lower"] or 0.0, rule["upper"], rule["metric"].removeprefix("kl_")
    level = rule["agg"] if rule["level"] == "sequence" else "token"
    kind = "geometric" if rule["level"] == "sequence" and measure == "ratio" else "token"
    clamp = rule["action"] == "clamp"
    cap, floor = (high, low) if clamp else (UNBOUNDED, 0.0)
    weights = core.weight_treatments[f"{kind}_truncate"](learner, sampler, mask, cap=cap, low=floor)
    pair = (sampler, learner) if measure == "k3" else (learner, sampler)
    inside = core.kept_actions(*pair, mask, level=level, measure=measure, low=low, high=high)
    kept = mask if clamp else inside
    assert torch.equal(kept, case.outputs["mask"].bool())
    torch.testing.assert_close(
        torch.where(kept, weights, 0.0), torch.where(kept, case.outputs["weights"], 0.0), rtol=1e-5, atol=1e-7
    )
    lost = 1 - inside.sum() / mask.sum()
    assert math.isclose(float(lost), case.outputs["filtered_fraction"], abs_tol=1e-6)


CHECKS = {"verl.is_weights": check_verl, "trl.vllm_ratio": check_trl, "areal.rejection": check_areal}


def test_weights_agree(case):
    if case.fn not in CHECKS:
        pytest.fail(f"no check for {case.fn}")
    CHECKS[case.fn](case)


def test_nothing_is_skipped(skipped):
    assert skipped == {}
