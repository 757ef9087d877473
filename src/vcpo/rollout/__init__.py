"""The side that generates: engines, pools of sampler processes, and what travels between them. Names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_LAZY = {
    "EmbeddedEngine": "engine",
    "GroupAborted": "pool",
    "GroupCompleted": "pool",
    "GroupRequest": "requests",
    "GroupResult": "requests",
    "GroupStarted": "pool",
    "ProcessSamplerPool": "process_pool",
    "SamplerEvent": "pool",
    "SamplerPool": "pool",
    "SamplerRestarted": "pool",
    "SamplingEngine": "engine",
    "SamplingParams": "requests",
    "Settled": "settle",
    "collect_groups": "collection",
    "decode_completion": "collection",
    "encode_prompt": "collection",
    "settle_group": "settle",
    "to_trajectory_group": "collection",
    "trajectory_seed": "requests",
}

if TYPE_CHECKING:
    from vcpo.rollout.collection import collect_groups, decode_completion, encode_prompt, to_trajectory_group
    from vcpo.rollout.engine import EmbeddedEngine, SamplingEngine
    from vcpo.rollout.pool import (
        GroupAborted,
        GroupCompleted,
        GroupStarted,
        SamplerEvent,
        SamplerPool,
        SamplerRestarted,
    )
    from vcpo.rollout.process_pool import ProcessSamplerPool
    from vcpo.rollout.requests import GroupRequest, GroupResult, SamplingParams, trajectory_seed
    from vcpo.rollout.settle import Settled, settle_group

__all__ = [
    "EmbeddedEngine",
    "GroupAborted",
    "GroupCompleted",
    "GroupRequest",
    "GroupResult",
    "GroupStarted",
    "ProcessSamplerPool",
    "SamplerEvent",
    "SamplerPool",
    "SamplerRestarted",
    "SamplingEngine",
    "SamplingParams",
    "Settled",
    "collect_groups",
    "decode_completion",
    "encode_prompt",
    "settle_group",
    "to_trajectory_group",
    "trajectory_seed",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"vcpo.rollout.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'vcpo.rollout' has no attribute {name!r}; it has {', '.join(__all__)}")
