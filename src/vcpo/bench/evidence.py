"""What a published figure carries: command, commit, configuration, seeds, machine and versions. Written as JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("vcpo", "torch", "transformers", "numpy")


def provenance(command: str) -> dict[str, Any]:
    """Where a figure comes from; names the processor, never the host."""
    return {
        "command": command,
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(
            _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)docs/results")
        ),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "system": platform.system()},
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
    }


def write_evidence(path: Path, evidence: dict[str, Any]) -> None:
    """Indented JSON, replaced in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def command_line() -> str:
    """The command as a reader would type it, without the folder the program lies in."""
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])


def origin_lines(evidence: dict[str, Any]) -> list[str]:
    """The same as a few lines of Markdown, for the foot of a page."""
    machine, versions = evidence["machine"], evidence["versions"]
    changed = ", with uncommitted changes" if evidence["uncommitted_changes"] else ""
    return [
        f"- command: `{evidence['command']}`",
        f"- commit: {(evidence['commit'] or 'unknown')[:12]}{changed}, {evidence['date']}",
        f"- machine: {machine['processor']}, {machine['cores']} cores",
        "- versions: " + ", ".join(f"{name} {number}" for name, number in versions.items()),
    ]


def _git(*arguments: str) -> str:
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
