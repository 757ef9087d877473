from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import vcpo
from vcpo.cli.main import app

HEAVY = ["torch", "transformers", "pydantic", "matplotlib", "numpy", "reasoning_gym"]


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["tasks", "--help"], ["bench", "--help"], ["-h"]]
)
def test_every_command_has_help(arguments):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "Usage: " in result.output


def test_help_lists_the_commands_and_version_is_printed():
    output = CliRunner().invoke(app, ["--help"]).output
    for command in ("train", "tasks", "bench"):
        assert f"\n  {command} " in output
    assert CliRunner().invoke(app, ["--version"]).output == f"vcpo {vcpo.__version__}\n"


@pytest.mark.parametrize(
    "code",
    [
        "import vcpo",
        "import vcpo.cli.main",
        "import vcpo.cli.main as m\ntry: m.app(['--help'])\nexcept SystemExit as e: assert e.code == 0",
    ],
)
def test_help_and_import_load_nothing_heavy(code):
    check = f"\nimport sys\nloaded = [m for m in {HEAVY!r} if m in sys.modules]\nassert not loaded, loaded"
    done = subprocess.run([sys.executable, "-c", code + check], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_dry_run_tasks_and_help_of_a_command_do_without_torch(tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text('[policy]\npath = "hub/id"\n[task]\nname = "running_sums"\n')
    for arguments in (["train", str(recipe), "--dry-run"], ["tasks"], ["tasks", "running_sums"], ["train", "-h"]):
        code = f"import vcpo.cli.main as m\ntry: m.app({arguments!r})\nexcept SystemExit as e: assert e.code == 0"
        check = "\nimport sys\nassert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)"
        done = subprocess.run([sys.executable, "-c", code + check], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_an_unknown_command_exits_2():
    assert CliRunner().invoke(app, ["trian"]).exit_code == 2
