"""Squared norms from inputs and output gradients, against the gradient written out; also cut into chunks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vcpo.score_norms import kernels

SIZES = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 5), st.integers(1, 5), st.integers(0, 99))
BUDGETS = st.sampled_from([1, 7, 40, 2**24])


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same(found: Tensor, true: Tensor) -> None:
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, true, rtol=1e-11, atol=1e-12)


@given(SIZES, BUDGETS, st.sampled_from(["_gram", "_materialised", "matrix_sq_norms"]))
def test_matrix_sq_norms(sizes, budget, form):
    n, tokens, p, q, seed = sizes
    x, d = normal(n, tokens, p, seed=seed), normal(n, tokens, q, seed=seed + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "MAX_ELEMENTS", budget)
        same(getattr(kernels, form)(x, d), torch.einsum("ntp,ntq->npq", x, d).square().sum((1, 2)))


def test_the_cheaper_form_is_taken(monkeypatch):
    forms = []
    for form in ("_gram", "_materialised"):
        monkeypatch.setattr(kernels, form, lambda x, d, form=form: forms.append(form) or torch.zeros(len(x)))
    for tokens in (4, 64):
        kernels.matrix_sq_norms(torch.zeros(2, tokens, 16), torch.zeros(2, tokens, 48))
    assert forms == ["_gram", "_materialised"]


@given(SIZES)
def test_token_sq_norms_add_equal_ids_of_one_trajectory_only(sizes):
    n, tokens, p, vocab, seed = sizes
    ids = torch.randint(0, vocab, (n, tokens), generator=torch.Generator().manual_seed(seed))
    d = normal(n, tokens, p, seed=seed)
    tables = torch.stack([torch.zeros(vocab, p, dtype=d.dtype).index_add(0, ids[i], d[i]) for i in range(n)])
    same(kernels.token_sq_norms(ids, d), tables.square().sum((1, 2)))


@given(SIZES, st.integers(1, 4), BUDGETS)
def test_head_gradient_at_named_rows(sizes, columns, budget):
    n, tokens, p, vocab, seed = sizes
    ids = torch.randint(0, vocab, (n, tokens), generator=torch.Generator().manual_seed(seed))
    x, d = normal(n, columns, p, seed=seed), normal(n, columns, vocab, seed=seed + 1)
    true = torch.einsum("nsv,nsp->nvp", d, x).gather(1, ids[..., None].expand(-1, -1, p))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "MAX_ELEMENTS", budget)
        torch.testing.assert_close(kernels.head_gradient_at(ids, x, d), true, rtol=1e-11, atol=1e-12)


def test_bf16_is_multiplied_in_fp32():
    """Gradients of two tokens that cancel but for 1e-3: products rounded to bf16 would lose the rest."""
    x = torch.ones(1, 2, 4, dtype=torch.bfloat16)
    d = torch.tensor([[[1.0], [-0.99609375]]], dtype=torch.bfloat16)
    true = torch.tensor([4 * 0.00390625**2], dtype=torch.float64)
    for form in (kernels._gram, kernels._materialised):
        torch.testing.assert_close(form(kernels.upcast(x), kernels.upcast(d)), true, rtol=1e-2, atol=0)
    torch.testing.assert_close(kernels.matrix_sq_norms(x, d), true, rtol=1e-2, atol=0)


def test_the_gram_of_a_shared_input_is_made_once_and_of_another_anew():
    x, y = normal(2, 4, 6, seed=0), normal(2, 4, 6, seed=1)
    d, e = normal(2, 4, 30, seed=2), normal(2, 4, 25, seed=3)
    last = kernels.LastGram()
    for inputs, grads in ((x, d), (x, e), (x.clone(), d), (y, e), (y, d)):
        true = torch.einsum("ntp,ntq->npq", inputs, grads).square().sum((1, 2))
        same(kernels.matrix_sq_norms(inputs, grads, last), true)
    first = last.of(y)
    assert last.of(y.view(2, 4, 6)) is first
    y.add_(1.0)
    torch.testing.assert_close(last.of(y), y @ y.transpose(1, 2))
    assert last.of(x.transpose(1, 2)).shape == (2, 6, 6)
