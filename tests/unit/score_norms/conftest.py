"""Fixtures of the score norms: a small attention model to be varied, and per-parameter comparison with autograd."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vcpo import Batch
from vcpo.score_norms import Taps, trajectory_gradient
from vcpo.score_norms.scoring import scoring_mode, trajectory_logprobs

VOCAB, WIDTH, LONGEST = 13, 8, 7


class Attention(nn.Module):
    """One causal head, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(WIDTH)).masked_fill(~allowed, -1e30)
        return self.out(scores.softmax(-1) @ v)


class SmallLM(nn.Module):
    """Embedding + positions, one attention block, an MLP that tests replace, a head that tests tie."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=2)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.middle = (
            middle if middle is not None else nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        s = input_ids.shape[1]
        allowed = torch.ones(s, s, dtype=torch.bool).tril() & attention_mask.bool()[:, None, :]
        x = self.embed(input_ids) + self.positions(position_ids)
        x = x + self.attention(self.norm1(x), allowed)
        x = x + self.middle(x)
        return self.head(self.norm2(x))


def _lm(middle: nn.Module | None = None, *, tied: bool = False, seed: int = 0) -> SmallLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SmallLM(middle).double()
        if tied:
            model.head.weight = model.embed.weight
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.4)
    return model


def _batch(seed: int = 0) -> Batch:
    """Four ragged rows, padded on both sides at once."""
    generator = torch.Generator().manual_seed(seed)
    start, end, first = torch.tensor([[0, 7, 3], [1, 6, 3], [2, 7, 4], [0, 4, 2]]).T[..., None]
    columns = torch.arange(LONGEST)
    attention = (columns >= start) & (columns < end)
    return Batch(
        input_ids=torch.randint(0, VOCAB, (4, LONGEST), generator=generator) // 2 * 2,  # repeats, and the padding_idx
        attention_mask=attention,
        action_mask=attention & (columns >= first),
        sampler_logprobs=torch.zeros(4, LONGEST),
        rewards=torch.zeros(4),
        group_ids=torch.zeros(4, dtype=torch.int64),
    )


def _assert_exact(model: nn.Module, batch: Batch, *, rtol: float = 1e-10) -> dict[str, Tensor]:
    with scoring_mode(model, gradients=True), Taps(model) as taps:
        squares = taps.squared_norms(trajectory_logprobs(model, batch))
    for row in range(len(batch)):
        for name, gradient in trajectory_gradient(model, batch, row).items():
            torch.testing.assert_close(
                squares[name][row],
                gradient.double().square().sum(),
                rtol=rtol,
                atol=1e-15,
                msg=lambda m, n=name: f"{n}: {m}",
            )
    return squares


@pytest.fixture(scope="session")
def make_lm() -> Callable[..., SmallLM]:
    """make_lm(middle=None, tied=False, seed=0): a small fp64 language model, `middle` [n, s, 8] -> [n, s, 8] inside."""
    return _lm


@pytest.fixture
def batch() -> Batch:
    """Four ragged trajectories."""
    return _batch()


@pytest.fixture(scope="session")
def assert_exact() -> Callable[..., dict[str, Tensor]]:
    """assert_exact(model, batch): the taps give each parameter's squared norm of each trajectory, as autograd does."""
    return _assert_exact


class TokenExperts(nn.Module):
    """Stacked weights, chosen among token by token: [..., 8] -> [..., 8]; nothing but the generic rule knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.zeros(3, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        which = (x.detach()[..., 0] > 0).long() + (x.detach()[..., 1] > 0).long()
        return F.silu((self.stack[which] @ x[..., None])[..., 0])


@pytest.fixture(scope="session")
def token_experts() -> type[TokenExperts]:
    """A module with stacked weights, [..., 8] -> [..., 8], that chooses among them token by token."""
    return TokenExperts
