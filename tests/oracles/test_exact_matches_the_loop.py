"""The single pass gives the loop's norms and, in the same backward, the gradient made of them; in every layout and way."""

from __future__ import annotations

import pytest
import torch

from vcpo import core
from vcpo.forward import forward_hidden
from vcpo.packed import forward_packed, pack
from vcpo.score_norms import (
    GradientSum,
    Share,
    Taps,
    chunked_head,
    chunked_token_logprobs,
    loop,
    norms_from_squares,
    parts,
    self_check,
    trajectory_gradient,
)
from vcpo.score_norms.scoring import scoring_mode, trajectory_logprobs

FAMILIES = ["llama", "qwen2", "qwen3", "gemma3_text", "gpt2", "mixtral", "qwen3_moe"]
TIED = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
LAYOUT = pytest.mark.parametrize("layout", ["right", "left", "packed", "chunked"])
B = 0.6


@pytest.fixture(params=["retain", "fused", "chosen"])
def way(request, monkeypatch):
    """Every layer kept until the coefficients are known, every one written out, or each as its size says."""
    if request.param != "chosen":
        monkeypatch.setattr(parts, "KAPPA", {"retain": 1e9, "fused": 0.0}[request.param])
        monkeypatch.setattr(chunked_head, "SLICE", 5)
        monkeypatch.setattr(chunked_head, "FORWARD_ELEMENTS", 70)
        monkeypatch.setattr(parts, "FUSED_ROWS", 5)
        monkeypatch.setattr(parts, "FUSED_TRAJECTORIES", 2)
    return request.param


def logprobs_of(model, batch, layout, taps):
    if layout == "chunked":
        taps.arm()
        ids = torch.where(batch.attention_mask, batch.input_ids, 0)
        hidden, head = forward_hidden(model, ids, batch.attention_mask)
        logprobs = chunked_token_logprobs(hidden, head, ids, temperature=batch.temperature)
        return core.masked_sum(logprobs, batch.action_mask)
    if layout != "packed":
        taps.arm()
        return trajectory_logprobs(model, batch)
    packed = pack(torch.where(batch.attention_mask, batch.input_ids, 0), batch.attention_mask)
    taps.arm(packed.segments)
    logits = forward_packed(model, packed)
    logprobs = packed.unpack(core.token_logprobs(logits, packed.input_ids, temperature=batch.temperature))
    return core.masked_sum(logprobs, batch.action_mask)


def assembled(taps, logprobs, coefficients):
    """Norms and gradient with c_i = direct_i + B beta_i, in two shares, one of them out of order in the batch."""
    total = GradientSum(taps.parameters)
    halves = [GradientSum(taps.parameters), GradientSum(taps.parameters)]
    rows = [torch.tensor([0, 3]), torch.tensor([1, 2, 4])]
    direct, beta = -0.3 * coefficients, 1.3 * coefficients / B
    shares = [Share(r, direct[r], beta[r], total.slot, half.slot) for r, half in zip(rows, halves, strict=True)]
    found = taps.single_pass(logprobs, shares)
    found.combine(slice(0, len(logprobs)), coefficients, total.slot)
    for half in halves:
        half.add_to(total, B)
    return norms_from_squares(found.squares), {name: total.slot(name) for name in taps.parameters}


def check(model, batch, layout, rtol=1e-12):
    coefficients = torch.tensor([0.7, -1.1, 0.4, -0.2, 0.9], dtype=torch.float64)
    with scoring_mode(model, gradients=True), Taps(model) as taps:
        norms, gradient = assembled(taps, logprobs_of(model, batch, layout, taps), coefficients)
    true = loop(model, batch)
    assert (true > 0).tolist() == [True] * 4 + [False], "the last trajectory has no actions"
    torch.testing.assert_close(norms, true, rtol=rtol, atol=0)
    rows = [trajectory_gradient(model, batch, row) for row in range(len(batch))]
    size = float(sum(g.square().sum() for g in rows[0].values()).sqrt())
    for name, found in gradient.items():
        expected = sum(float(c) * row[name] for c, row in zip(coefficients, rows, strict=True))
        torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * size, msg=lambda m, n=name: f"{n}: {m}")
    assert all(p.grad is None for p in model.parameters())


@LAYOUT
@TIED
@pytest.mark.parametrize("family", FAMILIES)
def test_norms_and_gradient(family, tied, layout, way, make_tiny_model, make_ragged_batch, fp64_internals):
    batch = make_ragged_batch("left" if layout == "left" else "right")
    check(make_tiny_model(family, tied=tied), batch, layout)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize("layout", ["right", "left", "packed"])
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear", ["lm_head", "up_proj"]], ids=str)
def test_lora_adapters(targets, layout, way, make_tiny_model, make_ragged_batch, fp64_internals):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, lora_dropout=0.5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(make_tiny_model("qwen3", tied=True), config).double()
    check(model, make_ragged_batch("left"), layout)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@TIED
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "qwen3_moe"])
def test_under_gradient_checkpointing(family, tied, way, make_tiny_model, make_ragged_batch, fp64_internals):
    model, batch = make_tiny_model(family, tied=tied), make_ragged_batch("left")
    reference = make_tiny_model(family, tied=tied)
    for module in model.modules():  # no dropout, but train mode: that is where checkpointing works
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    coefficients = torch.tensor([0.7, -1.1, 0.4, -0.2, 0.9], dtype=torch.float64)
    with Taps(model) as taps:
        taps.arm()
        logprobs = trajectory_logprobs(model, batch)
        recomputed = []
        original = type(taps)._collector_for

        def watched(self, kind, logprobs):
            recomputed.append(original(self, kind, logprobs))
            return recomputed[-1]

        type(taps)._collector_for = watched
        try:
            norms, gradient = assembled(taps, logprobs, coefficients)
        finally:
            type(taps)._collector_for = original
    (collected,) = recomputed
    assert collected.recomputing
    blocks = [call.owner.name for call, part in collected._retained if isinstance(part, parts.Outer)]
    assert all("layers" not in name and ".h." not in name for name in blocks), "nothing large inside a block is kept"
    torch.testing.assert_close(norms, loop(reference, batch), rtol=1e-12, atol=0)
    rows = [trajectory_gradient(reference, batch, row) for row in range(len(batch))]
    for name, found in gradient.items():
        expected = sum(float(c) * row[name] for c, row in zip(coefficients, rows, strict=True))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_self_check_passes_also_in_stock_models(family, way, make_tiny_model, make_ragged_batch):
    result = self_check(make_tiny_model(family, tied=True), make_ragged_batch("right"), "exact")
    assert result.ok, result
    assert result.relative_error < 1e-6


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logprobs_are_the_padded_ones(family, side, make_tiny_model, make_ragged_batch, fp64_internals):
    model, batch = make_tiny_model(family, tied=True).eval(), make_ragged_batch(side)
    packed = pack(torch.where(batch.attention_mask, batch.input_ids, 0), batch.attention_mask)
    with torch.no_grad():
        logprobs = packed.unpack(
            core.token_logprobs(forward_packed(model, packed), packed.input_ids, temperature=batch.temperature)
        )
        found, true = core.masked_sum(logprobs, batch.action_mask), trajectory_logprobs(model, batch)
    torch.testing.assert_close(found, true, rtol=1e-12, atol=0)


def test_a_model_without_position_ids_is_not_packed():
    with pytest.raises(ValueError, match="takes no position_ids"):
        forward_packed(torch.nn.Linear(2, 2), pack(torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2)))
