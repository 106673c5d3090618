"""Compiled forms of the built-in rules: exploring and drawing in one pass, with the bits of the
plain forms.

A rule offers its form here as `sample_fused`. None of them knows unavailable actions: those take
the plain way.
"""

from collections.abc import Callable
from functools import lru_cache

import numba
import numpy as np

from fedbandit.core.kernels import all_finite, draw_row, draw_rows
from fedbandit.core.prediction import Drawn, Prediction

_MOST_ACTIONS = 128  # beyond it numpy adds up a row in another order
_BLOCK = 32  # rows that stay in the first-level cache

Probabilities = Callable[[Prediction], np.ndarray]


def sample_softmax(beta: float, prediction: Prediction, uniforms: np.ndarray) -> Drawn:
    """Draw in proportion to exp(score / beta)."""
    scores = prediction.mean
    if not _fits(scores):
        return None
    weights = np.empty_like(scores)
    _check(_exponents(scores, _at_least_smallest(beta, scores), weights))
    np.exp(weights, out=weights)
    return _drawn(weights, uniforms)


def sample_falcon(mu: float, gamma: float, prediction: Prediction, uniforms: np.ndarray) -> Drawn:
    """Draw by inverse gaps."""
    scores = prediction.mean
    if not _fits(scores):
        return None
    weights = np.empty_like(scores)
    _check(_inverse_gaps(scores, _at_least_smallest(mu, scores), scores.dtype.type(gamma), weights))
    return _drawn(weights, uniforms)


def sample_by_best(
    probabilities: Probabilities, prediction: Prediction, uniforms: np.ndarray
) -> Drawn:
    """Draw for a rule whose probabilities follow from the place of the best action alone."""
    scores = prediction.mean
    if not _fits(scores):
        return None
    _check(all_finite(scores.reshape(-1)))
    tables = _by_best(probabilities, scores.shape[1], scores.dtype)
    actions, propensities = np.empty(len(scores), np.int64), np.empty(len(scores), scores.dtype)
    _draw_by_best(np.argmax(scores, axis=1), *tables, uniforms, actions, propensities)
    return actions, propensities


def _fits(scores: np.ndarray) -> bool:
    """Whether the kernels add up these rows in numpy's order."""
    contiguous: bool = scores.flags.c_contiguous
    return 0 < scores.shape[1] <= _MOST_ACTIONS and scores.dtype.kind == "f" and contiguous


def _drawn(weights: np.ndarray, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    actions, propensities = np.empty(len(weights), np.int64), np.empty(len(weights), weights.dtype)
    _draw_weighted(weights, uniforms, actions, propensities)
    return actions, propensities


def _check(finite: bool) -> None:
    if not finite:
        raise ValueError("scores must be finite")


def _at_least_smallest(value: float, like: np.ndarray) -> np.generic:
    """A parameter as the rules divide by it."""
    typed: np.generic = like.dtype.type(max(value, float(np.sqrt(np.finfo(like.dtype).tiny))))
    return typed


@lru_cache(maxsize=16)
def _by_best(
    probabilities: Probabilities, k: int, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """For each best action the probabilities [k, k] of such a rule, and their running sums."""
    found = probabilities(Prediction(np.eye(k, dtype=dtype)))
    return found, np.cumsum(found, axis=1)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _exponents(scores, beta, out):  # type: ignore[no-untyped-def]
    """(score - best) / beta; False if a score is not finite."""
    finite = True
    for i in range(len(scores)):
        row, to = scores[i], out[i]
        finite &= all_finite(row)
        best = _highest(row)
        for a in range(len(row)):
            to[a] = (row[a] - best) / beta
    return finite


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _inverse_gaps(scores, mu, gamma, out):  # type: ignore[no-untyped-def]
    """FALCON's weights, which sum to 1 or to more; False if a score is not finite."""
    largest, finite = np.finfo(scores.dtype).max, True
    zero, one = scores.dtype.type(0), scores.dtype.type(1)
    for i in range(len(scores)):
        row, to = scores[i], out[i]
        finite &= all_finite(row)
        highest = _highest(row)
        for a in range(len(row)):
            to[a] = one / (mu + gamma * min(highest - row[a], largest))
        best = _first(row, highest)
        to[best] = zero
        to[best] = max(one - _sum(to), zero)
    return finite


@numba.njit(
    nogil=True, cache=True, fastmath={"nnan", "nsz"}
)  # what lets it compare in vectors; no number is rounded
def _highest(row):  # type: ignore[no-untyped-def]
    """The largest of finite numbers."""
    highest = row[0]
    for a in range(1, len(row)):
        if row[a] > highest:
            highest = row[a]
    return highest


@numba.njit(nogil=True, cache=True)
def _first(row, value):  # type: ignore[no-untyped-def]
    """The first place of a number that is in the row."""
    last = len(row) - 1
    place = last
    for a in range(last):
        place = min(place, a if row[a] == value else last)
    return place


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _draw_weighted(weights, uniforms, actions, propensities):  # type: ignore[no-untyped-def]
    """Draw in proportion to the weights, which become probabilities."""
    for first in range(0, len(weights), _BLOCK):
        block = slice(first, first + _BLOCK)
        rows = weights[block]
        for i in range(len(rows)):
            row = rows[i]
            whole = _sum(row)
            for a in range(len(row)):
                row[a] = row[a] / whole
        draw_rows(rows, uniforms[block], actions[block], propensities[block])


@numba.njit(nogil=True, cache=True)
def _draw_by_best(best, probabilities, cumulative, uniforms, actions, propensities):  # type: ignore[no-untyped-def]
    for i in range(len(best)):
        row = probabilities[best[i]]
        actions[i] = chosen = draw_row(row, cumulative[best[i]], uniforms[i])
        propensities[i] = row[chosen]


@numba.njit(nogil=True, cache=True)
def _sum(row):  # type: ignore[no-untyped-def]
    """The sum of a row of at most 128 numbers, added up in numpy's order."""
    whole = len(row) - len(row) % 8
    total = row.dtype.type(0)
    if whole:
        r0, r1, r2, r3, r4, r5, r6, r7 = (
            row[0],
            row[1],
            row[2],
            row[3],
            row[4],
            row[5],
            row[6],
            row[7],
        )
        for a in range(8, whole, 8):
            r0, r1, r2, r3 = r0 + row[a], r1 + row[a + 1], r2 + row[a + 2], r3 + row[a + 3]
            r4, r5, r6, r7 = r4 + row[a + 4], r5 + row[a + 5], r6 + row[a + 6], r7 + row[a + 7]
        total = ((r0 + r1) + (r2 + r3)) + ((r4 + r5) + (r6 + r7))
    for a in range(whole, len(row)):
        total += row[a]
    return total
