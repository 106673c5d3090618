"""Loops in two forms that give the same bits: in numpy, here, and compiled by numba, in `kernels`.

A run of one round on text takes 1.0 s of CPU time in numpy, 2.0 s with the compiled forms loaded
from numba's cache, and 12.8 s where they are compiled first. So devices and short runs do without:
the compiled forms take over once the numpy forms have taken `COMPILE_AFTER_SECONDS`. A loop has a
compiled form only where that saves a round more than 1%, and a numpy form for all the others.
"""

import os
import time
from collections.abc import Callable
from functools import cached_property, update_wrapper
from importlib import import_module
from importlib.util import find_spec
from typing import Generic, ParamSpec, TypeVar, cast

import numpy as np

from fedbandit.core.errors import ConfigError
from fedbandit.core.randomness import Purpose, bits

COMPILE_AFTER_SECONDS = "FEDBANDIT_COMPILE_AFTER_SECONDS"
"""The environment's name for the seconds; 0: compile at the first call, inf: never."""

P = ParamSpec("P")
T = TypeVar("T")


class Kernels:
    """The compiled forms of loops: functions of the same names in one module.

    A decorator for the numpy forms, which share the seconds that they may take before the compiled
    ones are used. Where numba is not installed, the numpy forms are used for good.

    Examples:
        >>> import math
        >>> never = Kernels("fedbandit.core.kernels", after=math.inf)
        >>> @never
        ... def twice(x: int) -> int:
        ...     return 2 * x
        >>> twice(4), never.in_use
        (8, False)
    """

    def __init__(self, module: str, after: float = 0.5) -> None:
        self.module, self.spent, self._default = module, 0.0, after

    @cached_property
    def _after(self) -> float:
        """The seconds that the numpy forms may take, as the environment says or by default."""
        asked = os.environ.get(COMPILE_AFTER_SECONDS, self._default)
        try:
            return float(asked)
        except ValueError:
            raise ConfigError(
                f"{COMPILE_AFTER_SECONDS}: should be a number of seconds, not {asked!r}"
            ) from None

    @property
    def in_use(self) -> bool:
        """Whether the numpy forms have had their time."""
        return self.spent >= self._after and find_spec("numba") is not None

    def __call__(self, loop: Callable[P, T]) -> "Loop[P, T]":
        """The loop in both forms, to be called as before."""
        return Loop(loop, self)


class Loop(Generic[P, T]):
    """A function in two forms; `numpy` is the one that never compiles, for devices.

    A numpy form may answer `NotImplemented` where only the compiled one knows how.
    """

    def __init__(self, loop: Callable[P, T], kernels: Kernels) -> None:
        self.numpy, self._kernels = loop, kernels
        self._taken_over = False
        update_wrapper(self, loop)

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> T:
        if self._taken_over or self._kernels.in_use:
            self._taken_over = True
            return self.compiled(*arguments, **named)
        begin = time.perf_counter()
        with np.errstate(all="ignore"):  # compiled loops do not warn either
            result = self.numpy(*arguments, **named)
        self._kernels.spent += time.perf_counter() - begin
        return self.compiled(*arguments, **named) if result is NotImplemented else result

    @cached_property
    def compiled(self) -> Callable[P, T]:
        """The compiled form; numba is loaded when it is first asked for."""
        found = getattr(import_module(self._kernels.module), self.numpy.__name__)
        return cast(Callable[P, T], found)


core_kernels = Kernels("fedbandit.core.kernels")


@core_kernels
def random_examples(
    seed: int, times: np.ndarray, clients: np.ndarray, offsets: np.ndarray, limit: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each (client, time) a random subset of its examples in random order: (which pair,
    position, row) per example.

    Client c's examples are rows offsets[c]:offsets[c + 1]. An order is that of the random bits of
    the examples' places.
    """
    sizes = offsets[clients + 1] - offsets[clients]
    owner = np.repeat(np.arange(len(clients)), sizes)
    places = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    keys = bits(seed, Purpose.EXAMPLES, times[owner], clients[owner], places)
    rows = offsets[clients[owner]] + places[np.lexsort((keys, owner))]
    kept = slice(None) if limit is None else places < limit
    return owner[kept], places[kept], rows[kept]


@core_kernels
def draw_actions(probabilities: np.ndarray, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Actions [n] and their probabilities [n] for probabilities [n, K] and uniforms [n] in [0, 1).

    An action of probability 0 is never drawn, whatever rounding does.
    """
    cumulative = np.cumsum(probabilities, axis=1)
    threshold = uniforms.astype(cumulative.dtype) * cumulative[:, -1]
    actions = (cumulative <= threshold[:, None]).sum(axis=1)
    overshot = np.flatnonzero(
        actions == probabilities.shape[1]
    )  # the threshold was rounded up to the total
    for row in overshot:
        actions[row] = np.flatnonzero(probabilities[row])[-1]
    return actions, np.take_along_axis(probabilities, actions[:, None], axis=1)[:, 0]


@core_kernels
def labels_among_best(scores: np.ndarray, offsets: np.ndarray, labels: np.ndarray, top: int) -> int:
    """The number of labels among the best-scored `top` actions of their example; the lower index
    among equals.
    """
    row, own = (
        np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)),
        labels[offsets[0] : offsets[-1]],
    )
    mine = scores[row, own][:, None]
    lower = np.arange(scores.shape[1]) < own[:, None]
    before = np.where(lower, scores[row] >= mine, scores[row] > mine).sum(axis=1)
    return int(
        ((before < top) & (mine[:, 0] == mine[:, 0])).sum()
    )  # what is not a number is never among the best


@core_kernels
def adam_moments(
    m0: np.ndarray,
    v0: np.ndarray,
    w0: np.ndarray,
    update: np.ndarray,
    constants: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    w: np.ndarray,
) -> None:
    """One step of Adam with rate, beta 1, beta 2 and epsilon: both moments and the weights."""
    rate, beta_1, beta_2, epsilon = constants
    one = constants.dtype.type(1)
    m[:] = beta_1 * m0 + (one - beta_1) * update
    v[:] = beta_2 * v0 + (one - beta_2) * update * update
    w[:] = w0 + rate * m / (np.sqrt(v) + epsilon)


@core_kernels
def gather(
    offsets: np.ndarray,
    source: np.ndarray,
    rows: np.ndarray,
    target_offsets: np.ndarray,
    target: np.ndarray,
) -> None:
    """Copy the entries of the given rows, one row after the other."""
    moved = np.repeat(offsets[rows] - target_offsets[:-1], np.diff(target_offsets))
    target[:] = source[moved + np.arange(len(target))]


@core_kernels
def add_rows(rows: np.ndarray, values: np.ndarray, total: np.ndarray) -> None:
    """Add each row of values [n, K] to its row of the total [m, K]."""
    np.add.at(total, rows, values)


@core_kernels
def merge(
    entries: np.ndarray,
    values: np.ndarray,
    others: np.ndarray,
    other_values: np.ndarray,
    times: float,
    found: np.ndarray,
    sums: np.ndarray,
) -> int:
    """The entries of two sparse vectors with their sum, the second one `times` (1 or -1); how many.

    With 0 the second one counts only where the first has no entry.
    """
    both = np.union1d(entries, others)
    own, at = np.searchsorted(both, entries), np.searchsorted(both, others)
    found[: len(both)], total = both, sums[: len(both)]
    total[:] = 0
    if times:
        total[own] += values
        total[at] += other_values if times > 0 else -other_values
    else:
        total[at] = other_values
        total[own] = values
    return len(both)
