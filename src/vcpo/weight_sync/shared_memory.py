"""Weights in a memory-mapped file with two slots: the writer fills one while readers copy the other.

File: 4096 bytes of header, the layout as JSON, slot 0, slot 1. Header words (8 bytes each, native order) after the magic:

    sequence[0..1]   odd while the slot is being written, even when it is whole; grows with every write
    version[0..1]    policy version held by the slot
    active           the slot that readers should take
    newest           version of the active slot, -1 before the first

Each word is written and read by one aligned 8-byte access, so no word is ever seen half-changed.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vcpo.errors import WeightSyncError
from vcpo.weight_sync import private_files
from vcpo.weight_sync.layout import WeightLayout

_MAGIC = b"VCPOWTS1"
_HEADER = 4096
_FINGERPRINT = slice(8, 72)  # 64 hex digits
_LAYOUT_BYTES, _DATA_START, _SLOT_BYTES = 9, 10, 11  # words with the sizes of the parts
_SEQUENCE, _VERSION, _ACTIVE, _NEWEST = 16, 18, 20, 21  # words of the protocol
_PREFIX, _SUFFIX = "weights-", ".shm"


class SharedMemoryPublisher:
    """Publishes weights shaped like `named` through one mode-0600 file in `directory`; what earlier runs left is removed."""

    def __init__(self, directory: Path, named: Mapping[str, Tensor]) -> None:
        self._layout = WeightLayout.of(named)
        directory.mkdir(parents=True, exist_ok=True)
        private_files.sweep(directory, f"{_PREFIX}*{_SUFFIX}")
        self._path = directory.resolve() / private_files.unique_name(_PREFIX, _SUFFIX)
        layout_json = self._layout.to_json().encode()
        start = -(-(_HEADER + len(layout_json)) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = _create_map(self._path, start + 2 * self._layout.nbytes)
        self._map[: len(_MAGIC)] = _MAGIC
        self._map[_FINGERPRINT] = self._layout.fingerprint.encode()
        self._map[_HEADER : _HEADER + len(layout_json)] = layout_json
        self._words = memoryview(self._map)[:_HEADER].cast("q")
        self._words[_LAYOUT_BYTES], self._words[_DATA_START] = len(layout_json), start
        self._words[_SLOT_BYTES] = self._layout.nbytes
        self._words[_NEWEST] = -1
        whole = memoryview(self._map)
        self._slots = [self._layout.views(whole, start + slot * self._layout.nbytes) for slot in (0, 1)]

    def publish(self, named: Mapping[str, Tensor], policy_version: int) -> None:
        """Copy `named` into the idle slot and make it the active one.

        Raises WeightSyncError for another layout or a version that is not newer.
        """
        if not self._slots:
            raise WeightSyncError(f"cannot publish version {policy_version}: the publisher is closed")
        if policy_version <= self._words[_NEWEST]:
            raise WeightSyncError(f"versions may only grow: {self._words[_NEWEST]} is published, got {policy_version}")
        self._layout.check(named)
        slot = 1 - self._words[_ACTIVE]
        self._words[_SEQUENCE + slot] += 1
        with torch.no_grad():
            for name, target in self._slots[slot].items():
                target.copy_(named[name])
        self._words[_VERSION + slot] = policy_version
        self._words[_SEQUENCE + slot] += 1
        self._words[_ACTIVE] = slot
        self._words[_NEWEST] = policy_version

    def address(self) -> dict[str, Any]:
        """Kind, path and fingerprint."""
        return {"kind": "shared_memory", "path": str(self._path), "fingerprint": self._layout.fingerprint}

    def close(self) -> None:
        """Remove the file; readers that are attached keep what they see."""
        if self._slots:
            self._slots = []
            self._words.release()
            self._path.unlink(missing_ok=True)


class SharedMemoryReader:
    """Attaches to a SharedMemoryPublisher's address. Raises WeightSyncError unless the file is the announced one."""

    def __init__(self, address: Mapping[str, Any]) -> None:
        path = Path(address["path"])
        try:
            fd = private_files.open_for_reading(path)
        except FileNotFoundError:
            raise WeightSyncError(f"there are no weights at {path}: the publisher is closed or never was") from None
        try:
            self._map = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise WeightSyncError(f"{path} is empty, not a file of published weights") from None
        finally:
            os.close(fd)
        self._bytes = memoryview(self._map)
        if len(self._bytes) < _HEADER or self._bytes[: len(_MAGIC)] != _MAGIC:
            raise WeightSyncError(f"{path} is not a file of published weights")
        self._words = self._bytes[:_HEADER].cast("q")
        self._layout = WeightLayout.from_json(bytes(self._bytes[_HEADER : _HEADER + self._words[_LAYOUT_BYTES]]))
        found = bytes(self._bytes[_FINGERPRINT]).decode()
        if not found == self._layout.fingerprint == address["fingerprint"]:
            raise WeightSyncError(
                f"the weights at {path} belong to another model:"
                f" fingerprint {found[:12]}, expected {str(address['fingerprint'])[:12]}"
            )

    def newest(self) -> int | None:
        """The newest published version, None before the first: one 8-byte read."""
        version = self._words[_NEWEST]
        return None if version < 0 else version

    def load(self, *, timeout_s: float = 30.0) -> tuple[dict[str, Tensor], int]:
        """Copy the active slot; tried again when the writer came back to it meanwhile, for at most `timeout_s` seconds."""
        if self.newest() is None:
            raise WeightSyncError("no weights have been published yet")
        start, size = self._words[_DATA_START], self._words[_SLOT_BYTES]
        deadline = time.monotonic() + timeout_s
        while True:
            slot = self._words[_ACTIVE]
            before = self._words[_SEQUENCE + slot]
            if before % 2 == 0:
                version = self._words[_VERSION + slot]
                copy = bytearray(self._bytes[start + slot * size : start + (slot + 1) * size])
                if self._words[_SEQUENCE + slot] == before:
                    return self._layout.views(copy), version
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    f"weights were overwritten while being read for {timeout_s:g} s: publish less often"
                )

    def close(self) -> None:
        """Unmap the file."""
        self._words.release()
        self._bytes.release()
        self._map.close()


def _create_map(path: Path, size: int) -> mmap.mmap:
    fd = private_files.create(path)
    try:
        # Reserve the blocks now: a full disk must be an error here, not a SIGBUS in the middle of a write.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
        else:
            os.ftruncate(fd, size)
        return mmap.mmap(fd, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise WeightSyncError(
            f"cannot reserve {size} bytes for the weights in {path.parent}: {error.strerror}"
        ) from None
    finally:
        os.close(fd)
