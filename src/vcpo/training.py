"""One whole run: warm start, evaluation, training, evaluation, and the files it leaves in its folder.

config.toml     the resolved config, to run it again
metrics.jsonl   one row a step, and one at step 0 with the reward before training
run.png         the same as a picture
summary.json    what the run came to
policy/         the trained policy as a plain Hugging Face folder
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from vcpo import build
from vcpo import run_dir as files
from vcpo.config import RunConfig, to_toml
from vcpo.learner.learner import Learner
from vcpo.metrics import JsonlWriter, plot_run, read_jsonl
from vcpo.pipeline import Evaluation, RunResult, evaluate
from vcpo.policy import Policy, save_policy
from vcpo.run_summary import RunSummary, summarize
from vcpo.tasks import Scorer, Task, make_task
from vcpo.weight_sync import make_publisher

Row = Mapping[str, Any]


class Progress(Protocol):
    """Who is told how a run goes on."""

    def warm_start(self, step: int, steps: int, loss: float | None) -> None:
        """A supervised step is done; a loss of None: the whole warm start came from the cache."""
        ...

    def evaluated(self, step: int, evaluation: Evaluation, seconds: float) -> None:
        """Held-out prompts were sampled and scored after `step` optimizer steps; 0: before training."""
        ...

    def training(self) -> None:
        """The first optimizer step begins."""
        ...

    def step(self, row: Row) -> None:
        """An optimizer step is done; its row as in metrics.jsonl."""
        ...


class Quiet:
    """Progress that nobody watches."""

    def warm_start(self, step: int, steps: int, loss: float | None) -> None: ...
    def evaluated(self, step: int, evaluation: Evaluation, seconds: float) -> None: ...
    def training(self) -> None: ...
    def step(self, row: Row) -> None: ...


def train(config: RunConfig, progress: Progress | None = None, *, overwrite: bool = False) -> RunSummary:
    """Run a config from beginning to end and return what it came to.

    Raises ConfigError when the folder holds a run already (unless `overwrite`) or cannot be written, and whatever ends
    the run: RolloutError, RewardError, ... What was measured until then stays in the folder.
    """
    folder = files.open_run_dir(Path(config.run_dir), overwrite=overwrite)
    (folder / files.CONFIG).write_text(to_toml(config), encoding="utf-8")
    with _threads(config.learner.threads):
        return _Training(config, folder, progress or Quiet()).run()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _ProgressSink:
    """Rows to whoever watches."""

    def __init__(self, write: Callable[[Row], None]) -> None:
        self.write = write

    def close(self) -> None: ...


class _HeldOut:
    """The held-out prompts and the evaluations so far."""

    def __init__(self, config: RunConfig, task: Task, policy: Policy, scorer: Any, progress: Progress) -> None:
        self._every, self._last_step = config.evaluation.every, config.steps
        self._prompts = task.heldout_prompts(config.evaluation.prompts) if config.evaluation.prompts else []
        self._rollout = build.build_evaluation_rollout(config, policy)
        self._scorer, self._progress = scorer, progress
        self.done: dict[int, Evaluation] = {}

    def evaluate(self, step: int) -> dict[str, Any]:
        """The column `eval_reward`; none without held-out prompts."""
        if not self._prompts:
            return {}
        began = time.monotonic()
        self.done[step] = evaluate(self._rollout, self._prompts, self._scorer)
        self._progress.evaluated(step, self.done[step], time.monotonic() - began)
        return {"eval_reward": self.done[step].reward_mean}

    def after_step(self, step: int) -> dict[str, Any]:
        due = step == self._last_step or (self._every > 0 and step % self._every == 0)
        return self.evaluate(step) if due else {}


class _Training:
    """The parts of one run, in the order in which they come to life."""

    def __init__(self, config: RunConfig, folder: Path, progress: Progress) -> None:
        self.config, self.folder, self.progress = config, folder, progress

    def run(self) -> RunSummary:
        config = self.config
        task = make_task(config.task.name, **config.task.options)
        with closing(build.build_scorer(config, task)) as scorer:
            return self._run(task, scorer)

    def _run(self, task: Task, scorer: Scorer) -> RunSummary:
        config = self.config
        policy = build.build_policy(config, task, self.progress.warm_start)
        learner = build.build_learner(config, policy)
        held_out = _HeldOut(config, task, policy, scorer, self.progress)
        metrics = JsonlWriter(self.folder / files.METRICS)
        parts = {
            "scorer": scorer,
            "sinks": (metrics, _ProgressSink(self.progress.step)),
            "after_step": held_out.after_step,
        }
        loop = self._side_by_side if config.mode == "async" else self._in_process

        def begin() -> None:
            if columns := held_out.evaluate(0):
                metrics.write({"step": 0, "policy_version": learner.policy_version, **columns})

        try:
            result = loop(task, policy, learner, parts, begin)
            if result.steps not in held_out.done and (columns := held_out.evaluate(result.steps)):
                metrics.write({"step": result.steps, "policy_version": learner.policy_version, **columns})
        finally:
            metrics.close()
            self._draw()
        return self._finish(policy, result, held_out.done)

    def _in_process(
        self, task: Task, policy: Policy, learner: Learner, parts: dict[str, Any], begin: Callable[[], None]
    ) -> RunResult:
        rollout = build.build_rollout(self.config, policy)
        publisher = build.version_stamp(rollout)
        begin()
        self.progress.training()
        whole = build.build_parts(self.config, task, policy, learner, publisher=publisher, **parts)
        return build.run_in_process(self.config, whole, rollout)

    def _side_by_side(
        self, task: Task, policy: Policy, learner: Learner, parts: dict[str, Any], begin: Callable[[], None]
    ) -> RunResult:
        start = self.folder / "start"
        weights = build.TrainedPolicy(learner).named_weights()
        publisher = make_publisher(self.config.rollout.weight_sync, self.folder, weights)
        pool = None
        try:
            save_policy(policy, start)
            pool = build.build_pool(
                self.config, policy, model_dir=start, weight_address=publisher.address(), log_dir=self.folder
            )
            begin()  # while the samplers load
            pool.wait_ready()
            self.progress.training()
            whole = build.build_parts(self.config, task, policy, learner, publisher=publisher, **parts)
            return build.run_side_by_side(self.config, whole, build.build_rollout_parts(self.config, policy, pool))
        finally:
            if pool is not None:
                pool.close()
            publisher.close()
            shutil.rmtree(start, ignore_errors=True)

    def _draw(self) -> None:
        config = self.config
        title = f"{self.folder.name}: {config.task.name}, {config.mode}, seed {config.seed}"
        rows = read_jsonl(self.folder / files.METRICS)
        plot_run(rows, self.folder / files.PICTURE, title=title, max_policy_lag=config.lag_bound)

    def _finish(self, policy: Policy, result: RunResult, evaluations: Mapping[int, Evaluation]) -> RunSummary:
        save_policy(policy, self.folder / files.POLICY)
        rows = read_jsonl(self.folder / files.METRICS)
        summary = summarize(rows, result, evaluations, config=self.config, folder=self.folder)
        (self.folder / files.SUMMARY).write_text(json.dumps(summary.to_dict(), indent=2) + "\n", encoding="utf-8")
        return summary
