from __future__ import annotations

from pathlib import Path

import pytest

from vcpo.errors import ConfigError
from vcpo.run_dir import check_run_dir, free_run_dir, holds_run, open_run_dir


def started(folder: Path) -> Path:
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / "config.json").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    return folder


def test_a_new_folder_is_made_and_an_earlier_run_is_kept(tmp_path):
    folder = tmp_path / "runs" / "a"
    assert open_run_dir(folder).is_dir()
    assert not holds_run(folder)
    started(folder)
    with pytest.raises(ConfigError, match=r"already holds a run: choose another with --run-dir, or .* --overwrite$"):
        open_run_dir(folder)
    assert (folder / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_overwriting_removes_the_run_and_nothing_else(tmp_path):
    folder = started(tmp_path / "a")
    (folder / "notes.txt").write_text("mine")
    open_run_dir(folder, overwrite=True)
    assert [p.name for p in folder.iterdir()] == ["notes.txt"]


def test_numbers_are_added_until_a_folder_is_free(tmp_path):
    assert free_run_dir(tmp_path / "a") == tmp_path / "a"
    started(tmp_path / "a")
    started(tmp_path / "a-2")
    assert free_run_dir(tmp_path / "a") == tmp_path / "a-3"


def test_checking_creates_nothing(tmp_path):
    check_run_dir(tmp_path / "x" / "y")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", ["", "/deeper/still"])
def test_a_file_in_the_way_is_one_line(tmp_path, below):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be made: .*file is a file; choose another with --run-dir$"):
        check_run_dir(Path(f"{tmp_path}/file{below}"))


def test_a_folder_that_cannot_be_written_is_one_line():
    with pytest.raises(
        ConfigError, match=r"^run_dir /proc/x/y cannot be written \(.*\): choose another with --run-dir$"
    ):
        check_run_dir(Path("/proc/x/y"))
