"""How new weights travel from the learner to the samplers: one publisher, any number of readers, never a half-written set.

learner:  publisher = make_publisher("shared_memory", run_dir, named); publisher.publish(named, policy_version=3)
sampler:  reader = open_reader(publisher.address());  if reader.newest() == 3: named, version = reader.load()
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from vcpo.errors import ConfigError, WeightSyncError
from vcpo.weight_sync.layout import WeightLayout, weights_fingerprint
from vcpo.weight_sync.safetensors_files import SafetensorsPublisher, SafetensorsReader
from vcpo.weight_sync.shared_memory import SharedMemoryPublisher, SharedMemoryReader

__all__ = [
    "WEIGHT_SYNCS",
    "SafetensorsPublisher",
    "SafetensorsReader",
    "SharedMemoryPublisher",
    "SharedMemoryReader",
    "WeightLayout",
    "WeightPublisher",
    "WeightReader",
    "make_publisher",
    "open_reader",
    "weights_fingerprint",
]


class WeightPublisher(Protocol):
    """The learner's end. Versions may only grow; what is published is always a complete set of weights."""

    def publish(self, named: Mapping[str, Tensor], policy_version: int) -> None:
        """Make these weights the newest ones; the tensors may change as soon as this returns."""
        ...

    def address(self) -> dict[str, Any]:
        """How a reader attaches, as plain JSON."""
        ...

    def close(self) -> None:
        """Remove what was published from disk; may be called twice."""
        ...


class WeightReader(Protocol):
    """A sampler's end."""

    def newest(self) -> int | None:
        """The newest published version, None before the first; cheap enough to ask between decode steps."""
        ...

    def load(self) -> tuple[dict[str, Tensor], int]:
        """A copy of the newest complete weights and their version; tied weights appear once."""
        ...

    def close(self) -> None:
        """Let go of the published weights; may be called twice."""
        ...


WEIGHT_SYNCS: dict[str, tuple[Callable[..., WeightPublisher], Callable[..., WeightReader]]] = {
    "shared_memory": (SharedMemoryPublisher, SharedMemoryReader),
    "safetensors": (SafetensorsPublisher, SafetensorsReader),
}


def make_publisher(kind: str, directory: str | Path, named: Mapping[str, Tensor]) -> WeightPublisher:
    """A publisher of weights shaped like `named` into `directory`; nothing is published yet."""
    return _pair(kind)[0](Path(directory), named)


def open_reader(address: Mapping[str, Any]) -> WeightReader:
    """The reader for a publisher's `address()`; raises WeightSyncError when the weights there are not the announced ones."""
    try:
        return _pair(address["kind"])[1](address)
    except KeyError as error:
        raise WeightSyncError(f"a weight address needs the key {error}, got the keys {sorted(address)}") from None


def _pair(kind: str) -> tuple[Callable[..., WeightPublisher], Callable[..., WeightReader]]:
    if kind not in WEIGHT_SYNCS:
        near = difflib.get_close_matches(str(kind), WEIGHT_SYNCS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"weight_sync must be one of {', '.join(WEIGHT_SYNCS)}, got {kind!r}{hint}")
    return WEIGHT_SYNCS[kind]
