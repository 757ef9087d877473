"""Log-probs from hidden states, a slice of the vocabulary at a time: the same numbers, and clear refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vcpo import Batch, VarianceControl, core
from vcpo.errors import ConfigError, ScoreNormError
from vcpo.forward import forward_hidden
from vcpo.learner.learner import Learner
from vcpo.score_norms import Taps, chunked_head, chunked_token_logprobs


@pytest.fixture
def case(monkeypatch):
    """hidden [3, 6, 5] with gradient, a head for 11 tokens, ids; slices of 4 and few logits at a time."""
    monkeypatch.setattr(chunked_head, "SLICE", 4)
    monkeypatch.setattr(chunked_head, "FORWARD_ELEMENTS", 23)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 6, 5, generator=generator, dtype=torch.float64).requires_grad_()
    head = nn.Linear(5, 11, bias=False, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(torch.randn(11, 5, generator=generator, dtype=torch.float64))
    return hidden, head, torch.randint(0, 11, (3, 6), generator=generator)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_same_logprobs_and_gradients(case, temperature):
    hidden, head, ids = case
    seeds = torch.randn(3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = chunked_token_logprobs(hidden, head, ids, temperature=temperature)
    true = core.token_logprobs(head(hidden), ids, temperature=temperature)
    torch.testing.assert_close(found, true, rtol=1e-13, atol=1e-13)
    for a, b in zip(
        torch.autograd.grad((seeds * found).sum(), [hidden, head.weight]),
        torch.autograd.grad((seeds * true).sum(), [hidden, head.weight]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_what_nobody_asks_about_does_not_spread(case):
    hidden, head, ids = case
    spoilt = hidden.detach().clone()
    spoilt[1, 3:] = torch.nan
    spoilt.requires_grad_()
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[1, 3:] = False
    gradients = []
    for states in (hidden, spoilt):
        logprobs = chunked_token_logprobs(states, head, ids)
        gradients.append(torch.autograd.grad(core.masked_sum(logprobs, mask).sum(), [head.weight])[0])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-13, atol=1e-13)


def test_refusals(case):
    hidden, head, ids = case
    with pytest.raises(ValueError, match="without bias"):
        chunked_token_logprobs(hidden, nn.Linear(5, 11), ids)
    with pytest.raises(ValueError, match=r"hidden must be \[n, s, 5\]"):
        chunked_token_logprobs(hidden[:, :-1], head, ids)
    with pytest.raises(ValueError, match="temperature must be above 0"):
        chunked_token_logprobs(hidden, head, ids, temperature=0.0)
    taps = Taps(head)
    taps.arm(torch.zeros(1, 18, dtype=torch.int64))
    try:
        with pytest.raises(ScoreNormError, match="do not go with packed rows"):
            chunked_token_logprobs(hidden, head, ids)
    finally:
        taps.release()


def llama(**changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=17, **sizes, **changes)).double()


def make_batch() -> Batch:
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


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("norms", ["exact", "two_pass", "length"])
def test_the_learner_takes_the_same_step(norms, tied):
    weights = []
    for chunked in (False, True):
        model = llama(tie_word_embeddings=tied)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        vc = VarianceControl(model, optimizer, score_norms=norms)
        learner = Learner(model, optimizer, vc, chunk_vocabulary=chunked, max_tokens_per_micro_batch=21)
        assert learner.update(make_batch()).skipped is None
        assert vc.score_norms == norms
        weights.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


def test_a_model_that_changes_its_logits_is_refused():
    model = llama()
    model.config.logit_scale = 0.5
    batch = make_batch()
    with pytest.raises(ValueError, match="changes its logits"):
        forward_hidden(model, batch.input_ids, batch.attention_mask)
    model = llama()
    original = model.forward
    scaled = lambda *args, **kwargs: type("Output", (), {"logits": 2 * original(*args, **kwargs).logits})()  # noqa: E731
    scaled.__signature__ = __import__("inspect").signature(original)
    model.forward = scaled
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    learner = Learner(model, optimizer, VarianceControl(model, optimizer, score_norms="length"), chunk_vocabulary=True)
    with pytest.raises(ConfigError, match="chunk_vocabulary: log-probs from the hidden states are"):
        learner.update(batch)


def test_logit_norms_need_the_logits():
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ConfigError, match="does not go with"):
        Learner(model, optimizer, VarianceControl(model, optimizer, score_norms="logit"), chunk_vocabulary=True)
