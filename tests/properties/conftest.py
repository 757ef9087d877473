"""Running one optimizer batch cut in any way, on one rank or two."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("rank_worker.py")


@pytest.fixture(scope="session")
def run_on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], list[dict[str, Any]]]:
    """run_on_two_ranks(job) -> what each of two gloo processes found; the job is JSON (see rank_worker.py)."""

    def run(job: dict[str, Any]) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("ranks")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        (folder / "job.json").write_text(json.dumps({**job, "port": port}))
        workers = [
            subprocess.Popen([sys.executable, str(WORKER), str(folder), str(rank)], stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        errors = [w.communicate(timeout=120)[1] for w in workers]
        assert all(w.returncode == 0 for w in workers), "\n".join(errors)
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]

    return run
