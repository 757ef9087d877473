from __future__ import annotations

import math

import pytest
import torch

from vcpo.core import lr_scale


@pytest.mark.parametrize(
    ("ess_ratio", "reference", "rule", "scale"),
    [
        (1.0, 1.0, "sqrt", 1.0),
        (0.25, 1.0, "sqrt", 0.5),
        (0.25, 1.0, "linear", 0.25),
        (0.55, 0.55, "sqrt", 1.0),
        (0.9, 0.55, "linear", 1.0),
        (0.275, 0.55, "linear", 0.5),
        (0.0, 0.55, "sqrt", 0.0),
        (1 + 1e-9, 1.0, "linear", 1.0),
    ],
)
def test_by_hand(ess_ratio, reference, rule, scale):
    result = lr_scale(ess_ratio, reference=reference, rule=rule)
    assert isinstance(result, float)
    assert result == pytest.approx(scale, rel=1e-12)
    assert lr_scale(torch.tensor(ess_ratio, dtype=torch.float64), reference=reference, rule=rule) == result


def test_defaults_are_the_papers():
    assert lr_scale(0.5) == math.sqrt(0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1e-9, 1.1])
def test_a_bad_ratio_is_refused(bad):
    with pytest.raises(ValueError, match=r"ess_ratio must be in \[0, 1\], got"):
        lr_scale(bad)


@pytest.mark.parametrize("bad", [0.0, -1.0, 1.5, math.nan, math.inf])
def test_a_bad_reference_is_refused(bad):
    with pytest.raises(ValueError, match=r"reference must be in \(0, 1\], got"):
        lr_scale(0.5, reference=bad)


def test_an_unknown_rule_names_the_known_ones():
    with pytest.raises(ValueError, match="sqrt, linear, got 'cubic'"):
        lr_scale(0.5, rule="cubic")
