"""Fixtures that several rooms use: a small fp64 policy whose gradients are cheap, and ragged batches for it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

from vcpo import Batch, core

settings.register_profile("vcpo", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("vcpo")
torch.set_num_threads(1)


class ToyPolicy(nn.Module):
    """A causal language model of about 500 parameters: embedding, running mean, one hidden layer, logits."""

    def __init__(self, vocab: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        real = attention_mask.to(self.embedding.weight.dtype)[..., None]
        x = self.embedding(input_ids) * real
        mean = x.cumsum(1) / real.cumsum(1).clamp(min=1)
        return self.head(torch.tanh(self.hidden(mean + x)))


def _toy_policy(seed: int = 0, dtype: torch.dtype = torch.float64) -> ToyPolicy:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ToyPolicy().to(dtype)


def _toy_batch(
    policy: nn.Module,
    *,
    groups: int = 3,
    members: int = 4,
    width: int = 10,
    spread: float = 0.6,
    seed: int = 0,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Batch:
    """Ragged, right-padded rows; sampler log-probs are the policy's own plus noise, so that weights differ."""
    g = torch.Generator().manual_seed(seed)
    n = groups * members
    prompt = 2
    lengths = torch.randint(1, width - prompt + 1, (n,), generator=g)
    columns = torch.arange(width)
    attention = columns < (prompt + lengths)[:, None]
    action = attention & (columns >= prompt)
    ids = torch.randint(0, 11, (n, width), generator=g)
    with torch.no_grad():
        logprobs = core.token_logprobs(policy(ids, attention), ids, temperature=temperature)
    noise = spread * torch.randn(n, width, generator=g, dtype=torch.float64) / width**0.5
    rewards = torch.randint(0, 5, (n,), generator=g).double() / 2 + torch.rand(n, generator=g, dtype=torch.float64)
    return Batch(
        input_ids=ids,
        attention_mask=attention,
        action_mask=action,
        sampler_logprobs=(logprobs.double() + noise).to(dtype),
        rewards=rewards.to(dtype),
        group_ids=torch.arange(groups).repeat_interleave(members) * 7 - 3,
        temperature=temperature,
    )


@pytest.fixture(scope="session")
def make_toy_policy() -> Callable[..., ToyPolicy]:
    """make_toy_policy(seed=0, dtype=float64): the same parameters for the same seed."""
    return _toy_policy


@pytest.fixture(scope="session")
def make_toy_batch() -> Callable[..., Batch]:
    """make_toy_batch(policy, groups=, members=, width=, spread=, seed=): a ragged batch."""
    return _toy_batch


@pytest.fixture(scope="session")
def clone() -> Callable[[nn.Module], nn.Module]:
    """A deep copy of a module."""
    return copy.deepcopy
