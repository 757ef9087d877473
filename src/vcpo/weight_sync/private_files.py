"""Files that only this user can read or write, with names that are never used twice."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from vcpo.errors import WeightSyncError


def unique_name(prefix: str, suffix: str) -> str:
    """A file name that no earlier run used."""
    return f"{prefix}{secrets.token_hex(8)}{suffix}"


def create(path: Path) -> int:
    """A new file, mode 0600, open for reading and writing; an existing one (or a link in its place) is refused."""
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0), 0o600)


def open_for_reading(path: Path) -> int:
    """An existing file that belongs to this user and that nobody else can touch.

    Raises FileNotFoundError when it is gone, WeightSyncError when another user could have written it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise WeightSyncError(f"cannot open the weights {path}: {error.strerror}") from None
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        os.close(fd)
        mode = stat.filemode(info.st_mode)
        raise WeightSyncError(f"{path} must be a file of this user with mode 0600, found {mode}, owner {info.st_uid}")
    return fd


def write_atomically(path: Path, data: bytes, *, fsync: bool) -> None:
    """Replace `path` by `data` in one step: a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(unique_name(f".{path.name}-", ".tmp"))
    fd = create(temporary)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            if fsync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sweep(directory: Path, *patterns: str) -> None:
    """Remove what an earlier run in the same directory left behind."""
    for pattern in patterns:
        for path in directory.glob(pattern):
            path.unlink(missing_ok=True)
