"""Golden numbers of public implementations and of exact arithmetic, one test per stored case.

A test module names its family and takes a `case`; one test per case of the files is made::

    FAMILY = "ess"
    SKIPS = {"peer.fn": (lambda case: case.params["level"] == "odd", "why these cannot apply")}    # optional

    def test_it(case): ...

The list of cases comes from the files alone: tests/data/golden, or the folder in $VCPO_GOLDEN_DIR. A family's file may
be absent there. `skipped` gives the module's skips, {reason: count}.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

GOLDEN_DIR = Path(os.environ.get("VCPO_GOLDEN_DIR") or Path(__file__).parents[1] / "data" / "golden")
NON_NUMBERS = {"nan", "inf", "-inf"}


@dataclass(frozen=True)
class GoldenCase:
    """One stored case. Lists of numbers are fp64 tensors (ragged rows end in zeros); "nan" and "inf" are floats."""

    name: str
    source: str
    inputs: dict[str, Any]
    params: dict[str, Any]
    outputs: dict[str, Any]
    notes: str

    @property
    def fn(self) -> str:
        return self.params["fn"]

    @property
    def group_ids(self) -> Tensor:
        """`inputs["group"]`, names numbered in order of appearance: [n] int64."""
        names = list(self.inputs["group"])
        return torch.tensor([names.index(name) for name in names])


def decode(value: Any) -> Any:
    """JSON -> floats, fp64 tensors for (nested) lists of numbers, anything else as it is."""
    if isinstance(value, str):
        return float(value) if value in NON_NUMBERS else value
    if isinstance(value, dict):
        return {key: decode(entry) for key, entry in value.items()}
    if not isinstance(value, list):
        return value
    if all(_is_number(x) for x in value):
        return torch.tensor([float(x) for x in value], dtype=torch.float64)
    if all(isinstance(x, list) and all(_is_number(y) for y in x) for x in value):
        width = max(len(row) for row in value)
        rows = [[float(x) for x in row] + [0.0] * (width - len(row)) for row in value]
        return torch.tensor(rows, dtype=torch.float64)
    return [decode(x) for x in value]


def _is_number(value: Any) -> bool:
    return value in NON_NUMBERS if isinstance(value, str) else isinstance(value, int | float)


@cache
def golden_cases(family: str) -> tuple[GoldenCase, ...]:
    path = GOLDEN_DIR / f"{family}.json"
    if not path.exists():
        return ()
    parts = ("inputs", "params", "outputs")
    return tuple(
        GoldenCase(
            name=raw["name"], source=raw["source"], notes=raw.get("notes") or "", **{p: decode(raw[p]) for p in parts}
        )
        for raw in json.loads(path.read_text())["cases"]
    )


def _skip_reason(module: Any, case: GoldenCase) -> str | None:
    applies, reason = getattr(module, "SKIPS", {}).get(case.fn, (None, ""))
    return reason if applies is not None and applies(case) else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" not in metafunc.fixturenames:
        return
    params = []
    for case in golden_cases(metafunc.module.FAMILY):
        reason = _skip_reason(metafunc.module, case)
        marks = [pytest.mark.skip(reason=reason)] if reason else []
        params.append(pytest.param(case, id=case.name, marks=marks))
    metafunc.parametrize("case", params)


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> tuple[GoldenCase, ...]:
    """Every case of the module's family."""
    return golden_cases(request.module.FAMILY)


@pytest.fixture
def skipped(request: pytest.FixtureRequest, cases: tuple[GoldenCase, ...]) -> dict[str, int]:
    """The module's skipped cases, counted by reason."""
    reasons = (_skip_reason(request.module, case) for case in cases)
    return dict(Counter(reason for reason in reasons if reason))
