"""A table used both as embedding and as lm_head: its gradient is a sum, so its squared norm has a cross term."""

from __future__ import annotations

import torch
from torch import Tensor

from vcpo.score_norms.chunked_head import HeadSlices
from vcpo.score_norms.kernels import head_gradient_at, upcast
from vcpo.score_norms.module_run import ModuleRun, Rule
from vcpo.score_norms.rules.embedding import TOKEN_GRADIENTS


class TiedCrossTerm:
    """2 <G_embedding, G_head> of each trajectory, the two halves arriving one after the other in the backward.

    The head comes first; of its gradient only the rows that the trajectory's own tokens name are kept, [n, T, p].
    """

    def __init__(self, embedding_rule: Rule, token_ids: Tensor) -> None:
        self._token_gradients = TOKEN_GRADIENTS[embedding_rule]
        self._ids = token_ids
        self._head: Tensor | None = None

    def at_head(self, run: ModuleRun) -> None:
        """Keep what the cross term needs of the head's gradient."""
        ids = run.rows(self._ids).reshape(run.n, -1)
        self._head = head_gradient_at(ids, run.tokens(run.input), run.tokens(run.grad))

    def at_chunked_head(self, slices: HeadSlices) -> None:
        """The same from a head whose logits were never whole."""
        self._head = slices.named(self._ids)

    def at_embedding(self, run: ModuleRun) -> Tensor:
        """The cross term, [n] fp64; 0 when no gradient came through the head."""
        head, self._head = self._head, None
        if head is None:
            return torch.zeros(run.n, dtype=torch.float64)
        _, d = self._token_gradients(run)
        return 2 * (head * upcast(d)).sum((1, 2), dtype=torch.float64)
