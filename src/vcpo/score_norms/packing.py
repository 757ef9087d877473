"""Trajectories packed end to end in one row: whose token is whose."""

from __future__ import annotations

import torch
from torch import Tensor


class Packing:
    """From [1, total, ...] tokens to [n, longest, ...], zeros behind the shorter ones."""

    def __init__(self, segments: Tensor, n: int) -> None:
        """segments [1, total] or [total] int64: trajectory of each token, -1 for padding; ValueError outside [-1, n)."""
        flat = segments.flatten()
        if flat.is_floating_point() or (flat.numel() and not (int(flat.min()) >= -1 and int(flat.max()) < n)):
            raise ValueError(f"segments must hold trajectory numbers in [0, {n}), or -1 for padding")
        self.segments = flat
        self.total = len(flat)
        self.n = n
        members = [(flat == row).nonzero().flatten() for row in range(n)]
        self.tokens = members
        """Where each trajectory's tokens stand, in order."""
        longest = max((len(m) for m in members), default=0)
        # One entry past the end holds zeros; what is short points there.
        self._index = torch.full((n, max(1, longest)), self.total, dtype=torch.int64, device=flat.device)
        for row, at in enumerate(members):
            self._index[row, : len(at)] = at

    def token_dimension(self, tensor: Tensor) -> int | None:
        """Where the tokens of a [1, ...] tensor stand, features last ([1, heads, total, p] too); None where two could be it."""
        if tensor.ndim < 2 or tensor.shape[0] != 1:
            return None
        found = [i for i in range(1, max(2, tensor.ndim - 1)) if tensor.shape[i] == self.total]
        return found[0] if len(found) == 1 else None

    def padded(self, tokens: Tensor) -> Tensor:
        """[total, ...] -> [n, longest, ...]."""
        return torch.cat([tokens, tokens.new_zeros(1, *tokens.shape[1:])])[self._index]
