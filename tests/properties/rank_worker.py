"""One of two gloo ranks: VarianceControl on this rank's rows of the toy batch; the gradient and report as JSON.

Called as: rank_worker.py FOLDER RANK, with FOLDER/job.json = {port, settings: [...], rows: [rank 0's, rank 1's], parts}.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from vcpo import VarianceControl, core

spec = importlib.util.spec_from_file_location("toys", Path(__file__).parents[1] / "conftest.py")
assert spec is not None
assert spec.loader is not None
toys = importlib.util.module_from_spec(spec)
spec.loader.exec_module(toys)


def one_batch(settings: dict, mine: list[int], parts: int) -> dict:
    model = toys._toy_policy()
    batch = toys._toy_batch(model)
    caught: dict[str, list] = {}

    class Catch(torch.optim.SGD):
        def step(self, closure=None):
            caught.update({n: p.grad.tolist() for n, p in model.named_parameters()})
            return super().step(closure)

    vc = VarianceControl(model, Catch(model.parameters(), lr=0.1), **settings)
    with vc.batch(batch.rewards[mine], batch.group_ids[mine], batch.action_lengths[mine]):
        for local in torch.arange(len(mine)).chunk(parts) if mine else []:
            micro = batch.rows(torch.tensor(mine)[local])
            with vc.forward():
                logits = model(micro.input_ids, micro.attention_mask)
            lp, score_sq = core.token_logprobs(logits, micro.input_ids, with_score_sq=True)
            vc.backward(lp, micro.sampler_logprobs, micro.action_mask, rows=local, score_sq=score_sq)
    report = vc.step()
    parameters = {n: p.tolist() for n, p in model.named_parameters()}
    return {"gradient": caught, "report": report.to_dict(), "parameters": parameters}


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    job = json.loads((folder / "job.json").read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{job['port']}", rank=rank, world_size=2)
    results = [one_batch(s, job["rows"][rank], job["parts"]) for s in job["settings"]]
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
