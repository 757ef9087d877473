"""Score norms: ||grad log pi(trajectory)||, one signature f(model, batch) -> [n] fp64, five ways.

| name | cost | what it is |
|---|---|---|
| loop | a backward per trajectory | the oracle |
| two_pass | a forward and a backward over activations | equal to loop up to rounding |
| exact | next to nothing | equal to loop up to rounding, in the backward that also gives the gradient |
| logit | a forward | proxy: the score with respect to the logits |
| length | nothing | proxy: sqrt of the number of actions |
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from vcpo.batch import Batch
from vcpo.score_norms.chunked_head import chunked_token_logprobs
from vcpo.score_norms.exact import exact
from vcpo.score_norms.gradient_sum import GradientSum, ParameterGradients
from vcpo.score_norms.length import length, length_norms
from vcpo.score_norms.logit import logit, logit_norms
from vcpo.score_norms.loop import loop, trajectory_gradient
from vcpo.score_norms.parts import Share, as_rows
from vcpo.score_norms.self_check import SelfCheckResult, check_in_graph, check_sharded, self_check
from vcpo.score_norms.single_pass import SinglePass
from vcpo.score_norms.taps import Taps, norms_from_squares
from vcpo.score_norms.two_pass import two_pass

__all__ = [
    "GradientSum",
    "ParameterGradients",
    "SelfCheckResult",
    "Share",
    "SinglePass",
    "Taps",
    "as_rows",
    "check_in_graph",
    "check_sharded",
    "chunked_token_logprobs",
    "exact",
    "length",
    "length_norms",
    "logit",
    "logit_norms",
    "loop",
    "methods",
    "norms_from_squares",
    "resolve",
    "self_check",
    "trajectory_gradient",
    "two_pass",
]

methods: dict[str, Callable[[nn.Module, Batch], Tensor]] = {
    "loop": loop,
    "two_pass": two_pass,
    "exact": exact,
    "logit": logit,
    "length": length,
}


def resolve(name: str) -> str:
    """The method that a setting means: "auto" is "exact" (which gives way to two_pass, then loop, where it must).

    ValueError, listing the names, for one that is unknown.
    """
    if name == "auto":
        return "exact"
    if name not in methods:
        raise ValueError(f"score_norms must be one of auto, {', '.join(methods)}; got {name!r}")
    return name
