"""Trajectories packed end to end in one row, so that no padding is computed; and back."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vcpo.forward import innermost


@dataclass(frozen=True)
class Packed:
    """The real tokens of [n, s] rows in one row of `total` tokens, row after row."""

    input_ids: Tensor
    """[1, total] int64."""
    position_ids: Tensor
    """[1, total] int64, from 0 again at each trajectory's first token."""
    segments: Tensor
    """[1, total] int64: the row that each token came from; what `vc.forward(segments)` wants."""
    columns: Tensor
    """[1, total] int64: its column there."""
    shape: tuple[int, int]
    """(n, s)."""

    def unpack(self, values: Tensor) -> Tensor:
        """[1, total] per-token values -> [n, s], 0 at padding and at each trajectory's first token.

        A first token has nothing before it that predicts it; in the packed row something of another trajectory stands there.
        """
        kept = torch.where(self.position_ids == 0, torch.zeros_like(values), values)
        return values.new_zeros(self.shape).index_put((self.segments[0], self.columns[0]), kept[0])


def pack(input_ids: Tensor, attention_mask: Tensor) -> Packed:
    """[n, s] token ids and mask (padding left or right) -> one row without padding."""
    real = attention_mask.bool()
    segments, columns = real.nonzero(as_tuple=True)
    positions = (real.long().cumsum(1) - 1)[real]
    return Packed(input_ids[real][None], positions[None], segments[None], columns[None], (real.shape[0], real.shape[1]))


def forward_packed(model: nn.Module, packed: Packed) -> Tensor:
    """Next-token logits [1, total, V]; each trajectory attends to itself alone.

    Which tokens belong together is told by the position ids alone, as transformers' attention masks read it from them.
    ValueError when the model takes no position_ids: its trajectories would see each other.
    """
    accepted = inspect.signature(innermost(model).forward).parameters
    if "position_ids" not in accepted:
        raise ValueError(f"{type(model).__name__} takes no position_ids, so packed trajectories would see each other")
    extra = {"use_cache": False} if "use_cache" in accepted else {}
    output = model(packed.input_ids, position_ids=packed.position_ids, **extra)
    return output if isinstance(output, Tensor) else output.logits
