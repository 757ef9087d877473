"""two_pass gives what one backward per trajectory gives, for every family, tied or not, padded left or right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vcpo.score_norms import Taps, loop, norms_from_squares, self_check, trajectory_gradient, two_pass
from vcpo.score_norms.rules import generic, rule_for
from vcpo.score_norms.scoring import scoring_mode, trajectory_logprobs

FAMILIES = ["llama", "qwen2", "qwen3", "gemma3_text", "gpt2", "mixtral", "qwen3_moe"]
TIED = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
SIDE = pytest.mark.parametrize("side", ["right", "left"])


def relative_error(found: Tensor, true: Tensor) -> float:
    assert (true > 0).tolist() == [True] * 4 + [False], "the last trajectory has no actions"
    assert found[-1] == 0
    return float(((found - true)[:-1] / true[:-1]).abs().max())


@SIDE
@TIED
@pytest.mark.parametrize("family", FAMILIES)
def test_two_pass_matches_the_loop(family, tied, side, make_tiny_model, make_ragged_batch, fp64_internals):
    model, batch = make_tiny_model(family, tied=tied), make_ragged_batch(side)
    found = two_pass(model, batch)
    assert found.dtype == torch.float64
    assert relative_error(found, loop(model, batch)) < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_two_pass_matches_the_loop_in_stock_models(family, make_tiny_model, make_ragged_batch):
    model, batch = make_tiny_model(family, tied=True), make_ragged_batch("left")
    # Their own normalisation is rounded to fp32; it is not rounded twice in the same way.
    assert relative_error(two_pass(model, batch), loop(model, batch)) < 1e-6


@TIED
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_every_trajectory_matches(family, tied, make_tiny_model, make_ragged_batch, fp64_internals):
    """The total hides small parameters: each is held to its own gradient."""
    model, batch = make_tiny_model(family, tied=tied), make_ragged_batch("left")
    with scoring_mode(model, gradients=True), Taps(model) as taps:
        squares = taps.squared_norms(trajectory_logprobs(model, batch))
    assert list(squares) == [name for name, _ in model.named_parameters()]
    for row in range(len(batch) - 1):
        for name, gradient in trajectory_gradient(model, batch, row).items():
            torch.testing.assert_close(
                squares[name][row], gradient.square().sum(), rtol=1e-9, atol=1e-14, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_padding_and_order_make_no_difference(make_tiny_model, make_ragged_batch, fp64_internals):
    model = make_tiny_model("qwen3", tied=True)
    right, left = make_ragged_batch("right"), make_ragged_batch("left")
    norms = two_pass(model, right)
    torch.testing.assert_close(two_pass(model, left), norms, rtol=1e-12, atol=0)
    torch.testing.assert_close(loop(model, left), norms, rtol=1e-12, atol=0)
    shuffled = torch.tensor([3, 0, 4, 2])
    torch.testing.assert_close(two_pass(model, left.rows(shuffled)), norms[shuffled], rtol=1e-12, atol=0)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Model has `tie_word_embeddings")
@SIDE
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear", ["lm_head", "up_proj"]], ids=str)
def test_lora_adapters(targets, side, make_tiny_model, make_ragged_batch, fp64_internals):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, lora_dropout=0.5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(make_tiny_model("qwen3", tied=True), config).double()
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable
    assert all("lora_" in name for name in trainable)
    batch = make_ragged_batch(side)
    assert relative_error(two_pass(model, batch), loop(model, batch)) < 1e-12


def test_part_of_the_parameters_frozen(make_tiny_model, make_ragged_batch, fp64_internals):
    """Frozen below, inside and above what is trained; a tied table is trained or frozen as one."""
    model, batch = make_tiny_model("llama", tied=True), make_ragged_batch("right")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(
            any(part in name for part in ("layers.0.mlp.up_proj", "layers.1.self_attn", "model.norm"))
        )
    assert relative_error(two_pass(model, batch), loop(model, batch)) < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_norm_layers_and_tables_have_rules_of_their_own(family, make_tiny_model):
    """The generic rule is right for them too, but slow: only routers and stacked experts should need it."""
    model = make_tiny_model(family, tied=True)
    slow = {type(m).__name__ for m in model.modules() if m._parameters and rule_for(m) is generic}
    assert all(name.endswith(("Router", "Experts")) for name in slow), slow


@pytest.mark.filterwarnings("ignore::FutureWarning")
@TIED
def test_the_gradient_after_the_norm_pass_is_the_plain_one(tied, make_tiny_model, make_ragged_batch, fp64_internals):
    """Norms through the taps, then an ordinary backward in the same graph, also under gradient checkpointing."""
    model, batch = make_tiny_model("qwen3", tied=tied), make_ragged_batch("left")
    norms = loop(model, batch)
    coefficients = norms / norms.mean() - 0.8
    (coefficients * trajectory_logprobs(model, batch)).sum().backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    for checkpointing in (False, True):
        model.zero_grad()
        model.train(checkpointing)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        with Taps(model) as taps:
            logprobs = trajectory_logprobs(model, batch)
            found = norms_from_squares(taps.squared_norms(logprobs))
            torch.testing.assert_close(found, norms, rtol=1e-12, atol=0)
            ((found / found.mean() - 0.8) * logprobs).sum().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, plain[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_self_check_passes(family, make_tiny_model, make_ragged_batch, fp64_internals):
    result = self_check(make_tiny_model(family, tied=True), make_ragged_batch("right"))
    assert result.ok, result
    assert result.relative_error < 1e-12
