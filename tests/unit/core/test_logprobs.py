from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vcpo.core import logprobs as module
from vcpo.core import token_logprobs


def plain(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """The obvious version: log_softmax of the whole tensor, then gather."""
    table = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, -1)
    taken = table[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    return torch.cat([torch.zeros_like(taken[:, :1]), taken], 1)


def example(n: int, s: int, vocab: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, s, vocab, generator=g, dtype=torch.float64)
    return logits.to(dtype).requires_grad_(), torch.randint(0, vocab, (n, s), generator=g)


@given(
    n=st.integers(1, 4),
    s=st.integers(2, 9),
    vocab=st.integers(1, 12),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    chunk=st.sampled_from([1, 7, 40, 10**6]),
)
def test_value_and_gradient_equal_log_softmax_and_gather(n, s, vocab, temperature, chunk):
    logits, ids = example(n, s, vocab)
    coefficient = torch.randn(n, s, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.CHUNK_ELEMENTS, "cpu", chunk)
        ours = token_logprobs(logits, ids, temperature=temperature)
        (gradient,) = torch.autograd.grad((coefficient * ours).sum(), logits)
    truth = plain(logits, ids, temperature)
    (expected,) = torch.autograd.grad((coefficient * truth).sum(), logits)
    torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-13)
    assert (ours[:, 0] == 0).all()
    assert (gradient[:, -1] == 0).all()


def test_score_sq_is_the_squared_norm_of_the_gradient_of_each_log_prob():
    logits, ids = example(3, 6, 9)
    logprobs, score_sq = token_logprobs(logits, ids, temperature=0.7, with_score_sq=True)
    assert not score_sq.requires_grad
    assert (score_sq[:, 0] == 0).all()
    for i, j in ((0, 1), (1, 4), (2, 5)):
        (gradient,) = torch.autograd.grad(logprobs[i, j], logits, retain_graph=True)
        # d log p / d (logits / T) = T d log p / d logits
        torch.testing.assert_close((0.7 * gradient).square().sum(), score_sq[i, j], rtol=1e-12, atol=0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_score_sq_equals_its_formula_and_stays_in_range(temperature):
    logits, ids = example(4, 30, 50, dtype=torch.float32)
    _, score_sq = token_logprobs(20 * logits, ids, temperature=temperature, with_score_sq=True)
    p = torch.softmax(20 * logits.double() / temperature, -1)[:, :-1]
    truth = (torch.nn.functional.one_hot(ids[:, 1:], 50) - p).square().sum(-1)
    torch.testing.assert_close(score_sq[:, 1:].double(), truth, rtol=1e-5, atol=1e-6)
    assert ((score_sq >= 0) & (score_sq <= 2)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_worked_on_in_fp32(dtype):
    logits, ids = example(2, 5, 40, dtype=dtype)
    ours = token_logprobs(logits, ids)
    assert ours.dtype == torch.float32
    upcast = logits.detach().float().requires_grad_()
    truth = plain(upcast, ids, 1.0)
    torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-6)
    ours.sum().backward()
    truth.sum().backward()
    assert logits.grad is not None
    assert upcast.grad is not None
    torch.testing.assert_close(logits.grad, upcast.grad.to(dtype), rtol=1e-2, atol=1e-3)


def test_the_graph_keeps_no_second_copy_of_the_logits():
    logits, ids = example(4, 16, 100, dtype=torch.float32)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        token_logprobs(logits, ids, with_score_sq=True)
    large = [t for t in kept if t.numel() >= logits.numel()]
    assert [t.data_ptr() for t in large] == [logits.data_ptr()]
    assert sum(t.numel() for t in kept) < logits.numel() + 10 * ids.numel()


@pytest.mark.parametrize("temperature", [1e-3, 1.0])
@pytest.mark.parametrize("size", [1e4, 1e30, 3e38])
def test_finite_logits_never_give_nan(size, temperature):
    logits = torch.tensor([[[0.0, size, -size], [size, size, -size], [1.0, 2.0, 3.0]]], requires_grad=True)
    ours, score_sq = token_logprobs(logits, torch.tensor([[0, 1, 1]]), temperature=temperature, with_score_sq=True)
    assert ours[0, 1] == 0
    torch.testing.assert_close(ours[0, 2], torch.tensor(-math.log(2)))
    ours.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert score_sq.isfinite().all()


def test_large_logits_lose_no_precision():
    logits = torch.tensor([[[1e4, 1e4 + 1.0], [0.0, 0.0]]])
    ours = token_logprobs(logits, torch.tensor([[0, 0]]))
    torch.testing.assert_close(ours[0, 1], torch.tensor(-math.log1p(math.e)), rtol=1e-6, atol=0)


def test_logits_that_are_not_numbers_get_no_gradient_where_nobody_asks():
    logits, ids = example(2, 4, 5)
    broken = logits.detach().clone()
    broken[0, 1] = math.nan
    broken[1, 2, 3] = math.inf
    broken[1, 3] = math.nan
    broken.requires_grad_()
    weight = torch.ones(2, 4, dtype=torch.float64)
    weight[0, 2] = weight[1, 3] = 0
    torch.where(weight > 0, token_logprobs(broken, ids), 0.0).sum().backward()
    torch.where(weight > 0, token_logprobs(logits, ids), 0.0).sum().backward()
    assert torch.equal(broken.grad, logits.grad)


def test_forbidden_tokens_are_ordinary():
    logits = torch.tensor([[[0.0, -math.inf, 0.0], [0.0, 0.0, 0.0]]], requires_grad=True)
    ours = token_logprobs(logits, torch.tensor([[0, 0]]))
    torch.testing.assert_close(ours[0, 1], torch.tensor(-math.log(2)))
    ours.sum().backward()
    assert logits.grad is not None
    assert logits.grad[0, 0].tolist() == [0.5, 0.0, -0.5]
    assert token_logprobs(logits, torch.tensor([[0, 1]]))[0, 1] == -math.inf


def test_ids_outside_the_vocabulary_are_nan_and_disturb_no_other_token():
    logits, ids = example(2, 5, 7)
    truth = token_logprobs(logits, ids)
    strange = ids.clone()
    strange[0, 2], strange[1, 4] = -100, 7
    ours, score_sq = token_logprobs(logits, strange, with_score_sq=True)
    assert ours[0, 2].isnan()
    assert ours[1, 4].isnan()
    assert torch.equal(score_sq.isnan(), ours.isnan())
    assert torch.equal(ours[~ours.isnan()], truth[~ours.isnan()])


def test_int32_ids_and_sliced_logits_are_fine():
    logits, ids = example(2, 6, 7)
    wide = torch.cat([logits, logits], 2)[:, :, :7]
    assert torch.equal(token_logprobs(wide, ids.int()), token_logprobs(logits, ids))
    assert token_logprobs(logits[:, :1], ids[:, :1]).tolist() == [[0.0], [0.0]]
    assert token_logprobs(logits[:0], ids[:0]).shape == (0, 6)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_must_be_positive(temperature):
    logits, ids = example(1, 2, 3)
    with pytest.raises(ValueError, match="temperature must be a positive, finite number, got"):
        token_logprobs(logits, ids, temperature=temperature)


def test_shapes_are_checked():
    logits, ids = example(2, 4, 3)
    with pytest.raises(ValueError, match=r"logits \[n, s, V\] and input_ids \[n, s\]"):
        token_logprobs(logits, ids.T)
    with pytest.raises(ValueError, match="logits"):
        token_logprobs(logits[0], ids)
