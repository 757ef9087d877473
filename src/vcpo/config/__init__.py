"""Every option of a run and how it is read: `load_config("recipes/quickstart.toml", ["learner.lr=1e-3"])`. No torch."""

from __future__ import annotations

from vcpo.config.loading import ALIASES, REFUSED, load_config, make_config, to_json, to_toml
from vcpo.config.rules import config_warnings
from vcpo.config.sections import (
    EvaluationConfig,
    LearnerConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    TaskConfig,
    VarianceControlConfig,
    WarmStartConfig,
)

__all__ = [
    "ALIASES",
    "REFUSED",
    "EvaluationConfig",
    "LearnerConfig",
    "PolicyConfig",
    "RolloutConfig",
    "RunConfig",
    "TaskConfig",
    "VarianceControlConfig",
    "WarmStartConfig",
    "config_warnings",
    "load_config",
    "make_config",
    "to_json",
    "to_toml",
]
