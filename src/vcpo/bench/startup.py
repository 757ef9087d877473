"""How long `import vcpo` and `vcpo --help` take, as whole processes."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Any

COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import vcpo": [sys.executable, "-c", "import vcpo"],
    "vcpo --help": [sys.executable, "-m", "vcpo.cli.main", "--help"],
}


def bench_startup(*, repeats: int = 9) -> dict[str, Any]:
    """Median wall seconds of each command after one warm-up; the empty interpreter stands beside them."""
    rows = []
    for name, command in COMMANDS.items():
        seconds = [_seconds(command) for _ in range(repeats + 1)][1:]
        rows.append(
            {"what": name, "wall_s": round(statistics.median(seconds), 3), "wall_s_max": round(max(seconds), 3)}
        )
    return {"repeats": repeats, "rows": rows}


def _seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begin
