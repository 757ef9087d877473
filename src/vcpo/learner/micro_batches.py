"""Cutting an optimizer batch into micro-batches by a token budget."""

from __future__ import annotations

from torch import Tensor


def micro_batches(lengths: Tensor, group_ids: Tensor, *, max_tokens: int) -> list[list[int]]:
    """Row indices per micro-batch such that rows x longest row <= max_tokens (padding included).

    lengths [n]: tokens per trajectory, prompt included; group_ids [n]. Groups stay whole where the budget allows, because
    a cut group costs one more backward; one that is larger than the budget is cut, and one trajectory that is larger than
    the budget gets a micro-batch of its own. Rows keep their order inside a group; groups come in order of first sight.
    """
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(group_ids.tolist()):
        groups.setdefault(group, []).append(row)
    sizes: list[int] = lengths.tolist()
    done: list[list[int]] = []
    current: list[int] = []
    for members in groups.values():
        for part in _fit(members, sizes, max_tokens):
            if current and _cost([*current, *part], sizes) > max_tokens:
                done.append(current)
                current = []
            current = [*current, *part]
    return [*done, current] if current else done


def _fit(members: list[int], sizes: list[int], max_tokens: int) -> list[list[int]]:
    """The group whole if it fits, else row by row."""
    return [members] if _cost(members, sizes) <= max_tokens else [[row] for row in members]


def _cost(rows: list[int], sizes: list[int]) -> int:
    return len(rows) * max(sizes[row] for row in rows)
