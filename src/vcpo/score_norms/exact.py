"""Exact score norms inside the one backward of the update: not there yet."""

from __future__ import annotations

from torch import Tensor, nn

from vcpo.batch import Batch
from vcpo.errors import ScoreNormError


def exact(model: nn.Module, batch: Batch) -> Tensor:
    """Raises ScoreNormError: norms and gradient in a single backward are not available yet."""
    raise ScoreNormError(
        "score_norms 'exact' is not available yet: use 'two_pass' (the same numbers from a pass of their own) or 'logit'"
    )
