"""The methods behind one signature: proxies, names, and that nothing but the norms comes out of them."""

from __future__ import annotations

import math

import pytest
import torch

from vcpo import core, score_norms
from vcpo.batch import Batch
from vcpo.errors import ScoreNormError
from vcpo.forward import forward_logits
from vcpo.score_norms import length_norms, logit_norms

WORKING = ["loop", "two_pass", "exact", "logit", "length"]


def test_logit_norms_by_hand():
    score_sq = torch.tensor([[9.0, 0.5, 1.5, math.nan], [math.inf, 0.25, -1e-9, 3.0]])
    mask = torch.tensor([[False, True, True, False], [False, True, True, False]])
    found = logit_norms(score_sq, mask)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([math.sqrt(2), 0.5])


def test_logit_is_the_norm_over_the_logits(make_lm, batch):
    """Against autograd with respect to the logits, which are told apart by temperature."""
    for temperature in (1.0, 0.5):
        cooled = Batch(**{**vars(batch), "temperature": temperature})
        model = make_lm()
        logits = forward_logits(model, batch.input_ids, batch.attention_mask).detach().div(temperature).requires_grad_()
        core.masked_sum(core.token_logprobs(logits, batch.input_ids), batch.action_mask).sum().backward()
        assert logits.grad is not None
        torch.testing.assert_close(score_norms.logit(model, cooled), logits.grad.square().sum((1, 2)).sqrt())


def test_length_norms_by_hand(make_lm, batch):
    assert length_norms(torch.tensor([[True, False, True], [False, False, False]])).tolist() == pytest.approx(
        [math.sqrt(2), 0]
    )
    assert torch.equal(score_norms.length(make_lm(), batch), batch.action_lengths.double().sqrt())
    with pytest.raises(ValueError, match=r"\[n, s\]"):
        length_norms(torch.ones(3))
    with pytest.raises(ValueError, match="score_sq"):
        logit_norms(torch.ones(2, 3), torch.ones(2, 4))


@pytest.mark.parametrize("method", WORKING)
def test_a_row_without_actions_is_0_and_masked_values_do_not_matter(method, make_lm, batch):
    model = make_lm()
    mask = batch.action_mask.clone()
    mask[1] = False
    silent = Batch(**{**vars(batch), "action_mask": mask})
    norms = score_norms.methods[method](model, silent)
    assert norms.dtype == torch.float64
    assert norms.shape == (4,)
    assert norms[1] == 0
    assert (norms[[0, 2, 3]] > 0).all()
    noisy = silent.input_ids.masked_fill(~silent.attention_mask, 10**6)
    assert torch.equal(score_norms.methods[method](model, Batch(**{**vars(silent), "input_ids": noisy})), norms)
    nobody = Batch(**{**vars(batch), "action_mask": torch.zeros_like(mask)})
    assert (score_norms.methods[method](model, nobody) == 0).all()


@pytest.mark.parametrize("method", [*WORKING, "exact", "self_check"])
def test_everything_else_is_left_as_found(method, make_lm, batch):
    model = make_lm(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)))
    model.train()
    model.attention.eval()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    state, rng = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    modes = [m.training for m in model.modules()]
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            try:
                getattr(score_norms, method)(model, batch)
            except ScoreNormError:
                assert method == "exact"
            assert torch.is_grad_enabled() == grad
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), rng)
    assert all((p.grad == 3.0).all() for p in model.parameters())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("method", ["loop", "two_pass", "exact", "logit"])
def test_dropout_is_off(method, make_lm, batch):
    model = make_lm(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)))
    f = score_norms.methods[method]
    assert torch.equal(f(model.train(), batch), f(model.eval(), batch))


def test_mode_comes_back_after_an_error(make_lm, batch):
    model = make_lm().train()
    shared = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).double()
    shared[1].weight = shared[0].weight
    model.middle = shared
    with pytest.raises(ScoreNormError):
        score_norms.two_pass(model, batch)
    assert all(m.training for m in model.modules())


def test_temperature_enters_the_score(make_lm, batch):
    model = make_lm()
    hot = Batch(**{**vars(batch), "temperature": 2.0})
    for method in ("loop", "two_pass", "exact", "logit"):
        f = score_norms.methods[method]
        assert not torch.allclose(f(model, hot), f(model, batch))
    torch.testing.assert_close(score_norms.two_pass(model, hot), score_norms.loop(model, hot), rtol=1e-12, atol=0)


def test_names():
    assert score_norms.resolve("auto") == "exact"
    assert all(score_norms.resolve(name) == name for name in score_norms.methods)
    with pytest.raises(ValueError, match=r"auto, loop, two_pass, exact, logit, length; got 'ghost'"):
        score_norms.resolve("ghost")
