from __future__ import annotations

import json
import math

import pytest

from vcpo.metrics import JsonlWriter, read_jsonl


def test_rows_come_back_as_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    rows = [{"step": 1, "loss": 0.25, "skipped": None}, {"step": 2, "loss": -1e-12, "skipped": "ess is 0"}]
    for row in rows:
        writer.write(row)
    writer.close()
    assert read_jsonl(path) == rows


def test_each_row_is_on_disk_before_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    for step in (1, 2, 3):
        writer.write({"step": step})
        assert [r["step"] for r in read_jsonl(path)] == list(range(1, step + 1))
    writer.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_are_null_in_strict_json_and_restored_on_reading(tmp_path, value):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write({"step": 1, "grad_norm": value, "histogram": [1.0, value], "counts": {"a": value}})
    writer.close()

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    raw = json.loads(path.read_text(), parse_constant=refuse)
    assert raw["grad_norm"] is None
    assert raw["histogram"] == [1.0, None]
    assert raw["counts"] == {"a": None}
    row = read_jsonl(path)[0]
    assert row["grad_norm"] == value or (math.isnan(row["grad_norm"]) and math.isnan(value))
    assert "nonfinite" not in row


def test_a_torn_last_line_is_left_out_and_a_new_writer_does_not_join_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_jsonl(path) == [{"step": 1}]
    writer = JsonlWriter(path)
    writer.write({"step": 3})
    writer.close()
    assert read_jsonl(path) == [{"step": 1}, {"step": 3}]


def test_unusual_line_ends_inside_text_do_not_cut_a_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write({"skipped": "a\u2028b\nc\x85d"})
    writer.close()
    writer.close()
    assert read_jsonl(path) == [{"skipped": "a\u2028b\nc\x85d"}]
