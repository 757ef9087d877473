"""Shared by the tests of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def no_picture(monkeypatch):
    """Runs that draw nothing: a picture takes longer than a tiny run."""
    from vcpo import training

    def leave_blank(rows, path: Path, **_) -> Path:
        path.write_bytes(b"")
        return path

    monkeypatch.setattr(training, "plot_run", leave_blank)
