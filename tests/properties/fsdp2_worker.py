"""One of two gloo ranks that hold one model in pieces (FSDP2): VarianceControl on this rank's groups; results as JSON.

Called as: fsdp2_worker.py FOLDER RANK, with FOLDER/job.json = {port, settings: [...], rows: [rank 0's, rank 1's], parts:
[rank 0's micro-batches, rank 1's], layout: see `policy`, sync: always, last or never, empty: [rows without actions]}.
With RANK = "alone" one process runs the same batch on an unsharded model. Both save under FOLDER/rank{RANK}.json.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from vcpo import VarianceControl, core
from vcpo.errors import VcpoError
from vcpo.forward import forward_logits
from vcpo.score_norms import calls, parts, rules


def load(name: str, path: Path):
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HERE = Path(__file__).parent
toys = load("toys", HERE.parent / "conftest.py")
oracles = load("oracles", HERE.parent / "oracles" / "conftest.py")


def whole(tensor: torch.Tensor | None):
    if tensor is None:
        return None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).tolist()


def policy(family: str, *, tied: bool, sharded: bool, layout: str = "whole") -> torch.nn.Module:
    """layout: whole (everything over both ranks), layers (what lies outside the layers is not sharded), hsdp, own_rank (a
    mesh of this rank alone), fsdp1, tensor_parallel."""
    model = oracles._model(family, tied=tied).eval()  # GPT-2 has dropout
    if not sharded:
        return model
    layers = model.transformer.h if family == "gpt2" else model.model.layers
    if layout == "fsdp1":
        return torch.distributed.fsdp.FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    if layout == "tensor_parallel":
        columns = {"self_attn.q_proj": ColwiseParallel()}
        for layer in layers:
            parallelize_module(layer, init_device_mesh("cpu", (2,)), columns)
        return model
    mesh = None
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    if layout == "own_rank":
        mesh = DeviceMesh("cpu", [dist.get_rank()], _init_backend=True)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    if layout != "layers":
        fully_shard(model, mesh=mesh)
    return model


def ragged_batch(job: dict):
    """Four groups of four; sampler log-probs near the model's own."""
    alone = policy(job["family"], tied=job["tied"], sharded=False)
    return toys._toy_batch(lambda ids, mask: forward_logits(alone, ids, mask), groups=4)


def skipped(run) -> list:
    return [parts.Sums(n, torch.zeros(run.n, *run.module.get_parameter(n).shape)) for n in run.wanted]


def one_batch(job: dict, settings: dict, mine: list[int], *, sharded: bool) -> dict:
    model = policy(job["family"], tied=job["tied"], sharded=sharded, layout=job.get("layout", "whole"))
    batch = ragged_batch(job)
    for row in job.get("empty", []):
        batch.action_mask[row] = False
    caught: dict[str, list] = {}

    class Catch(torch.optim.SGD):
        def step(self, closure=None):
            caught.update({n: whole(p.grad) for n, p in model.named_parameters()})
            return super().step(closure)

    vc = VarianceControl(model, Catch(model.parameters(), lr=0.1), **settings)
    norms = {}
    with vc.batch(batch.rewards[mine], batch.group_ids[mine], batch.action_lengths[mine]):
        pieces = torch.arange(len(mine)).chunk(job["parts"][dist.get_rank() if sharded else 0])
        for number, local in enumerate(pieces):
            if sharded and job.get("sync", "always") != "always":
                model.set_requires_gradient_sync(job["sync"] == "last" and number == len(pieces) - 1)
            micro = batch.rows(torch.tensor(mine)[local])
            with vc.forward():
                logits = forward_logits(model, micro.input_ids, micro.attention_mask)
            lp, score_sq = core.token_logprobs(logits, micro.input_ids, with_score_sq=True)
            vc.backward(lp, micro.sampler_logprobs, micro.action_mask, rows=local, score_sq=score_sq)
            recorded = vc._the_open().recorded("score_norm")
            norms.update({mine[i]: float(recorded[i]) for i in local.tolist()})
    report = vc.step()
    parameters = {n: whole(p.detach()) for n, p in model.named_parameters()}
    return {"gradient": caught, "report": report.to_dict(), "parameters": parameters, "norms": norms}


def main() -> None:
    folder, rank = Path(sys.argv[1]), sys.argv[2]
    job = json.loads((folder / "job.json").read_text())
    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    oracles.widen_internals(patch)
    if job.get("skip"):  # a rule that finds nothing: the self-check has to
        patch.setattr(calls, "rule_for", lambda m: skipped if isinstance(m, torch.nn.Linear) else rules.rule_for(m))
    if rank == "alone":
        rows = sorted(job["rows"][0] + job["rows"][1])
        results = [one_batch(job, s, rows, sharded=False) for s in job["settings"]]
    else:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{job['port']}", rank=int(rank), world_size=2)
        results = []
        for settings in job["settings"]:
            try:
                results.append(one_batch(job, settings, job["rows"][int(rank)], sharded=True))
            except (ValueError, VcpoError) as error:
                results.append({"error": f"{type(error).__name__}: {error}"})
        dist.destroy_process_group()
    (folder / f"rank{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
