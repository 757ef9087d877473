"""Rows of metrics on disk: one JSON object a line, readable while the run goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class MetricSink(Protocol):
    """Where rows of metrics go: a file, a screen, a service."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Take one row; the caller may change its dict afterwards."""
        ...

    def close(self) -> None:
        """Flush and let go; a second call does nothing."""
        ...


class JsonlWriter:
    """Appends rows to a file, each complete on disk before the next begins.

    JSON knows no NaN and no infinity, and many readers refuse them: a non-finite number is written as null and named in
    the row's `nonfinite` key ("nan", "inf" or "-inf"), from which `read_jsonl` restores it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = self.path.open("a", buffering=1, encoding="utf-8")
        if self._ends_torn():
            self._file.write("\n")  # a killed run left half a line: keep it apart from ours

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row."""
        nonfinite = {k: repr(float(v)) for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
        clean = {k: finite(v) for k, v in row.items()}
        if nonfinite:
            clean["nonfinite"] = nonfinite
        self._file.write(json.dumps(clean, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def _ends_torn(self) -> bool:
        with self.path.open("rb") as f:
            f.seek(0, 2)
            if f.tell() == 0:
                return False
            f.seek(-1, 2)
            return f.read(1) != b"\n"


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a file, non-finite numbers restored. A line that is no JSON object, torn by a crash, is left out."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            row.update({k: float(v) for k, v in row.pop("nonfinite", {}).items()})
            rows.append(row)
    return rows


def finite(value: Any) -> Any:
    """The value with every non-finite number inside it replaced by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value
