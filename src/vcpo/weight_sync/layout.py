"""Which tensors a set of weights has, where each stands in a flat block of bytes, and a fingerprint of all that."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vcpo.errors import WeightSyncError

_ALIGN = 64  # torch can view bytes as any dtype only at a multiple of its size


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the set."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch knows it."""
        return getattr(torch, self.dtype)


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """Names, shapes, dtypes and places of a set of weights. Tied weights (one storage, several names) stand in it once."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, named: Mapping[str, Tensor]) -> WeightLayout:
        """The layout of `named`, in its order; the first name of a tied weight is the one that is kept."""
        if not named:
            raise WeightSyncError("cannot publish an empty set of weights: pass dict(model.named_parameters())")
        entries: list[Entry] = []
        offset = 0
        for name, tensor in distinct(named).items():
            nbytes = tensor.numel() * tensor.element_size()
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries.append(Entry(name, tuple(tensor.shape), dtype, offset, nbytes))
            offset += -(-nbytes // _ALIGN) * _ALIGN
        return cls(tuple(entries))

    @property
    def nbytes(self) -> int:
        """Bytes of one complete set, alignment gaps included; at least one alignment unit."""
        last = self.entries[-1]
        return max(last.offset + -(-last.nbytes // _ALIGN) * _ALIGN, _ALIGN)

    @property
    def fingerprint(self) -> str:
        """64 hex digits over names, shapes and dtypes: equal exactly when weights can be exchanged, in whatever order."""
        text = json.dumps(sorted([e.name, list(e.shape), e.dtype] for e in self.entries))
        return hashlib.sha256(text.encode()).hexdigest()

    def check(self, named: Mapping[str, Tensor]) -> None:
        """Raise WeightSyncError, naming the tensor, unless `named` has exactly this layout (further aliases may be there)."""
        for e in self.entries:
            if e.name not in named:
                raise WeightSyncError(f"weights lack {e.name!r}, which was there when the publisher was made")
            tensor = named[e.name]
            if tuple(tensor.shape) != e.shape or tensor.dtype != e.torch_dtype:
                raise WeightSyncError(
                    f"{e.name!r} is {list(tensor.shape)} {tensor.dtype}, the publisher was made for {list(e.shape)} {e.dtype}"
                )
        known = {_identity(named[e.name]) for e in self.entries}
        extra = [name for name, tensor in named.items() if tensor.numel() and _identity(tensor) not in known]
        if extra:
            raise WeightSyncError(f"weights have {extra[0]!r}, which was not there when the publisher was made")

    def views(self, buffer: bytearray | memoryview, base: int = 0) -> dict[str, Tensor]:
        """The tensors as views of `buffer`, whose byte `base` is where the set starts."""
        return {e.name: _view(buffer, base, e) for e in self.entries}

    def to_json(self) -> str:
        """A JSON list, one row per tensor."""
        return json.dumps([[e.name, list(e.shape), e.dtype, e.offset, e.nbytes] for e in self.entries])

    @classmethod
    def from_json(cls, text: str | bytes) -> WeightLayout:
        """The inverse of `to_json`."""
        rows = json.loads(text)
        return cls(tuple(Entry(name, tuple(shape), dtype, at, size) for name, shape, dtype, at, size in rows))


def weights_fingerprint(named: Mapping[str, Tensor]) -> str:
    """The fingerprint of a set of weights: 64 hex digits over names, shapes and dtypes (tied weights once)."""
    return WeightLayout.of(named).fingerprint


def distinct(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`named` without further names of a tensor that is already there (tied weights)."""
    seen: set[tuple[object, ...]] = set()
    kept: dict[str, Tensor] = {}
    for name, tensor in named.items():
        if tensor.numel() == 0 or _identity(tensor) not in seen:
            seen.add(_identity(tensor))
            kept[name] = tensor
    return kept


def _identity(tensor: Tensor) -> tuple[object, ...]:
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def _view(buffer: bytearray | memoryview, base: int, e: Entry) -> Tensor:
    if e.nbytes == 0:
        return torch.empty(e.shape, dtype=e.torch_dtype)
    count = e.nbytes // e.torch_dtype.itemsize
    return torch.frombuffer(buffer, dtype=e.torch_dtype, count=count, offset=base + e.offset).view(e.shape)
