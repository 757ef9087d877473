"""forward_logits: position ids, padding, and what is passed to which model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vcpo.forward import forward_logits, position_ids


class Recorder(nn.Module):
    """Takes some of the optional arguments and remembers what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict = {}

    def _answer(self, **seen) -> Tensor:
        self.seen = seen
        return seen["input_ids"][..., None].double()


class TakesPositions(Recorder):
    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=None, **kwargs):
        return (self._answer(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache, rest=kwargs),)


class TakesNone(Recorder):
    def forward(self, input_ids, attention_mask, **kwargs):
        return self._answer(input_ids=input_ids, attention_mask=attention_mask, rest=kwargs)


class Wrapper(nn.Module):
    """Passes everything on, like DistributedDataParallel."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class AdapterModel(nn.Module):
    """Passes everything on, like PEFT's models."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base = model

    def get_base_model(self) -> nn.Module:
        return self.base

    def forward(self, *args, **kwargs):
        return self.base(*args, **kwargs)


IDS = torch.tensor([[5, 6, 7, 8], [5, 6, -100, 10**6], [10**6, -100, 5, 6]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]])


def test_positions_count_real_tokens_on_either_side():
    expected = [[0, 1, 2, 3], [0, 1, 1, 1], [0, 0, 0, 1]]
    assert position_ids(MASK).tolist() == expected
    assert position_ids(MASK.bool()).tolist() == expected
    assert position_ids(torch.zeros(1, 3)).tolist() == [[0, 0, 0]]


def test_ids_at_padding_never_reach_the_model():
    model = TakesNone()
    logits = forward_logits(model, IDS, MASK)
    assert model.seen["input_ids"].tolist() == [[5, 6, 7, 8], [5, 6, 0, 0], [0, 0, 5, 6]]
    assert torch.equal(logits[..., 0].long(), model.seen["input_ids"])
    assert torch.equal(model.seen["attention_mask"], MASK)


def test_optional_arguments_go_only_where_they_are_named():
    model = TakesPositions()
    forward_logits(model, IDS, MASK)
    assert torch.equal(model.seen["position_ids"], position_ids(MASK))
    assert model.seen["use_cache"] is False
    assert model.seen["rest"] == {}
    bare = TakesNone()
    forward_logits(bare, IDS, MASK)
    assert bare.seen["rest"] == {}


def test_wrappers_are_looked_through():
    for wrap in (Wrapper, AdapterModel, lambda m: Wrapper(AdapterModel(m))):
        model, bare = TakesPositions(), TakesNone()
        forward_logits(wrap(model), IDS, MASK)
        assert torch.equal(model.seen["position_ids"], position_ids(MASK))
        forward_logits(wrap(bare), IDS, MASK)
        assert bare.seen["rest"] == {}
