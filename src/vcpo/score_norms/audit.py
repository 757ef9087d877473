"""Is every use of every trainable parameter behind a tap? Read off the autograd graph, before any number is trusted.

A parameter that is used outside its own module's forward (F.linear(x, other.weight), a forward called directly, a
module passed over by the hooks) would silently lose part of its gradient. The graph knows: it is walked backwards
from the score; at a tap the walk jumps to the module's inputs, and the part in between must use no parameter but the
module's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from torch.autograd.graph import Node

from vcpo.errors import ScoreNormError
from vcpo.score_norms.calls import Call


def check_every_use_is_tapped(
    roots: Iterable[Node], taps: Mapping[Node, Call], parameters: Mapping[str, nn.Parameter]
) -> None:
    """ScoreNormError naming the parameter when one is reached from the roots other than through its own module's tap."""
    names = {id(p): name for name, p in parameters.items()}
    for name in _parameters_met(roots, taps, frozenset(), names):
        raise ScoreNormError(
            f"parameter '{name}' is used outside the forward of the module that owns it: no exact score norms, use 'loop'"
        )
    for call in taps.values():
        own = set(call.owner.parameters.values())
        for name in _parameters_met(call.output_nodes, taps, frozenset(call.input_nodes), names):
            if name not in own:
                raise ScoreNormError(
                    f"parameter '{name}' is used by module '{call.owner.name}', which does not own it: "
                    "no exact score norms, use 'loop'"
                )


def _parameters_met(
    roots: Iterable[Node], taps: Mapping[Node, Call], boundary: frozenset[Node], names: Mapping[int, str]
) -> Iterable[str]:
    """Names of trainable parameters reached from the roots without entering a tapped module or crossing the boundary."""
    seen: set[Node] = set()
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node in seen or node in boundary:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            if id(variable) in names:
                yield names[id(variable)]
        elif node in taps:
            todo.extend(taps[node].input_nodes)
        else:
            todo.extend(fn for fn, _ in node.next_functions if fn is not None)
