"""The start-up check must catch, and name, the faults that such machinery really had."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import nn

from vcpo.batch import Batch
from vcpo.errors import ScoreNormError
from vcpo.score_norms import Taps, calls, check_in_graph, collector, rules, self_check
from vcpo.score_norms.parts import Sums
from vcpo.score_norms.rules.embedding import embedding
from vcpo.score_norms.rules.linear import linear
from vcpo.score_norms.scoring import trajectory_logprobs


def in_graph(model: nn.Module, batch: Batch, row: int = 1):
    with Taps(model) as taps:
        logprobs = trajectory_logprobs(model, batch)
        squares = taps.squared_norms(logprobs)
        result = check_in_graph(taps, logprobs, squares, row)
        logprobs.sum().backward()  # the graph is still there
    return result


def exact_alone(model: nn.Module, batch: Batch):
    return self_check(model, batch, "exact")


def exact_in_graph(model: nn.Module, batch: Batch):
    with Taps(model) as taps:
        logprobs = trajectory_logprobs(model, batch)
        return check_in_graph(taps, logprobs, taps.squared_norms(logprobs), 1, "exact")


BOTH = pytest.mark.parametrize("check", [self_check, in_graph, exact_alone, exact_in_graph])
TAPPED = pytest.mark.parametrize("check", [self_check, in_graph])


@BOTH
@pytest.mark.parametrize("tied", [True, False])
def test_passes_where_all_is_well(check, tied, make_lm, token_experts, batch):
    result = check(make_lm(token_experts(), tied=tied), batch)
    assert result.ok
    assert result.relative_error < 1e-12
    assert result.parameter in dict(make_lm(token_experts(), tied=tied).named_parameters())


@BOTH
def test_passes_in_fp32_and_bf16(check, make_lm, batch):
    for dtype, largest in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2)):
        result = check(make_lm(tied=True).to(dtype), batch)
        assert result.ok
        assert 1e-12 < result.relative_error < largest


@BOTH
@pytest.mark.parametrize("share", [1.0, 1e-3])
def test_a_skipped_layer(check, share, monkeypatch, make_lm, batch):
    """Even when the layer is a tiny part of the total: the weights behind it make it so."""

    def skipped(run):
        return [Sums(n, torch.zeros(run.n, *run.module.get_parameter(n).shape)) for n in run.wanted]

    def rule_but_for_qkv(module):
        return skipped if module.out_features == 24 else linear

    model = make_lm(nn.Linear(8, 8))
    with torch.no_grad():
        model.attention.out.weight.mul_(share)
    monkeypatch.setattr(
        calls, "rule_for", lambda m: rule_but_for_qkv(m) if isinstance(m, nn.Linear) else rules.rule_for(m)
    )
    result = check(model, batch)
    assert not result.ok
    assert result.what == "norm"
    assert result.parameter.startswith("attention.qkv.")
    assert result.relative_error == pytest.approx(1.0, abs=0.999)


@BOTH
def test_a_dropped_cross_term(check, monkeypatch, make_lm, batch):
    monkeypatch.setattr(collector.TiedCrossTerm, "at_embedding", lambda self, run: torch.zeros(run.n))
    result = check(make_lm(tied=True), batch)
    assert not result.ok
    assert (result.what, result.parameter) == ("norm", "embed.weight")
    assert check(make_lm(tied=False), batch).ok


@BOTH
def test_isinstance_dispatch_on_a_scaled_embedding(check, monkeypatch, batch):
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8}
    config = AutoConfig.for_model("gemma3_text", vocab_size=13, num_key_value_heads=1, **small)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert check(model, batch).ok
    model.zero_grad()
    monkeypatch.setattr(calls, "rule_for", lambda m: embedding if isinstance(m, nn.Embedding) else rules.rule_for(m))
    result = check(model, batch)
    assert not result.ok
    assert (result.what, result.parameter) == ("norm", "model.embed_tokens.weight")


@TAPPED
def test_an_undetached_tap(check, monkeypatch, make_lm, batch):
    """Norms that carry history are right; the gradient assembled with them is not."""

    monkeypatch.setattr(calls, "detached", lambda tensor: tensor)
    monkeypatch.setattr(collector.Collector, "visit", torch.enable_grad()(collector.Collector.visit))
    result = check(make_lm(), batch)
    assert not result.ok
    assert result.what == "gradient"
    assert result.relative_error > 1e-3


def test_sequence_first_where_sizes_agree(make_lm, batch):
    """As many columns as trajectories: no shape tells that the batch is not first, only a trajectory run alone."""

    class SequenceFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            return self.inner(x.transpose(0, 1)).transpose(0, 1)

    columns = {name: v[:, 1:5] for name, v in vars(batch).items() if isinstance(v, torch.Tensor) and v.ndim == 2}
    result = self_check(make_lm(SequenceFirst()), Batch(**{**vars(batch), **columns}))
    assert not result.ok
    assert (result.what, result.parameter.split(".")[:2]) == ("norm", ["middle", "inner"])


def test_a_number_that_is_none_fails(monkeypatch, make_lm, batch):
    def not_a_number(run):
        return [Sums(n, torch.full((run.n, *run.module.get_parameter(n).shape), torch.nan)) for n in run.wanted]

    monkeypatch.setattr(calls, "rule_for", lambda m: not_a_number if isinstance(m, nn.RMSNorm) else rules.rule_for(m))
    result = self_check(make_lm(), batch)
    assert not result.ok
    assert (result.parameter, result.relative_error) == ("norm2.weight", float("inf"))


def test_the_row_is_ragged_and_not_the_first(make_lm, batch):
    row_of = import_module("vcpo.score_norms.self_check")._ragged_row
    assert row_of(batch) == 1
    assert row_of(batch.rows([1, 2])) == 1
    actions = batch.action_mask.clone()
    actions[1] = False
    assert row_of(Batch(**{**vars(batch), "action_mask": actions})) in (2, 3)
    assert row_of(batch.rows([0])) == 0
    actions[:] = False
    with pytest.raises(ScoreNormError, match="action tokens"):
        self_check(make_lm(), Batch(**{**vars(batch), "action_mask": actions}))


def test_methods_that_cannot_be_checked(make_lm, batch):
    with pytest.raises(ValueError, match=r"'exact' and 'two_pass'.*got 'logit'"):
        self_check(make_lm(), batch, "logit")


def test_a_model_that_the_taps_refuse(make_lm, batch):
    model = make_lm(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    model.middle[1].weight = model.middle[0].weight
    with pytest.raises(ScoreNormError, match="is shared by"):
        self_check(model, batch)
