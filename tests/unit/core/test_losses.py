"""Policy losses: the written formula by autodiff, what may not matter, and the metrics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from vcpo.core.aggregation import aggregation_factors, aggregations
from vcpo.core.losses import policy_losses
from vcpo.core.weights import trajectory_log_weights, truncated_weights, weight_treatments

NAN, INF = math.nan, math.inf
AGGREGATIONS = {name: {"length": 10.0} if name.endswith("norm") else {} for name in aggregations}


def random_rows(
    n: int = 4, s: int = 6, *, seed: int = 0, spread: float = 0.3, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """A ragged batch with a hole and advantages of both signs; positional order of the losses' arguments."""
    generator = torch.Generator().manual_seed(seed)
    learner = -torch.rand(n, s, generator=generator, dtype=torch.float64) * 3
    sampler = learner + spread * torch.randn(n, s, generator=generator, dtype=torch.float64)
    mask = torch.arange(s) < torch.randint(2, s + 1, (n, 1), generator=generator)
    mask[0] = torch.arange(s) % 2 == 0
    adv = torch.randn(n, generator=generator, dtype=torch.float64)
    adv[:2] = adv[:2].abs() * torch.tensor([1, -1])
    return {"learner": learner.to(dtype), "sampler": sampler.to(dtype), "adv": adv.to(dtype), "mask": mask}


def value_and_grad(name: str, rows: dict[str, Tensor], **params: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    learner = rows["learner"].clone().requires_grad_()
    loss, metrics = policy_losses[name](learner, rows["sampler"], rows["adv"], rows["mask"], **params)
    (grad,) = torch.autograd.grad(loss, learner)
    return loss.detach(), grad, metrics


def naive_aggregate(x: Tensor, mask: Tensor, aggregation: str, length: float | None = None) -> Tensor:
    rows = [x[i][mask[i]] for i in range(len(x))]
    if aggregation == "token_mean":
        return torch.cat(rows).mean()
    per_row = {"seq_mean_token_mean": lambda r: r.mean(), "seq_mean_token_sum": lambda r: r.sum()}
    f = per_row.get(aggregation, lambda r: r.sum() / (length or NAN))
    return torch.stack([f(r) if len(r) else x.new_zeros(()) for r in rows]).mean()


class TestReinforce:
    @pytest.mark.parametrize("aggregation", AGGREGATIONS)
    def test_loss_and_gradient_are_those_of_the_formula(self, aggregation: str) -> None:
        rows = random_rows(spread=1.5)
        loss, grad, _ = value_and_grad("reinforce", rows, aggregation=aggregation, cap=2.0, **AGGREGATIONS[aggregation])
        learner = rows["learner"].clone().requires_grad_()
        w = truncated_weights(trajectory_log_weights(rows["learner"], rows["sampler"], rows["mask"]), 2.0)
        assert (w == 2).any()
        assert (w < 2).any()
        written = naive_aggregate(
            -(w * rows["adv"])[:, None] * learner, rows["mask"], aggregation, **AGGREGATIONS[aggregation]
        )
        torch.testing.assert_close(loss, written)
        torch.testing.assert_close(grad, torch.autograd.grad(written, learner)[0], rtol=1e-13, atol=1e-16)

    @pytest.mark.parametrize("treatment", weight_treatments)
    def test_every_weight_treatment_multiplies_the_gradient(self, treatment: str) -> None:
        rows = random_rows(spread=1.0)
        _, grad, _ = value_and_grad(
            "reinforce", rows, weight_treatment=treatment, cap=1.5, low=0.5, aggregation="seq_mean_token_sum"
        )
        w = weight_treatments[treatment](rows["learner"], rows["sampler"], rows["mask"], cap=1.5, low=0.5)
        expected = torch.where(rows["mask"], -w * rows["adv"][:, None] / 4, 0.0)
        torch.testing.assert_close(grad, expected, rtol=1e-13, atol=0)

    def test_the_defaults_are_the_papers(self) -> None:
        rows = random_rows(spread=3.0)
        default = value_and_grad("reinforce", rows)[1]
        named = value_and_grad(
            "reinforce", rows, weight_treatment="sequence_truncate", cap=8.0, aggregation="seq_mean_token_mean"
        )[1]
        assert torch.equal(default, named)

    def test_coefficients_assemble_the_gradient(self) -> None:
        """What `linear_in_coefficients` promises: -sum_i c_i grad L_i, with c_i = f_i w^_i A_i."""
        rows = random_rows()
        lw = trajectory_log_weights(rows["learner"], rows["sampler"], rows["mask"])
        f = aggregation_factors(rows["mask"].sum(1), aggregation="seq_mean_token_mean")
        c = f * truncated_weights(lw, 8.0) * rows["adv"]
        assert policy_losses["reinforce"].linear_in_coefficients
        torch.testing.assert_close(value_and_grad("reinforce", rows)[1], torch.where(rows["mask"], -c[:, None], 0.0))

    def test_a_row_of_weight_0_is_silent_even_at_log_prob_minus_inf(self) -> None:
        rows = random_rows()
        rows["learner"][1, 0] = -INF
        loss, grad, metrics = value_and_grad("reinforce", rows)
        assert loss.isfinite()
        assert not grad[1].any()
        assert metrics["quarantined_share"] == 0

    def test_unknown_treatment_lists_the_known(self) -> None:
        with pytest.raises(ValueError, match="unknown weight_treatment 'tis': use one of none, sequence_truncate"):
            value_and_grad("reinforce", random_rows(), weight_treatment="tis")


class TestPpoClip:
    @pytest.mark.parametrize("aggregation", AGGREGATIONS)
    @pytest.mark.parametrize("dual_clip", [None, 1.5])
    def test_loss_and_gradient_are_those_of_the_formula(self, aggregation: str, dual_clip: float | None) -> None:
        rows = random_rows(spread=0.8)
        loss, grad, metrics = value_and_grad(
            "ppo_clip",
            rows,
            clip_low=0.1,
            clip_high=0.3,
            dual_clip=dual_clip,
            aggregation=aggregation,
            **AGGREGATIONS[aggregation],
        )
        learner, adv = rows["learner"].clone().requires_grad_(), rows["adv"][:, None].expand(rows["mask"].shape)
        r = (learner - rows["sampler"]).exp()
        objective = torch.where(adv > 0, r.clamp(max=1.3), r.clamp(min=0.9)) * adv  # min(r A, clip(r) A), by cases
        if dual_clip is not None:
            objective = torch.where(adv > 0, objective, objective.clamp(min=dual_clip * adv))
        written = naive_aggregate(-objective, rows["mask"], aggregation, **AGGREGATIONS[aggregation])
        torch.testing.assert_close(loss, written)
        torch.testing.assert_close(grad, torch.autograd.grad(written, learner)[0], rtol=1e-13, atol=1e-16)
        assert 0 < metrics["clip_share"] < 1
        assert (metrics["dual_clip_share"] > 0) == (dual_clip is not None)

    def test_at_ratio_1_the_gradient_is_plain_reinforce(self) -> None:
        rows = random_rows(spread=0.0)
        unweighted = value_and_grad("reinforce", rows, weight_treatment="none")[1]
        torch.testing.assert_close(value_and_grad("ppo_clip", rows)[1], unweighted)

    def test_ratio_is_to_the_proximal_policy_when_given(self) -> None:
        rows = random_rows()
        swapped = rows | {"sampler": rows["sampler"] + 5}
        expected = value_and_grad("ppo_clip", rows)[1]
        torch.testing.assert_close(value_and_grad("ppo_clip", swapped, proximal_logprobs=rows["sampler"])[1], expected)

    @pytest.mark.parametrize("bad", [NAN, -INF])
    def test_a_row_without_a_ratio_to_the_proximal_policy_is_silent(self, bad: float) -> None:
        rows = random_rows()
        proximal = rows["sampler"].clone()
        expected = value_and_grad("ppo_clip", rows, proximal_logprobs=proximal)[1]
        proximal[1, 0] = bad
        rows["mask"][1, 0] = True
        loss, grad, metrics = value_and_grad("ppo_clip", rows, proximal_logprobs=proximal)
        assert loss.isfinite()
        assert not grad[1].any()
        assert torch.equal(grad[[0, 2, 3]], expected[[0, 2, 3]])
        assert all(m.isfinite() for m in metrics.values())

    def test_the_proximal_policy_may_be_corrected_for_the_sampler(self) -> None:
        rows = random_rows()
        proximal = rows["learner"] + 0.05
        plain = value_and_grad("ppo_clip", rows, proximal_logprobs=proximal)[1]
        weighted = value_and_grad(
            "ppo_clip", rows, proximal_logprobs=proximal, weight_treatment="token_truncate", cap=1.2
        )[1]
        w = (proximal - rows["sampler"]).exp().clamp(max=1.2)
        torch.testing.assert_close(weighted, torch.where(rows["mask"], w * plain, 0.0), rtol=1e-13, atol=0)
        with pytest.raises(ValueError, match="needs proximal_logprobs: the ratio is to the sampler"):
            value_and_grad("ppo_clip", rows, weight_treatment="token_truncate")

    def test_clip_share_counts_tokens_whose_gradient_is_cut(self) -> None:
        rows = random_rows(spread=0.8)
        _, grad, metrics = value_and_grad("ppo_clip", rows)
        silent = (grad == 0) & rows["mask"]
        torch.testing.assert_close(metrics["clip_share"].double(), silent.sum() / rows["mask"].sum().double())

    def test_metrics_move_with_the_sampler(self) -> None:
        """A ratio built from the learner against itself would stay at 1."""
        rows = random_rows(spread=0.0)
        shifted = rows | {"sampler": rows["sampler"] - 0.7}
        for name in ("ppo_clip", "reinforce"):
            metrics = value_and_grad(name, shifted)[2]
            assert metrics["ratio_mean"] == pytest.approx(math.exp(0.7))
            assert metrics["log_ratio_abs_mean"] == pytest.approx(0.7)
        metrics = value_and_grad("ppo_clip", shifted)[2]
        assert metrics["kl_k1"] == pytest.approx(-0.7)
        assert metrics["kl_k3"] == pytest.approx(math.exp(0.7) - 1 - 0.7)

    def test_options_out_of_range_are_named(self) -> None:
        for params, message in [
            ({"clip_low": 1.5}, "0 <= clip_low <= 1"),
            ({"clip_high": -0.1}, "0 <= clip_high"),
            ({"dual_clip": 1.0}, "dual_clip must be a finite number > 1"),
            ({"max_log_ratio": 800.0}, "max_log_ratio must be in"),
        ]:
            with pytest.raises(ValueError, match=message):
                value_and_grad("ppo_clip", random_rows(), **params)

    def test_is_grpo_and_not_linear(self) -> None:
        assert policy_losses["grpo"] is policy_losses["ppo_clip"]
        assert not policy_losses["ppo_clip"].linear_in_coefficients


@pytest.mark.parametrize("name", policy_losses)
class TestEveryLoss:
    @pytest.mark.parametrize("aggregation", AGGREGATIONS)
    @pytest.mark.parametrize("pieces", [2, 4, 8])
    def test_micro_batches_add_up(self, name: str, aggregation: str, pieces: int) -> None:
        rows, params = random_rows(8, spread=0.6), {"aggregation": aggregation, **AGGREGATIONS[aggregation]}
        rows["mask"][2] = False
        rows["sampler"][6, 0] = -INF  # log weight +inf: quarantined, still counted in B
        rows["mask"][6, 0] = True
        whole, grad, _ = value_and_grad(name, rows, **params)
        size = float(rows["mask"].sum()) if aggregation == "token_mean" else 8.0
        parts = []
        for i in torch.arange(8).chunk(pieces):
            part = {k: v[i] for k, v in rows.items()}
            parts.append(value_and_grad(name, part, normalizer=size, **params))
        torch.testing.assert_close(sum(p[0] for p in parts), whole, rtol=1e-13, atol=1e-15)
        torch.testing.assert_close(torch.cat([p[1] for p in parts]), grad, rtol=1e-13, atol=0)

    @pytest.mark.parametrize("bad", [NAN, INF])
    @pytest.mark.parametrize("where", ["sampler", "learner"])
    def test_a_quarantined_row_is_silent_but_counts(self, name: str, bad: float, where: str) -> None:
        rows = random_rows()
        rows["mask"][1, 0] = True
        spoiled = rows | {where: rows[where].clone()}
        spoiled[where][1, 0] = -bad if where == "sampler" else bad
        loss, grad, metrics = value_and_grad(name, spoiled)
        others = {k: v[[0, 2, 3]] for k, v in rows.items()}
        expected_loss, expected_grad, _ = value_and_grad(name, others, normalizer=4)
        torch.testing.assert_close(loss, expected_loss)
        torch.testing.assert_close(grad[[0, 2, 3]], expected_grad)
        assert not grad[1].any()
        assert metrics["quarantined_share"] == 0.25
        assert all(m.isfinite() for m in metrics.values())

    def test_case_1_a_log_ratio_of_200_stays_finite(self, name: str) -> None:
        for dtype in (torch.float32, torch.float64):
            for sign, distance in ((1.0, 200), (-1.0, 200), (-1.0, 1e4)):
                sampler = torch.full((4, 8), -1.0, dtype=dtype)
                learner = sampler.clone()
                sampler[0, 3] = -1.0 - distance
                rows = {"learner": learner, "sampler": sampler, "mask": torch.ones(4, 8)}
                rows["adv"] = sign * torch.tensor([1, -1, 1, -1], dtype=dtype)
                loss, grad, metrics = value_and_grad(name, rows)
                assert loss.isfinite()
                assert grad.isfinite().all()
                assert grad.abs().max() <= 8 / 8 / 4
                assert all(m.isfinite() for m in metrics.values())

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    def test_an_advantage_that_is_not_a_number_is_silent(self, name: str, bad: float) -> None:
        rows = random_rows()
        spoiled = rows | {"adv": rows["adv"].clone()}
        spoiled["adv"][2] = bad
        rows["adv"][2] = 0
        for got, expected in zip(value_and_grad(name, spoiled)[:2], value_and_grad(name, rows)[:2], strict=True):
            torch.testing.assert_close(got, expected)

    def test_advantages_per_token_equal_those_per_row(self, name: str) -> None:
        rows = random_rows()
        table = rows | {"adv": rows["adv"][:, None].expand(4, 6)}
        assert torch.equal(value_and_grad(name, table)[1], value_and_grad(name, rows)[1])

    def test_gradient_flows_into_the_learner_alone(self, name: str) -> None:
        rows = {k: v.requires_grad_() if v.is_floating_point() else v for k, v in random_rows().items()}
        proximal, reference = (rows["sampler"].detach().clone().requires_grad_() for _ in range(2))
        loss, metrics = policy_losses[name](
            *rows.values(), proximal_logprobs=proximal, reference_logprobs=reference, kl_coef=0.1
        )
        loss.backward()
        assert rows["learner"].grad is not None
        assert all(t.grad is None for t in (rows["sampler"], rows["adv"], proximal, reference))
        assert all(m.ndim == 0 and not m.requires_grad for m in metrics.values())

    def test_kl_from_the_reference_is_added(self, name: str) -> None:
        rows = random_rows()
        reference = rows["learner"] - 0.4
        plain, _, _ = value_and_grad(name, rows)
        for estimator, per_token in {"k1": 0.4, "k2": 0.08, "k3": math.exp(-0.4) - 1 + 0.4}.items():
            loss, _, _ = value_and_grad(name, rows, reference_logprobs=reference, kl_coef=0.5, kl_estimator=estimator)
            torch.testing.assert_close(loss - plain, torch.tensor(0.5 * per_token, dtype=torch.float64))

    @pytest.mark.parametrize("far", [NAN, INF, -INF, 300.0])
    def test_a_reference_out_of_reach_adds_nothing(self, name: str, far: float) -> None:
        rows = random_rows(dtype=torch.float32)
        reference = rows["learner"] - 0.4
        reference[0, 0] = far
        masked_out = rows["learner"] - 0.4
        masked_out[0, 0] = rows["learner"][0, 0]
        params = {"kl_coef": 0.5, "kl_estimator": "k3"}
        got = value_and_grad(name, rows, reference_logprobs=reference, **params)
        expected = value_and_grad(name, rows, reference_logprobs=masked_out, **params)
        torch.testing.assert_close(got[0], expected[0])
        torch.testing.assert_close(got[1], expected[1])

    def test_kl_options_are_checked(self, name: str) -> None:
        rows = random_rows()
        with pytest.raises(ValueError, match=r"kl_coef 0.1 needs reference_logprobs"):
            value_and_grad(name, rows, kl_coef=0.1)
        with pytest.raises(ValueError, match="unknown kl_estimator 'k4': use one of k1, k2, k3"):
            value_and_grad(name, rows, kl_coef=0.1, reference_logprobs=rows["sampler"], kl_estimator="k4")
        with pytest.raises(ValueError, match="kl_coef must be a finite number >= 0"):
            value_and_grad(name, rows, kl_coef=-0.1, reference_logprobs=rows["sampler"])

    def test_fp32_and_bf16_log_probs(self, name: str) -> None:
        exact = value_and_grad(name, random_rows())
        single = value_and_grad(name, random_rows(dtype=torch.float32))
        torch.testing.assert_close(single[1].double(), exact[1], rtol=1e-5, atol=1e-7)
        half = value_and_grad(name, random_rows(dtype=torch.bfloat16))
        assert half[0].dtype == torch.float32
        assert half[1].isfinite().all()

    def test_shapes_are_checked(self, name: str) -> None:
        rows = random_rows()
        with pytest.raises(ValueError, match=r"advantages must be \[4\] or \(4, 6\), got \(3,\)"):
            value_and_grad(name, rows | {"adv": rows["adv"][:3]})
        with pytest.raises(ValueError, match="sampler_logprobs must have the mask's shape"):
            value_and_grad(name, rows | {"sampler": rows["sampler"][:, :3]})
        with pytest.raises(ValueError, match=r"the mask must be \[n, s\]"):
            value_and_grad(name, {k: v[0] for k, v in rows.items()})
