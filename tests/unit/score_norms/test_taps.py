"""Taps: exact for what they know, refusing by name what they do not, invisible afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vcpo.errors import ScoreNormError
from vcpo.score_norms import Taps, loop, norms_from_squares, two_pass
from vcpo.score_norms.calls import owners_of, record_call
from vcpo.score_norms.scoring import trajectory_logprobs


class Call(nn.Module):
    """A module made of a function of its parts and the input."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


@pytest.mark.parametrize("tied", [False, True])
def test_small_model_is_exact(tied, make_lm, batch, assert_exact):
    squares = assert_exact(make_lm(tied=tied), batch)
    assert all(bool((s > 0).all()) for name, s in squares.items() if name != "attention.qkv.bias")


def squares_of(model: nn.Module, batch) -> dict[str, Tensor]:
    with Taps(model) as taps:
        return taps.squared_norms(trajectory_logprobs(model, batch))


def test_norms_carry_no_gradient(make_lm, batch):
    assert not any(s.requires_grad for s in squares_of(make_lm(), batch).values())


def test_what_is_kept_of_the_forward_has_no_history():
    module, x = nn.Linear(2, 2), torch.zeros(3, 2, requires_grad=True) * 2
    (owner,) = owners_of(module, dict(module.named_parameters()))
    call = record_call(owner, (x,), {}, [module(x)], (0,))
    assert [t.requires_grad for t in call.saved] == [False]
    assert call.saved[0].data_ptr() == x.data_ptr(), "no copy"


# ---- modules that only the generic rule knows


def test_stacked_weights_token_by_token(make_lm, token_experts, batch, assert_exact):
    assert_exact(make_lm(token_experts()), batch)


def test_tokens_flattened_row_by_row(make_lm, token_experts, batch, assert_exact):
    flat = Call(lambda m, x: m.inner(x.reshape(-1, 8)).view_as(x), inner=token_experts())
    assert_exact(make_lm(flat), batch)
    linear = Call(lambda m, x: m.inner(x.flatten(0, 1)).view_as(x), inner=nn.Linear(8, 8))
    assert_exact(make_lm(linear), batch)


def test_own_parameters_of_a_container(make_lm, batch, assert_exact):
    """The container's gate is its own; the layer inside, and what passes the gate on as an argument, are not in the way."""

    def gated(module, x):
        return module.scale(module.inner(x), module.gate)

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(8))

        def forward(self, x, gate):
            return x * gate + self.shift

    container = Call(gated, inner=nn.Linear(8, 8), scale=Scale(), gate=nn.Parameter(torch.zeros(8)))
    squares = assert_exact(make_lm(container), batch)
    assert (squares["middle.gate"] > 0).all()


def test_every_differentiable_output_is_tapped(make_lm, batch, assert_exact):
    """As with a router, whose gradient leaves by its second output."""

    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 8))

        def forward(self, x):
            scores = F.linear(x, self.weight)
            top, which = scores.softmax(-1).max(-1)
            return {"logits": scores, "picked": (which, top)}

    block = Call(lambda m, x: m.inner(x) * m.router(x)["picked"][1][..., None], inner=nn.Linear(8, 8), router=Router())
    squares = assert_exact(make_lm(block), batch)
    assert (squares["middle.router.weight"] > 0).all()


def test_a_subclass_is_another_layer(make_lm, batch, assert_exact):
    class ScaledEmbedding(nn.Embedding):
        def forward(self, ids):
            return 3 * super().forward(ids)

    class ScaledLinear(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = make_lm(ScaledLinear(8, 8))
    scaled = ScaledEmbedding(13, 8).double()
    scaled.weight = model.embed.weight
    model.embed = scaled
    assert_exact(model, batch)


def test_another_hook_on_the_output_is_no_part_of_the_module(make_lm, batch, assert_exact):
    model = make_lm()
    model.middle[0].register_forward_hook(lambda module, args, output: 2 * output)
    assert_exact(model, batch)


def test_unused_and_frozen_parameters(make_lm, batch, assert_exact):
    model = make_lm()
    model.spare = nn.Linear(8, 8).double()
    model.embed.requires_grad_(False)
    model.attention.qkv.weight.requires_grad_(False)
    squares = assert_exact(model, batch)
    assert (squares["spare.weight"] == 0).all()
    assert "embed.weight" not in squares


# ---- what has no exact rule is refused by name


@pytest.mark.parametrize(
    ("function", "named"),
    [
        pytest.param(lambda m, x: m.inner(m.inner(x)), "module 'middle.inner' ran 2 times", id="runs twice"),
        pytest.param(lambda m, x: F.linear(x, m.inner.weight), "parameter 'middle.inner.weight'", id="functional"),
        pytest.param(lambda m, x: m.inner(x) + x @ m.inner.weight, "'middle.inner.weight'", id="module and functional"),
        pytest.param(lambda m, x: m.inner.forward(x), "parameter 'middle.inner.weight'", id="hooks passed over"),
        pytest.param(lambda m, x: m.inner(x.transpose(0, 1)).transpose(0, 1), "module 'middle.inner'", id="seq first"),
        pytest.param(
            lambda m, x: m.inner(x.transpose(0, 1).reshape(-1, 8)).view(7, 4, 8).transpose(0, 1),
            "module 'middle.inner'",
            id="seq first, flattened",
        ),
        pytest.param(lambda m, x: m.inner(x.mean(0)) + x, "module 'middle.inner'", id="no batch dimension"),
    ],
)
def test_refused_by_name(function, named, make_lm, batch):
    model = make_lm(Call(function, inner=nn.Linear(8, 8)))
    with pytest.raises(ScoreNormError, match=named):
        squares_of(model, batch)
    assert not any(m._forward_hooks for m in model.modules()), "no hook is left behind"


def test_a_module_that_uses_the_parameter_of_another_is_refused(make_lm, batch):
    gated = Call(
        lambda m, x: m.gate * F.linear(x, m.inner.weight), inner=nn.Linear(8, 8), gate=nn.Parameter(torch.zeros(8))
    )
    with pytest.raises(
        ScoreNormError, match=r"'middle.inner.weight' is used by module 'middle', which does not own it"
    ):
        squares_of(make_lm(gated), batch)


def test_positions_broadcast_over_the_batch_are_refused(make_lm, batch):
    model = make_lm()
    inner = model.positions
    model.positions = Call(lambda m, ids: m.inner(torch.arange(ids.shape[1])[None]), inner=inner)
    with pytest.raises(ScoreNormError, match=r"module 'positions.inner' \(Embedding\).* \(1, 7\)"):
        squares_of(model, batch)


def test_sharing_between_unknown_layers_is_refused(make_lm, batch):
    model = make_lm(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    model.middle[1].weight = model.middle[0].weight
    with pytest.raises(ScoreNormError, match=r"'middle.0.weight' is shared by 'middle.0' \(Linear\), 'middle.1'"):
        squares_of(model, batch)
    assert (loop(model, batch) > 0).all(), "the loop still works"


def test_a_table_used_three_times_is_refused(make_lm, batch):
    model = make_lm(nn.Linear(8, 13), tied=True)
    model.middle = Call(lambda m, x: m.inner(x)[..., :8], inner=model.middle)
    model.middle.inner.weight = model.embed.weight
    with pytest.raises(ScoreNormError, match=r"'embed.weight' is shared"):
        squares_of(model, batch)


def test_rows_that_mix_inside_a_module_are_refused(make_lm, batch):
    class Mixes(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.zeros(8))

        def forward(self, x):
            return self.gain * (x - x.mean(0))

    with pytest.raises(ScoreNormError, match=r"module 'middle' \(Mixes\) gives another output"):
        squares_of(make_lm(Mixes()), batch)


def test_dropout_inside_a_module_of_unknown_kind(make_lm, batch, assert_exact):
    """On in training: another function each time, refused. The score pass itself turns it off."""

    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.zeros(8))

        def forward(self, x):
            return self.gain * F.dropout(x, training=self.training)

    model = make_lm(Drops()).train()
    with pytest.raises(ScoreNormError, match=r"module 'middle' \(Drops\) gives another output"):
        squares_of(model, batch)
    assert_exact(model, batch)


def test_embeddings_that_mix_trajectories_are_refused(make_lm, batch):
    model = make_lm()
    model.embed.scale_grad_by_freq = True
    with pytest.raises(ScoreNormError, match="module 'embed'"):
        squares_of(model, batch)


def test_nothing_to_train_or_nothing_recorded(make_lm, batch):
    model = make_lm()
    logprobs = trajectory_logprobs(model, batch)
    with Taps(model) as taps:
        with pytest.raises(ScoreNormError, match="no forward was recorded"):
            taps.squared_norms(logprobs)
        with pytest.raises(ValueError, match="trajectory_logprobs must be"):
            taps.squared_norms(logprobs.detach())
        with pytest.raises(ValueError, match="trajectory_logprobs must be"):
            taps.squared_norms(logprobs.sum())
    with pytest.raises(ScoreNormError, match="no trainable parameter"):
        Taps(model.requires_grad_(False))


# ---- gradient checkpointing, and the backward that follows


def checkpointed(use_reentrant: bool) -> nn.Module:
    inner = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8), nn.LayerNorm(8))
    return Call(lambda m, x: checkpoint(m.inner, x, use_reentrant=use_reentrant), inner=inner)


def test_checkpointing_recomputes_under_the_taps(make_lm, batch, assert_exact):
    assert_exact(make_lm(checkpointed(use_reentrant=False)), batch)


def test_taps_keep_no_activation_that_checkpointing_dropped(make_lm, batch):
    """Inputs are saved in the graph, where checkpointing replaces them by a recipe."""
    model = make_lm(checkpointed(use_reentrant=False))
    with Taps(model) as taps:
        logprobs = trajectory_logprobs(model, batch)
        held = [t for call in taps._calls.values() for t in call.saved]
        assert held == []
        assert taps.squared_norms(logprobs)


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_reentrant_checkpointing_is_refused(make_lm, batch):
    with pytest.raises(ScoreNormError, match=r"module 'middle.inner.\d' ran without gradients.*use_reentrant=False"):
        squares_of(make_lm(checkpointed(use_reentrant=True)), batch)


@pytest.mark.parametrize("middle", [None, "experts", "checkpointed"])
def test_the_later_backward_sees_no_taps(middle, make_lm, token_experts, batch):
    def build():
        return make_lm({None: None, "experts": token_experts(), "checkpointed": checkpointed(False)}[middle], tied=True)

    model, plain = build(), build()
    coefficients = torch.tensor([1.5, -2.0, 0.3, 0.7], dtype=torch.float64)
    (coefficients * trajectory_logprobs(plain, batch)).sum().backward()
    with Taps(model) as taps:
        logprobs = trajectory_logprobs(model, batch)
        before = {name: s.clone() for name, s in taps.squared_norms(logprobs).items()}
        assert all(p.grad is None for p in model.parameters())
        (coefficients * logprobs).sum().backward(retain_graph=True)
        again = taps.squared_norms(logprobs)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0)
        torch.testing.assert_close(before[name], again[name], rtol=0, atol=0)
    assert taps._anchor.grad is None


def test_only_the_first_forward_after_arming_counts(make_lm, batch):
    model = make_lm()
    with Taps(model) as taps:
        logprobs = trajectory_logprobs(model, batch)
        taps.mute()
        trajectory_logprobs(model, batch.rows([0]))
        with torch.no_grad():
            trajectory_logprobs(model, batch)
        found = norms_from_squares(taps.squared_norms(logprobs))
        taps.arm()
        again = norms_from_squares(taps.squared_norms(trajectory_logprobs(model, batch)))
    torch.testing.assert_close(found, loop(model, batch), rtol=1e-12, atol=0)
    assert torch.equal(found, again)


def test_release_leaves_the_model_as_it_was(make_lm, batch):
    model = make_lm()
    with pytest.raises(RuntimeError, match="in the middle"), Taps(model):
        trajectory_logprobs(model, batch)
        raise RuntimeError("in the middle")
    assert not any(m._forward_hooks for m in model.modules())
    nodes, todo = set(), [trajectory_logprobs(model, batch).grad_fn]
    while todo:
        node = todo.pop()
        if node not in nodes:
            nodes.add(node)
            todo.extend(fn for fn, _ in node.next_functions if fn is not None)
    assert not any("Tap" in type(node).__name__ for node in nodes)


def test_one_trajectory(make_lm, token_experts, batch, assert_exact):
    flat = Call(lambda m, x: m.inner(x.reshape(-1, 8)).view_as(x), inner=token_experts())
    assert_exact(make_lm(flat, tied=True), batch.rows([1]))


def test_fp32_and_bf16(make_lm, token_experts, batch):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        model = make_lm(token_experts(), tied=True).to(dtype)
        true = loop(model, batch)
        found = two_pass(model, batch)
        assert found.dtype == torch.float64
        assert float(((found - true) / true).abs().max()) < tolerance


def test_autocast(make_lm, token_experts, batch):
    model = make_lm(token_experts()).float()
    with torch.autocast("cpu", torch.bfloat16):
        true, found = loop(model, batch), two_pass(model, batch)
    assert float(((found - true) / true).abs().max()) < 2e-2
