"""The linear rule passes over tokens without a gradient, and over no others."""

from __future__ import annotations

import pytest
import torch

from vcpo.score_norms.rules.linear import _asked


def gradient(*at: tuple[int, int, int]) -> torch.Tensor:
    """[2, 6, 3] with a 1 at each (trajectory, token, feature)."""
    d = torch.zeros(2, 6, 3)
    for place in at:
        d[place] = 1
    return d


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([(0, 2, 0), (1, 4, 0)], slice(2, 5)),
        ([(0, 0, 0), (1, 5, 0)], slice(0, 6)),
        ([(0, 2, 0), (1, 1, 2)], slice(0, 3)),  # feature 0 is silent where another one speaks
        ([(0, 2, 0), (1, 4, 1)], slice(2, 6)),
        ([(0, 3, 2)], slice(0, 6)),
    ],
)
def test_every_token_with_a_gradient_is_kept(places, expected):
    assert _asked(gradient(*places)) == expected


def test_nothing_asked_leaves_one_token_of_zeros():
    assert _asked(gradient()) == slice(0, 1)


def test_nan_is_kept_so_that_it_is_seen():
    d = gradient((0, 3, 0))
    d[1, 0, 1] = torch.nan
    assert _asked(d).start == 0
