"""A key/value cache whose rows can leave and join between decode steps.

All rows share one number of columns: new ones are added on the right by the model, a row with fewer real tokens has
masked columns on its left. The columns live in a larger buffer, so a decode step copies one column, not all of them.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

_SPARE_COLUMNS = 64  # room added whenever the buffer is too small: each column is then copied about once


class RowLayer(DynamicLayer):
    """The cache of one attention layer; `keys` and `values` [rows, heads, columns, dim] are views of larger buffers."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self._key_buffer: Tensor | None = None
        self._value_buffer: Tensor | None = None
        self._end = 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append the columns of this forward pass, return all columns."""
        begin, self._end = self._end, self._end + key_states.shape[-2]
        if self._key_buffer is None or self._end > self._key_buffer.shape[-2]:
            begin = self._grow(key_states, value_states)
        assert self._key_buffer is not None
        assert self._value_buffer is not None
        self._key_buffer[:, :, begin : self._end] = key_states
        self._value_buffer[:, :, begin : self._end] = value_states
        start = self._end - key_states.shape[-2] - self.get_seq_length()
        self.keys = self._key_buffer[:, :, start : self._end]
        self.values = self._value_buffer[:, :, start : self._end]
        self.is_initialized = True
        return self.keys, self.values

    def _grow(self, key_states: Tensor, value_states: Tensor) -> int:
        """Move the columns in use to the front of a larger buffer; returns where the new ones go."""
        used = self.get_seq_length()
        self._end = used + key_states.shape[-2]
        keys, values = self.held() if used else (None, None)
        self._key_buffer = _roomier(keys, key_states, self._end)
        self._value_buffer = _roomier(values, value_states, self._end)
        return used

    def held(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all columns; the layer must have some."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def replace(self, keys: Tensor, values: Tensor) -> None:
        """Hold these columns instead."""
        self.keys, self.values = keys, values
        self._key_buffer, self._value_buffer = keys, values
        self._end = keys.shape[-2]
        self.is_initialized = True

    def drop_left(self, columns: int) -> None:
        """Forget the leftmost columns; nothing is copied."""
        keys, values = self.held()
        self.keys, self.values = keys[:, :, columns:], values[:, :, columns:]


class RowCache(Cache):
    """One RowLayer per attention layer, made when the model first writes to it."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=RowLayer)

    @property
    def rows(self) -> list[RowLayer]:
        """The layers."""
        return cast("list[RowLayer]", self.layers)

    @property
    def columns(self) -> int:
        """Columns that every row has."""
        return self.get_seq_length()

    def select(self, index: Tensor) -> None:
        """Hold rows `index` ([m] int64) instead: fewer, reordered, or repeated ones."""
        for layer in self.rows:
            keys, values = layer.held()
            layer.replace(keys.index_select(0, index), values.index_select(0, index))

    def drop_left(self, columns: int) -> None:
        """Forget the leftmost columns of every row."""
        if columns > 0:
            for layer in self.rows:
                layer.drop_left(columns)

    def append_rows(self, other: RowCache) -> None:
        """Add the rows of `other` below these; the shorter of the two gets zero columns on its left."""
        columns = max(self.columns, other.columns)
        for layer, more in zip(self.rows, other.rows, strict=True):
            pairs = zip(layer.held(), more.held(), strict=True)
            layer.replace(*(_stacked(top, bottom, columns) for top, bottom in pairs))


def _roomier(old: Tensor | None, new: Tensor, columns: int) -> Tensor:
    n, heads, _, dim = new.shape
    buffer = new.new_empty(n, heads, columns + max(_SPARE_COLUMNS, columns // 4), dim)
    if old is not None:
        buffer[:, :, : old.shape[2]] = old
    return buffer


def _stacked(top: Tensor, bottom: Tensor, columns: int) -> Tensor:
    _, heads, _, dim = top.shape
    both = top.new_zeros(top.shape[0] + bottom.shape[0], heads, columns, dim)
    both[: top.shape[0], :, columns - top.shape[2] :] = top
    both[top.shape[0] :, :, columns - bottom.shape[2] :] = bottom
    return both
