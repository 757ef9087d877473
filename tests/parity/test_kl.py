"""Per-token KL estimates against 50-digit arithmetic, verl, TRL, OpenRLHF and AReaL.

Peers clamp their estimates; ours do not, so the clamp is applied here, where a case says that the peer has one. Means over
tokens and rows are taken here too: how losses aggregate is not this family's question.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vcpo import core

FAMILY = "kl"


def seq_mean(per_row: Tensor, mask: Tensor) -> Tensor:
    """Mean over the rows that have actions."""
    return per_row.sum() / mask.any(1).sum().clamp(min=1)


AGGREGATIONS = {
    "token-mean": lambda x, m: core.masked_mean(x.flatten(), m.flatten()),
    "seq-mean-token-sum": lambda x, m: seq_mean(core.masked_sum(x, m), m),
    "seq-mean-token-mean": lambda x, m: seq_mean(core.masked_mean(x, m), m),
    "all-rows-token-mean": lambda x, m: core.masked_mean(x, m).mean(),
    "constant-length-16": lambda x, m: core.masked_sum(x, m).sum() / (len(x) * 16),
}


def arguments(case) -> tuple[Tensor, Tensor, Tensor]:
    learner = case.inputs["log_prob"].clone().requires_grad_()
    return learner, case.inputs["ref_log_prob"], case.inputs["mask"].bool()


def check_loss(case, per_token: Tensor, learner: Tensor, mask: Tensor, aggregation: str, rtol: float) -> None:
    loss = AGGREGATIONS[aggregation](per_token, mask)
    loss.backward()
    assert learner.grad is not None
    tolerance = {"rtol": rtol, "atol": rtol * 1e-2}
    torch.testing.assert_close(loss.detach(), torch.tensor(case.outputs["loss"], dtype=torch.float64), **tolerance)
    torch.testing.assert_close(learner.grad, case.outputs["grad"], **tolerance)
    assert (learner.grad[~mask] == 0).all()


def check_per_token(case, per_token: Tensor, mask: Tensor, rtol: float, atol: float = 0.0) -> None:
    torch.testing.assert_close(per_token.detach()[mask], case.outputs["per_token"][mask], rtol=rtol, atol=atol)


def check_exact(case) -> None:
    learner, ref, mask = arguments(case)
    per_token = core.divergences[case.params["kind"]](learner, ref, mask).detach()
    # 1e-15: half an ulp of the log-probs themselves, of which k1 is a difference.
    torch.testing.assert_close(per_token, case.outputs["per_token"], rtol=1e-12, atol=1e-15)
    for name in ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean"):
        ours = AGGREGATIONS[name.replace("_", "-")](per_token, mask)
        torch.testing.assert_close(float(ours), case.outputs[name], rtol=1e-12, atol=1e-15)


def check_verl(case) -> None:
    learner, ref, mask = arguments(case)
    kind = case.params["kind"]
    name = kind.removesuffix("+")
    per_token = core.divergences["k1" if name == "abs" else name](learner, ref, mask)
    per_token = per_token.abs() if name == "abs" else per_token
    if name == "k3":
        per_token = per_token.clamp(-10, 10)
    if kind.endswith("+"):  # the value of one estimate with the gradient of k2
        k2 = core.kl_k2(learner, ref, mask)
        per_token = k2 - k2.detach() + per_token.detach()
    check_per_token(case, per_token, mask, 1e-10, 1e-14)
    check_loss(case, per_token, learner, mask, case.params["agg"], 1e-10)


def check_trl(case) -> None:
    learner, ref, mask = arguments(case)
    aggregation = {"grpo": "all-rows-token-mean", "dapo": "token-mean", "dr_grpo": "constant-length-16"}
    check_loss(case, core.kl_k3(learner, ref, mask), learner, mask, aggregation[case.params["loss_type"]], 1e-10)


def check_openrlhf(case) -> None:
    learner, ref, mask = arguments(case)
    per_token = core.divergences[case.params["kind"]](learner, ref, mask).clamp(-10, 10)
    check_per_token(case, per_token, mask, 1e-5, 1e-6)  # fp32 inside
    check_loss(case, per_token, learner, mask, "token-mean", 1e-5)


def check_areal(case) -> None:
    learner, ref, mask = arguments(case)
    per_token = core.divergences[case.params["kind"]](learner, ref, mask)
    per_token = per_token.clamp(-10, 10) if case.params["clamp"] else per_token
    check_per_token(case, per_token, mask, 1e-5, 1e-6)  # fp32 inside


CHECKS = {
    "exact.kl": check_exact,
    "verl.kl": check_verl,
    "trl.kl": check_trl,
    "openrlhf.kl": check_openrlhf,
    "areal.kl": check_areal,
}


def test_kl_agrees(case):
    if case.fn not in CHECKS:
        pytest.fail(f"no check for {case.fn}")
    CHECKS[case.fn](case)


def test_nothing_is_skipped(skipped):
    assert skipped == {}
