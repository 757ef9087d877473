"""The cost of exact score norms: measured on what the page says, and shown beside the goals. No time is asserted."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from vcpo.bench import score_norms
from vcpo.bench.score_norms import Cell, bench_score_norms, measure
from vcpo.bench.score_norms_page import memory_goal, score_norms_page, time_goal
from vcpo.cli.main import app

TINY = {"tokens": 16, "width": 64, "layers": 1, "vocabulary": 50, "repeats": 1}


@pytest.mark.parametrize(
    "cell",
    [
        Cell("plain", **TINY, methods=("exact", "exact chunked", "one by one", "loop", "logit")),
        Cell("cut", **TINY, methods=("exact",), micro_batch=4),
        Cell("checkpointing", **TINY, methods=("exact", "two_pass"), checkpointing=True),
    ],
    ids=lambda c: c.name,
)
def test_a_cell_times_every_method_against_the_plain_step(cell):
    found = measure(cell)
    assert [row["method"] for row in found["rows"]] == list(cell.methods)
    assert found["gradient_bytes"] > 100_000
    for row in found["rows"]:
        assert 0 < row["time_ratio_min"] <= row["time_ratio"] <= row["time_ratio_max"]
        assert 0.3 < row["memory_ratio"] < 4
        if row["norm_error"] is not None:
            assert row["norm_error"] < 1e-5


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_cell_with_adapters():
    pytest.importorskip("peft")
    found = measure(Cell("LoRA", **TINY, lora_rank=2))
    assert found["gradient_bytes"] < 100_000


def test_a_method_that_gave_way_has_no_figures(monkeypatch):
    monkeypatch.setattr(score_norms.VarianceControl, "score_norms", property(lambda self: "two_pass"))
    with pytest.raises(RuntimeError, match="exact gave way to two_pass"):
        measure(Cell("plain", **TINY))


def test_goals_and_page(tmp_path):
    cell = Cell("T=64", **{**TINY, "tokens": 64}, methods=("exact", "one by one"))
    evidence = bench_score_norms((cell,), command="vcpo bench score-norms", report=lambda line: None)
    assert [e["relative_error"] < 1e-6 for e in evidence["errors"] if e["dtype"] == "float64"] == [True, True]
    goals = [time_goal({**evidence["cells"][0]["cell"], "tokens": t}, "exact") for t in (64, 128, 256, 512)]
    assert goals == [1.27, 1.20, 1.12, 1.12]
    assert time_goal(evidence["cells"][0]["cell"], "two_pass") is None
    assert memory_goal(evidence["cells"][0], "exact") == 1.03
    evidence["cells"][0]["rows"][0].update(time_ratio=1.5, memory_ratio=1.0)
    page = score_norms_page(evidence, "A note.")
    assert "| T=64 | exact | 1.500" in page
    assert "| <= 1.27 | **no** | 1.000 | <= 1.03 | yes |" in page
    assert "times as fast as one backward per trajectory" in page
    assert "No GPU was at hand" in page
    assert "A note." in page
    (tmp_path / "score-norms.json").write_text(json.dumps(evidence))
    result = CliRunner().invoke(app, ["bench", "score-norms", "--plot", "--results", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "score-norms.md").read_text().startswith("# What exact score norms cost")


def test_unknown_cells_are_named():
    result = CliRunner().invoke(app, ["bench", "score-norms", "--cells", "ghost"])
    assert result.exit_code != 0
    assert "names no cell; there are: T=64" in result.output
