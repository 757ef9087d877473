"""A model in pieces on two ranks (FSDP2) takes the step that one process takes: norms, gradient, clipping, parameters."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("fsdp2_worker.py")
SETTINGS = [
    {"score_norms": "two_pass", "max_grad_norm": None},
    {"score_norms": "auto", "max_grad_norm": 1e-3, "weights": "estimator"},
    {"score_norms": "logit", "max_grad_norm": 1e-3},
    {"score_norms": "length", "baseline": "group_mean"},
]
ROWS = [list(range(8)), list(range(8, 16))]


def run(folder: Path, job: dict) -> tuple[list, list, list]:
    """What a process alone and both ranks found."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    (folder / "job.json").write_text(json.dumps({**job, "port": port}))
    ranks = ["0", "1", *(["alone"] if job.get("alone", True) else [])]
    workers = [
        subprocess.Popen([sys.executable, str(WORKER), str(folder), rank], stderr=subprocess.PIPE, text=True)
        for rank in ranks
    ]
    errors = [w.communicate(timeout=200)[1] for w in workers]
    assert all(w.returncode == 0 for w in workers), "\n".join(errors)
    return tuple(json.loads((folder / f"rank{rank}.json").read_text()) for rank in ranks)


def close(found: dict, true: dict) -> None:
    assert found.keys() == true.keys()
    for name, values in true.items():
        expected = torch.tensor(values, dtype=torch.float64)
        size = float(expected.abs().max()) if expected.numel() else 0.0
        torch.testing.assert_close(
            torch.tensor(found[name], dtype=torch.float64), expected, rtol=1e-12, atol=1e-12 * size, msg=name
        )


def job(**changes) -> dict:
    return {"family": "llama", "tied": False, "parts": [1, 1], "rows": ROWS, "settings": SETTINGS, **changes}


def assert_steps_agree(ranks: list, alone: list, settings: list) -> None:
    for i, chosen in enumerate(settings):
        true = alone[i]
        assert true["report"]["skipped"] is None
        for rank in ranks:
            assert "error" not in rank[i], rank[i]
            close(rank[i]["gradient"], true["gradient"])
            close(rank[i]["parameters"], true["parameters"])
            for key in ("ess_ratio", "lr_scale", "grad_norm", "loss"):
                assert rank[i]["report"][key] == pytest.approx(true["report"][key], rel=1e-12), key
        together = {**ranks[0][i]["norms"], **ranks[1][i]["norms"]}
        if chosen.get("baseline") != "group_mean":
            assert together == pytest.approx(true["norms"], rel=1e-12)


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen3", True), ("gpt2", True)])
@pytest.mark.parametrize("parts", [1, 2])
def test_two_ranks_take_the_step_of_one_process(tmp_path, family, tied, parts):
    *ranks, alone = run(tmp_path, job(family=family, tied=tied, parts=[parts, parts]))
    assert_steps_agree(ranks, alone, SETTINGS)


@pytest.mark.parametrize("layout", ["layers", "hsdp"])
def test_partly_sharded_and_replicated_models_too(tmp_path, layout):
    *ranks, alone = run(tmp_path, job(layout=layout, settings=SETTINGS[:2]))
    assert_steps_agree(ranks, alone, SETTINGS[:2])


def test_gradients_may_be_summed_with_the_last_micro_batch_alone(tmp_path):
    *ranks, alone = run(tmp_path, job(parts=[2, 2], sync="last", settings=SETTINGS[:2]))
    assert_steps_agree(ranks, alone, SETTINGS[:2])


REFUSED = {
    "a group that ranks have cut": (
        {"rows": [list(range(6)), list(range(6, 16))]},
        "every group must be whole in one micro-batch of one rank",
    ),
    "loop": ({"settings": [{"score_norms": "loop"}]}, 'score_norms="loop" does not work with sharded parameters'),
    "one rank with more micro-batches": ({"parts": [1, 2]}, "every rank must run equally many micro-batches"),
    "a rank without rows": ({"rows": [list(range(16)), []]}, "every rank must run equally many micro-batches"),
    "gradients never summed": ({"sync": "never", "settings": SETTINGS[3:]}, "set_requires_gradient_sync(True)"),
    "a mesh of each rank's own": ({"layout": "own_rank"}, "is sharded over ranks"),
    "tensor parallelism": ({"layout": "tensor_parallel"}, "no tensor parallelism"),
    "FSDP1": ({"layout": "fsdp1"}, "use fully_shard (FSDP2) instead"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_on_every_rank(tmp_path, case):
    changes, message = REFUSED[case]
    for rank in run(tmp_path, {**job(settings=[{"score_norms": "two_pass"}]), **changes, "alone": False}):
        assert message in rank[0].get("error", "no error")


@pytest.mark.parametrize("empty", [[], [7], list(range(8))])
def test_the_self_check_finds_a_skipped_layer(tmp_path, empty):
    """Also where the last row, or every row, of rank 0 has no action."""
    skipped = job(settings=[{"score_norms": "two_pass"}], skip=True, empty=empty, alone=False)
    for rank in run(tmp_path, skipped):
        assert rank[0].get("error", "no error").startswith("ScoreNormError: ")
        assert "norm is off by" in rank[0]["error"]
