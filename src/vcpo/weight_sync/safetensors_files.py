"""Weights as safetensors files: one file per version, and a small file that names the newest one.

Every file is written under another name and renamed, so a reader sees a whole file or none. The two newest are kept:
a reader that has just read the name of one can still open it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from vcpo.errors import WeightSyncError
from vcpo.weight_sync import private_files
from vcpo.weight_sync.layout import WeightLayout, weights_fingerprint

_PREFIX, _SUFFIX = "weights-", ".safetensors"
_POINTER = "newest-weights.json"
_KEPT = 2


class SafetensorsPublisher:
    """Publishes weights shaped like `named` as files in `directory`; files that earlier runs left there are removed first.

    `fsync`: also wait until the bytes are on the disk (for file systems shared between machines).
    """

    def __init__(self, directory: Path, named: Mapping[str, Tensor], *, fsync: bool = False) -> None:
        self._layout = WeightLayout.of(named)
        self._fsync = fsync
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory.resolve()
        self._files: list[Path] = []
        self._newest = -1
        self._sweep()

    def publish(self, named: Mapping[str, Tensor], policy_version: int) -> None:
        """Write `named` and point to it. Raises WeightSyncError for another layout or an old version."""
        if policy_version <= self._newest:
            raise WeightSyncError(f"versions may only grow: {self._newest} is published, got {policy_version}")
        self._layout.check(named)
        # Copies, because safetensors refuses tensors that are parts of one storage (a fused buffer cut in two).
        tensors = {e.name: named[e.name].detach().to("cpu", copy=True).contiguous() for e in self._layout.entries}
        metadata = {"policy_version": str(policy_version), "fingerprint": self._layout.fingerprint}
        path = self._directory / private_files.unique_name(f"{_PREFIX}{policy_version:08d}-", _SUFFIX)
        pointer = {"file": path.name, "policy_version": policy_version}
        try:
            private_files.write_atomically(path, safetensors.torch.save(tensors, metadata), fsync=self._fsync)
            self._files.append(path)
            private_files.write_atomically(self._directory / _POINTER, json.dumps(pointer).encode(), fsync=self._fsync)
        except OSError as error:
            raise WeightSyncError(f"cannot write weights to {self._directory}: {error.strerror}") from None
        self._newest = policy_version
        while len(self._files) > _KEPT:
            self._files.pop(0).unlink(missing_ok=True)

    def address(self) -> dict[str, Any]:
        """Kind, directory and fingerprint."""
        return {"kind": "safetensors", "path": str(self._directory), "fingerprint": self._layout.fingerprint}

    def close(self) -> None:
        """Remove the weight files and the pointer."""
        self._sweep()
        self._files.clear()

    def _sweep(self) -> None:
        private_files.sweep(self._directory, f"{_PREFIX}*{_SUFFIX}", f".{_PREFIX}*.tmp", _POINTER, f".{_POINTER}-*.tmp")


class SafetensorsReader:
    """Attaches to a SafetensorsPublisher's address."""

    def __init__(self, address: Mapping[str, Any]) -> None:
        self._directory = Path(address["path"])
        self._fingerprint = str(address["fingerprint"])

    def newest(self) -> int | None:
        """The newest published version, None before the first: one small file read."""
        pointer = self._pointer()
        return None if pointer is None else pointer[1]

    def load(self, *, timeout_s: float = 30.0) -> tuple[dict[str, Tensor], int]:
        """Read the newest file; tried again when it was replaced meanwhile, for at most `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while True:
            pointer = self._pointer()
            if pointer is None:
                raise WeightSyncError(f"no weights have been published in {self._directory} yet")
            name, version = pointer
            try:
                data = _read(self._directory / name)
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    raise WeightSyncError(f"the weights {self._directory / name} are gone") from None
                continue
            return self._checked(safetensors.torch.load(data), name), version

    def close(self) -> None:
        """Nothing to let go of."""

    def _checked(self, named: dict[str, Tensor], name: str) -> dict[str, Tensor]:
        if weights_fingerprint(named) != self._fingerprint:
            raise WeightSyncError(f"the weights {self._directory / name} belong to another model")
        return named

    def _pointer(self) -> tuple[str, int] | None:
        try:
            data = json.loads(_read(self._directory / _POINTER))
        except FileNotFoundError:
            return None
        name = data["file"]
        if os.path.basename(name) != name or not (name.startswith(_PREFIX) and name.endswith(_SUFFIX)):
            raise WeightSyncError(
                f"{self._directory / _POINTER} names {name!r}, which is not a weight file of that folder"
            )
        return name, int(data["policy_version"])


def _read(path: Path) -> bytes:
    with os.fdopen(private_files.open_for_reading(path), "rb") as file:
        return file.read()
