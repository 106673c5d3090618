"""The compiled loops that add sparse sums to a flat vector, in the order in which they stand."""

import numba


@numba.njit(nogil=True, cache=True)
def add_rows(rows, values, total):  # type: ignore[no-untyped-def]
    """Add each row of values to its row of the total."""
    for i in range(len(rows)):
        of, to = values[i], total[rows[i]]
        for a in range(len(of)):
            to[a] += of[a]


@numba.njit(nogil=True, cache=True)
def add_entries(entries, values, total):  # type: ignore[no-untyped-def]
    """Add each value to its entry of the total."""
    for i in range(len(entries)):
        total[entries[i]] += values[i]
