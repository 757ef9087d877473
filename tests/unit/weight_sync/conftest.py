"""A small set of weights with a tied pair, several dtypes and an empty tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


def _weights(value: float = 0.0) -> dict[str, Tensor]:
    value = float(value)
    embedding = torch.full((5, 3), value)
    return {
        "embedding": embedding,
        "half": torch.full((7,), value, dtype=torch.bfloat16),
        "double": torch.full((2, 2), value, dtype=torch.float64),
        "scalar": torch.tensor(value),
        "none": torch.empty(0, 4),
        "strided": torch.full((4, 6), value)[:, ::2],
        "head": embedding,
    }


@pytest.fixture(scope="session")
def weights() -> Callable[[float], dict[str, Tensor]]:
    """weights(value): every number in it is `value`; "head" is tied to "embedding"."""
    return _weights
