"""What must not be imported: by `import vcpo`, by the command line's help, by rooms that promise to be free of torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy", "pydantic", "matplotlib", "safetensors")


def loaded(code: str) -> set[str]:
    """Heavy packages in sys.modules after running `code` in a fresh interpreter."""
    probe = f"import sys\n{code}\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.splitlines()[-1].split()) if done.stdout.strip() else set()


@pytest.mark.parametrize("code", ["import vcpo", "import vcpo; dir(vcpo)", "import vcpo.cli.main"])
def test_importing_costs_nothing(code):
    assert loaded(code) == set()


@pytest.mark.parametrize("room", ["types", "errors", "config", "buffer", "run_dir"])
def test_rooms_without_torch(room):
    assert not loaded(f"import vcpo.{room}") & {"torch", "transformers"}


def test_the_probe_sees_what_is_imported():
    assert "torch" in loaded("import vcpo.core")


def test_every_public_name_can_be_reached():
    import vcpo

    for name in vcpo.__all__:
        assert getattr(vcpo, name) is not None
    with pytest.raises(AttributeError, match="it has Batch"):
        _ = vcpo.nonsense
