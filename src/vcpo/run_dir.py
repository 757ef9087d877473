"""The folder of one run: which one, whether it may be written, and the names of the files in it. No torch."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path

from vcpo.errors import ConfigError

CONFIG, METRICS, SUMMARY, PICTURE, POLICY = "config.toml", "metrics.jsonl", "summary.json", "run.png", "policy"
FILES = (CONFIG, METRICS, SUMMARY, PICTURE, POLICY)
"""What a run leaves behind; samplers add logs and weights of their own."""


def holds_run(folder: Path) -> bool:
    """Whether a run has been started in this folder."""
    return any((folder / name).exists() for name in (CONFIG, METRICS, SUMMARY))


def free_run_dir(folder: Path) -> Path:
    """The folder itself, or the first of FOLDER-2, FOLDER-3, ... that holds no run yet."""
    if not holds_run(folder):
        return folder
    numbered = (folder.with_name(f"{folder.name}-{n}") for n in itertools.count(2))
    return next(f for f in numbered if not holds_run(f))


def check_run_dir(folder: Path, *, overwrite: bool = False) -> None:
    """Raise ConfigError if a run could not be written there. Creates nothing."""
    if holds_run(folder) and not overwrite:
        raise ConfigError(
            f"run_dir {folder} already holds a run: choose another with --run-dir, or replace it with --overwrite"
        )
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not there.is_dir():
        raise ConfigError(f"run_dir {folder} cannot be made: {there} is a file; choose another with --run-dir")
    try:
        with tempfile.TemporaryFile(dir=there):  # os.access tells root that everything is writable
            pass
    except OSError as error:
        raise ConfigError(
            f"run_dir {folder} cannot be written ({error.strerror}): choose another with --run-dir"
        ) from None


def open_run_dir(folder: Path, *, overwrite: bool = False) -> Path:
    """Make the folder, empty of any earlier run, and return it; ConfigError as in `check_run_dir`."""
    check_run_dir(folder, overwrite=overwrite)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            old = folder / name
            if old.is_dir():
                shutil.rmtree(old)
            else:
                old.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run_dir {folder} cannot be written ({error.strerror}): choose another with --run-dir"
        ) from None
    return folder
