"""The speed figures: that they are measured on what they say, and that the page shows them. No time is asserted."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from vcpo.bench.overhead import bench_overhead
from vcpo.bench.speed import speed_page
from vcpo.bench.startup import bench_startup
from vcpo.cli.main import app


def test_overhead_compares_every_method_with_the_same_plain_step():
    found = bench_overhead(tokens=16, batch_size=8, width=64, layers=1, vocabulary=50, repeats=1)
    assert [row["score_norms"] for row in found["rows"]] == ["length", "logit", "two_pass"]
    assert found["plain_peak_bytes"] > 100_000
    for row in found["rows"]:
        assert 0 < row["time_ratio_min"] <= row["time_ratio"] <= row["time_ratio_max"]
        assert 0.5 < row["memory_ratio"] < 3


def test_startup_measures_the_real_commands():
    rows = bench_startup(repeats=1)["rows"]
    assert [row["what"] for row in rows] == ["python -c pass", "import vcpo", "vcpo --help"]
    assert all(row["wall_s"] > 0 for row in rows)


def test_the_page_shows_figures_beside_goals(tmp_path):
    evidence = {
        "command": "vcpo bench speed",
        "commit": "0" * 40,
        "uncommitted_changes": False,
        "date": "2026-01-01",
        "machine": {"processor": "P", "cores": 2, "system": "Linux"},
        "versions": {"python": "3.11"},
        "startup": {"rows": [{"what": "import vcpo", "wall_s": 0.04, "wall_s_max": 0.05}]},
        "engine": {"trajectories": 128, "tokens_mean": 37.2, "cpu_s": 0.111},
        "replay": {"steps": 80, "loop_wall_s": 21.0, "process_cpu_s": 25.0},
        "asynchrony": {
            "steps": 40,
            "pairs": [{}, {}, {}],
            "median": {
                "ratio": 0.61,
                "ratio_over_bound": 1.1,
                "generation_s": 5.0,
                "learner_s": 6.0,
                "sync_wall_s": 11.5,
                "sync_threads": 1,
                "async_wall_s": 7.0,
                "async_threads": 1,
            },
        },
        "overhead": {
            "settings": {"tokens": 128, "batch_size": 16, "width": 256, "layers": 4, "vocabulary": 2048, "repeats": 9},
            "rows": [
                {
                    "score_norms": "length",
                    "time_ratio": 1.007,
                    "time_ratio_min": 1.0,
                    "time_ratio_max": 1.02,
                    "memory_ratio": 1.0,
                }
            ],
        },
    }
    page = speed_page(evidence)
    assert "| `import vcpo` | 0.04 s | <= 0.30 s |" in page
    assert "0.111 s | <= 0.25 s |" in page
    assert "| length | 1.007 (1.000 - 1.020) | <= 1.02 | 1.000 | within 5 % |" in page
    (tmp_path / "speed.json").write_text(json.dumps(evidence))
    done = CliRunner().invoke(app, ["bench", "speed", "--plot", "--results", str(tmp_path)])
    assert done.exit_code == 0
    assert (tmp_path / "speed.md").read_text() == page
