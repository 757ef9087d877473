"""Which rule answers for which module."""

from __future__ import annotations

import functools
from functools import reduce
from importlib import import_module

import pytest
import torch
from torch import nn

from vcpo.score_norms.rules import RULES, generic, rule_for
from vcpo.score_norms.rules.embedding import embedding
from vcpo.score_norms.rules.linear import linear
from vcpo.score_norms.rules.norm_layers import layer_norm, rms_norm


@pytest.mark.parametrize("name", RULES)
def test_every_name_in_the_table_leads_to_a_plain_forward(name):
    """A renamed or wrapped class would fall back to the slow generic rule unnoticed."""
    *modules, cls, forward = name.split(".")
    found = reduce(getattr, (cls, forward), import_module(".".join(modules)))
    assert f"{found.__module__}.{found.__qualname__}" == name
    assert not hasattr(found, "__wrapped__")


def test_torch_layers_and_subclasses_that_keep_their_forward():
    class Named(nn.Linear):
        """Adds nothing to the forward."""

    assert rule_for(nn.Linear(2, 2)) is linear
    assert rule_for(Named(2, 2)) is linear
    assert rule_for(nn.Embedding(2, 2)) is embedding
    assert rule_for(nn.LayerNorm(2)) is layer_norm
    assert rule_for(nn.RMSNorm(2)) is rms_norm
    assert rule_for(nn.Conv1d(1, 1, 1)) is generic


def test_an_overridden_forward_is_another_layer():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Decorated(nn.Linear):
        @functools.wraps(nn.Linear.forward)
        def forward(self, x):
            return 2 * nn.Linear.forward(self, x)

    class Disguised(nn.Linear):
        def forward(self, x):
            return 2 * nn.Linear.forward(self, x)

    Disguised.forward.__module__, Disguised.forward.__qualname__ = nn.Linear.__module__, "Linear.forward"
    for cls in (Scaled, Decorated, Disguised):
        assert rule_for(cls(2, 2)) is generic


def test_a_forward_replaced_on_the_instance_is_another_layer():
    module = nn.Linear(2, 2)
    original = module.forward
    module.forward = lambda x: 2 * original(x)
    assert rule_for(module) is generic


def test_a_forward_replaced_on_the_class_is_another_layer(monkeypatch):
    original = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * original(self, x))
    assert rule_for(nn.Linear(2, 2)) is generic


@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("affine", ["weight and bias", "weight"])
def test_norm_layers(eps, affine, make_lm, batch, assert_exact):
    """Also over several dimensions at once."""

    class Folded(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm

        def forward(self, x):
            return self.norm(x.unflatten(-1, (2, 4))).flatten(-2)

    norms = [nn.RMSNorm(4, eps=eps), nn.RMSNorm((2, 4), eps=eps)]
    norms += [nn.LayerNorm((2, 4), eps=eps or 1e-5, bias="bias" in affine)]
    for norm in norms:
        assert_exact(make_lm(Folded(norm)), batch)


def test_bias_alone_is_trained(make_lm, batch, assert_exact):
    model = make_lm()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    squares = assert_exact(model, batch)
    assert set(squares) == {"norm1.bias", "attention.qkv.bias", "middle.0.bias", "middle.2.bias", "head.bias"}


def test_padding_idx_takes_no_gradient_but_through_the_tied_head(make_lm, batch, assert_exact):
    assert (batch.input_ids[batch.attention_mask] == 2).any(), "the batch holds the padding_idx"
    assert_exact(make_lm(tied=True), batch)
    assert_exact(make_lm(tied=False), batch)


def test_torch_default_dtype_does_not_matter(make_lm, token_experts, batch, assert_exact):
    torch.set_default_dtype(torch.float64)
    try:
        assert_exact(make_lm(token_experts(), tied=True), batch)
    finally:
        torch.set_default_dtype(torch.float32)
