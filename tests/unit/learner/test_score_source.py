"""Exact norms are used where they can be, give way loudly where they cannot, and are never wrong in silence."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn

from vcpo import Batch, VarianceControl, core
from vcpo.errors import ScoreNormError
from vcpo.learner.learner import Learner
from vcpo.score_norms import Taps, parts


def llama(**changes) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=17, **sizes, **changes)).double()


@pytest.fixture
def batch() -> Batch:
    generator = torch.Generator().manual_seed(2)
    mask = torch.ones(8, 7, dtype=torch.bool)
    mask[::3, 5:] = False
    action = mask.clone()
    action[:, :2] = False
    return Batch(
        torch.randint(0, 17, (8, 7), generator=generator),
        mask,
        action,
        torch.full((8, 7), -2.8, dtype=torch.float64),
        torch.tensor([1.0, 0, 0, 1, 0, 1, 1, 0], dtype=torch.float64),
        torch.arange(8) // 4,
    )


def step(model: nn.Module, batch: Batch, *, extra: bool = False, **settings):
    """Parameters after one SGD step, and the control that took it."""
    vc = VarianceControl(model, torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm=None, **settings)
    with vc.batch(batch.rewards, batch.group_ids, batch.action_lengths):
        with vc.forward():
            logits = model(batch.input_ids, attention_mask=batch.attention_mask.long()).logits
        lp = core.token_logprobs(logits, batch.input_ids)
        addition = 0.1 * (model.lm_head.weight**2).sum() if extra else None
        vc.backward(lp, batch.sampler_logprobs, batch.action_mask, rows=range(8), extra_loss=addition)
    vc.step()
    return [p.detach() for p in model.parameters()], vc


def same(a, b) -> None:
    for x, y in zip(a, b, strict=True):
        # transformers normalises in fp32 inside
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)


@pytest.fixture
def single_passes(monkeypatch):
    """How often the single pass was taken by an update (the self-check's own do not count)."""
    taken = []
    original = Taps.single_pass

    def counted(self, *args, **kwargs):
        taken.append(kwargs.get("retain_graph", False))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Taps, "single_pass", counted)
    return taken


def test_auto_is_exact_and_takes_one_backward(batch, single_passes):
    found, vc = step(llama(), batch)
    assert vc.score_norms == "exact"
    assert single_passes == [True, False], "once for the check, with the graph kept; once for the update"
    same(found, step(llama(), batch, score_norms="two_pass")[0])


@pytest.mark.parametrize("settings", [{"weight_treatment": "token_truncate"}, {"extra": True}], ids=str)
def test_losses_that_are_not_one_factor_per_trajectory_take_two_passes(batch, single_passes, settings):
    found, vc = step(llama(), batch, score_norms="exact", **settings)
    assert single_passes.count(False) == 0
    assert vc.score_norms == "exact", "the next batch may go the short way again"
    same(found, step(llama(), batch, score_norms="two_pass", **settings)[0])


@pytest.mark.parametrize("kappa", [0.0, 1e9], ids=["fused", "retain"])
def test_a_gradient_that_is_wrong_gives_way_to_two_pass_and_names_the_parameter(batch, monkeypatch, kappa):
    """The norms are right here, only what is assembled from the parts is not."""
    monkeypatch.setattr(parts, "KAPPA", kappa)
    expected, _ = step(llama(), batch, score_norms="two_pass")
    fused, combined = parts.Outer.fused, parts.Outer.add_combined

    def doubled(shares):
        return [parts.Share(s.rows, 2 * s.direct, 2 * s.beta, s.gradients, s.shared) for s in shares]

    monkeypatch.setattr(parts.Outer, "fused", lambda self, shares: fused(self, doubled(shares)))
    monkeypatch.setattr(parts.Outer, "add_combined", lambda self, rows, c, into: combined(self, rows, 2 * c, into))
    with pytest.warns(
        UserWarning, match=r"score_norms=exact cannot be used \(.*weight: gradient is off by .*using two_pass"
    ):
        found, vc = step(llama(), batch)
    assert vc.score_norms == "two_pass"
    same(found, expected)


def test_compiled_models_give_way_to_the_loop(batch):
    with pytest.warns(
        UserWarning, match=r"is compiled.*using loop: the same numbers, one more backward per trajectory"
    ):
        found, vc = step(torch.compile(llama(), backend="eager"), batch)
    assert vc.score_norms == "loop"
    same(found, step(llama(), batch, score_norms="two_pass")[0])


@pytest.mark.filterwarnings("ignore")
def test_reentrant_checkpointing_is_refused(batch):
    model = llama().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(ScoreNormError, match="use use_reentrant=False, or logit or length"):
        step(model, batch)
    assert not any(m._forward_hooks for m in model.model.layers.modules()), "the taps are off again"


def test_a_parameter_used_in_an_unknown_way_gives_way_to_the_loop(batch):
    def shared():
        model = llama()
        model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
        return model

    with pytest.warns(UserWarning, match=r"up_proj.*using"):
        found, vc = step(shared(), batch)
    assert vc.score_norms == "loop"
    same(found, step(shared(), batch, score_norms="loop")[0])


def learner_of(model: nn.Module, **settings) -> Learner:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return Learner(model, optimizer, VarianceControl(model, optimizer, **settings))


def test_the_trainer_checks_before_its_first_update_only(batch, monkeypatch):
    from vcpo import score_norms

    checked = []
    original = score_norms.self_check
    monkeypatch.setattr(
        score_norms, "self_check", lambda m, b, method: checked.append(method) or original(m, b, method)
    )
    learner = learner_of(llama())
    for _ in range(3):
        learner.update(batch)
    assert checked == ["exact"]
    learner_of(llama(), score_norms="logit").update(batch)
    learner_of(llama(), baseline="group_mean").update(batch)
    assert checked == ["exact"]


def test_a_forward_that_mixes_trajectories_is_found_by_the_trainer(batch):
    """Every row of the graph looks right there; only a trajectory run alone shows it."""

    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = llama()

        def forward(self, input_ids, attention_mask):
            logits = self.inner(input_ids, attention_mask=attention_mask).logits
            return logits + 0.5 * logits.mean(0, keepdim=True)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learner = learner_of(Mixing())
        learner.update(batch)
    said = [str(w.message) for w in caught if "score_norms=" in str(w.message)]
    assert [re.search(r"score_norms=(\w+).*using (\w+)", line).groups() for line in said] == [
        ("exact", "two_pass"),
        ("two_pass", "loop"),
    ]
