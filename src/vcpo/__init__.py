"""vcpo: stable asynchronous RL post-training of language models. Importing it costs nothing; names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "Batch": "vcpo.batch",
    "VarianceControl": "vcpo.learner.variance_control",
    "scaled_lr": "vcpo.learner.scaled_lr",
    "UpdateReport": "vcpo.metrics",
}
_MODULES = ("core", "score_norms")

if TYPE_CHECKING:
    from vcpo import core, score_norms
    from vcpo.batch import Batch
    from vcpo.learner.scaled_lr import scaled_lr
    from vcpo.learner.variance_control import VarianceControl
    from vcpo.metrics import UpdateReport

__all__ = ["Batch", "UpdateReport", "VarianceControl", "__version__", "core", "scaled_lr", "score_norms"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name in _MODULES:
        return import_module(f"vcpo.{name}")
    raise AttributeError(f"module 'vcpo' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
