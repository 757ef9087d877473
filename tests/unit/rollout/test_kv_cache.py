"""Rows that leave, join and repeat; columns that come and go."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vcpo.rollout.kv_cache import RowCache

OPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 40)),
        st.tuples(st.just("select"), st.integers(0, 5)),
        st.tuples(st.just("drop"), st.integers(0, 3)),
        st.tuples(st.just("append"), st.integers(1, 90)),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(ops=OPS, seed=st.integers(0, 99))
def test_the_cache_holds_what_plain_concatenation_would(ops, seed):
    """The slow oracle: the same operations on one plain tensor per layer."""
    g = torch.Generator().manual_seed(seed)

    def fill(cache, rows, columns):
        new = [torch.randn(2, rows, 2, columns, 4, generator=g) for _ in range(2)]
        return new, [cache.update(k, v, layer) for layer, (k, v) in enumerate(new)]

    cache = RowCache()
    plain, _ = fill(cache, 3, 5)
    for kind, value in ops:
        rows, columns = plain[0].shape[1], plain[0].shape[3]
        if kind == "add":
            new, seen = fill(cache, rows, value)
            plain = [torch.cat([p, n], 3) for p, n in zip(plain, new, strict=True)]
            for p, (k, v) in zip(plain, seen, strict=True):
                assert torch.equal(torch.stack([k, v]), p), "update must return all columns"
        elif kind == "select":
            index = torch.randint(0, rows, (max(1, rows - value),), generator=g)
            cache.select(index)
            plain = [p[:, index] for p in plain]
        elif kind == "drop":
            cache.drop_left(min(value, columns - 1))
            plain = [p[:, :, :, min(value, columns - 1) :] for p in plain]
        else:
            other = RowCache()
            more, _ = fill(other, 2, value)
            cache.append_rows(other)
            width = max(columns, value)
            pad = torch.nn.functional.pad
            plain = [
                torch.cat([pad(t, (0, 0, width - t.shape[3], 0)) for t in pair], 1)
                for pair in zip(plain, more, strict=True)
            ]
        assert cache.columns == plain[0].shape[3]
        for layer, p in zip(cache.rows, plain, strict=True):
            assert torch.equal(torch.stack(layer.held()), p)
