"""Ragged rows: the compiled loops and their twins in numpy give the same bits."""

import numpy as np
import numpy_loops as in_numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbandit.core import kernels as ragged_kernels
from fedbandit.core.ragged import Ragged

ROWS = st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=8)


@given(ROWS, st.data())
def test_gathering_is_the_same_with_and_without_numba(rows, data):
    ragged = Ragged.from_rows(rows)
    values = np.linspace(0, 1, len(ragged.ids), dtype=np.float32)
    chosen = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10)), np.int64)
    found = []
    for loops in (ragged_kernels, in_numpy):
        offsets = ragged.take(chosen).offsets
        arrays = [np.full(offsets[-1], -1, source.dtype) for source in (ragged.ids, values)]
        for source, target in zip((ragged.ids, values), arrays, strict=True):
            loops.gather(ragged.offsets, source, chosen, offsets, target)
        found.append((offsets, *arrays))
    for compiled, plain in zip(*found, strict=True):
        assert compiled.dtype == plain.dtype
        np.testing.assert_array_equal(compiled, plain)
    assert found[1][1].tolist() == [i for row in chosen for i in rows[row]]


def test_taking_rows_keeps_their_values():
    texts = Ragged(
        np.array([0, 2, 2, 3]), np.array([4, 7, 1], np.int32), np.array([0.5, 0.25, 1], np.float32)
    )
    taken = texts.take(np.array([2, 1, 0]))
    assert taken.offsets.tolist() == [0, 1, 1, 3]
    assert taken.ids.tolist() == [1, 4, 7]
    assert taken.values == pytest.approx([1, 0.5, 0.25])
