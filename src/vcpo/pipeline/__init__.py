"""The three modes of one loop, and evaluation. Parts are passed in; nothing here knows a config.

run_sync     rollout, score, update, in turns
run_replay   the same in one process, each batch trained exactly k updates after it was sampled
run_async    samplers and learner side by side, the lag bounded by the RolloutBuffer
"""

from __future__ import annotations

from vcpo.pipeline.asynchronous import run_async
from vcpo.pipeline.evaluation import Evaluation, evaluate
from vcpo.pipeline.in_process import run_replay, run_sync
from vcpo.pipeline.parts import Collect, LearnerPort, Parts, PublisherPort, RolloutParts, Scorer, VersionStamp
from vcpo.pipeline.step import RunResult

__all__ = [
    "Collect",
    "Evaluation",
    "LearnerPort",
    "Parts",
    "PublisherPort",
    "RolloutParts",
    "RunResult",
    "Scorer",
    "VersionStamp",
    "evaluate",
    "run_async",
    "run_replay",
    "run_sync",
]
