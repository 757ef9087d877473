"""Which rule answers for which module: a table keyed by the exact forward function.

A subclass that inherits the forward is the same layer; one that overrides it is not, whatever isinstance says
(Gemma3's embedding scales its output). Everything that is not in the table takes the generic rule.
"""

from __future__ import annotations

import sys
from functools import reduce
from typing import Any

from torch import nn

from vcpo.score_norms.module_run import Rule
from vcpo.score_norms.rules.embedding import embedding, scaled_embedding
from vcpo.score_norms.rules.generic import generic
from vcpo.score_norms.rules.linear import conv1d, linear
from vcpo.score_norms.rules.norm_layers import layer_norm, rms_norm, rms_norm_of_transformers

__all__ = ["RULES", "generic", "rule_for"]

_RMS_NORMS = {
    "gemma": "GemmaRMSNorm",
    "gemma2": "Gemma2RMSNorm",
    "gemma3": "Gemma3RMSNorm",
    "llama": "LlamaRMSNorm",
    "mistral": "MistralRMSNorm",
    "mixtral": "MixtralRMSNorm",
    "olmo2": "Olmo2RMSNorm",
    "phi3": "Phi3RMSNorm",
    "qwen2": "Qwen2RMSNorm",
    "qwen2_moe": "Qwen2MoeRMSNorm",
    "qwen3": "Qwen3RMSNorm",
    "qwen3_moe": "Qwen3MoeRMSNorm",
    "smollm3": "SmolLM3RMSNorm",
}

RULES: dict[str, Rule] = {
    "torch.nn.modules.linear.Linear.forward": linear,
    "torch.nn.modules.sparse.Embedding.forward": embedding,
    "torch.nn.modules.normalization.LayerNorm.forward": layer_norm,
    "torch.nn.modules.normalization.RMSNorm.forward": rms_norm,
    "transformers.pytorch_utils.Conv1D.forward": conv1d,
    "transformers.models.gemma3.modeling_gemma3.Gemma3TextScaledWordEmbedding.forward": scaled_embedding,
    **{
        f"transformers.models.{model}.modeling_{model}.{norm}.forward": rms_norm_of_transformers
        for model, norm in _RMS_NORMS.items()
    },
}


def rule_for(module: nn.Module) -> Rule:
    """The rule of the function that `module(...)` will run; the generic one when that function is not known."""
    forward = getattr(module.forward, "__func__", None)
    if forward is None:  # replaced on the instance, by a plain function
        return generic
    name = f"{forward.__module__}.{forward.__qualname__}"
    # A wrapper can carry the name of what it wraps, so the name must also lead to this very function, unwrapped.
    if name not in RULES or hasattr(forward, "__wrapped__") or _resolve(forward) is not forward:
        return generic
    return RULES[name]


def _resolve(function: Any) -> Any:
    try:
        return reduce(getattr, function.__qualname__.split("."), sys.modules[function.__module__])
    except (KeyError, AttributeError):
        return None
