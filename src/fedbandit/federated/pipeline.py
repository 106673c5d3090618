"""A client's update on its way to the server: compressed, clipped, summed,
screened.

Everything done to an update is a stage with a client's half and a server's half. Noise and secure
sums come after the sum and see one vector: what is sent under several names is scaled per name,
joined, and clipped to one joint norm.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import exp, inf
from typing import Any, Protocol

import numpy as np

from fedbandit.core import loops
from fedbandit.core.errors import ConfigError
from fedbandit.core.parts import require
from fedbandit.core.ragged import SparseVector
from fedbandit.core.randomness import Purpose, generator

Vectors = dict[str, np.ndarray]
"""Named arrays: what a server keeps, what clients receive and send."""

Memories = Mapping[str, np.ndarray | SparseVector]
"""The memory of one client, by name."""


@dataclass(frozen=True)
class Sent:
    """The array that every client sends under one name: shape, and scale in the joint clip norm.

    A bare number in `sends` is the scale of a vector as long as the weights; a `Sent` says more.
    An array with scale None is not clipped, so an algorithm that sends one cannot be private.

    Examples:
        >>> sends = {"weights": 1.0, "moments": Sent((50, 16, 16), dtype="float64")}
        >>> {name: zeros.shape for name, zeros in zeros_to_send(sends, np.zeros(800)).items()}
        {'weights': (800,), 'moments': (50, 16, 16)}
    """

    shape: tuple[int, ...] | None = None  # None: a vector as long as the weights that are trained
    scale: float | None = 1.0
    dtype: str | None = None  # None: that of the weights


Sends = Mapping[str, float | Sent | None]


def described(sends: Sends) -> dict[str, Sent]:
    """The declarations of an algorithm in full, by name."""
    return {name: one if isinstance(one, Sent) else Sent(scale=one) for name, one in sends.items()}


def zeros_to_send(sends: Sends, weights: np.ndarray) -> Vectors:
    """Zeros of the shapes and types that are sent, for training of these weights."""
    return {
        name: np.zeros(
            weights.shape if one.shape is None else one.shape, one.dtype or weights.dtype
        )
        for name, one in described(sends).items()
    }


class UpdateSum(Protocol):
    """A sum of clipped client updates that can be added to an array of the same shape."""

    def add_to(self, total: np.ndarray) -> None: ...


@dataclass(frozen=True)
class DenseSum:
    """A sum that touches every entry."""

    vector: np.ndarray

    def add_to(self, total: np.ndarray) -> None:
        if self.vector.shape != total.shape:  # numpy would repeat a shorter one
            raise ValueError(f"sends {self.vector.shape} where {total.shape} is declared")
        total += self.vector


@dataclass(frozen=True)
class RowSum:
    """A sum that touches only some rows of a [words, K] matrix, and the bias behind it."""

    rows: np.ndarray  # int32 [R], each once
    values: np.ndarray  # [R, K]
    bias: np.ndarray  # [K]

    def flat_entries(self) -> np.ndarray:
        """Where the values lie in the flat vector."""
        k = len(self.bias)
        return (self.rows[:, None].astype(np.int64) * k + np.arange(k)).reshape(-1)

    def add_to(self, total: np.ndarray) -> None:
        k = len(self.bias)
        loops.add_rows(self.rows, self.values, total[:-k].reshape(-1, k))
        total[-k:] += self.bias


@dataclass(frozen=True)
class EntrySum:
    """A sum that touches only some entries of a [words, K] matrix, and the bias behind it."""

    entries: np.ndarray  # int64 [E]: word · K + action; may come more than once
    values: np.ndarray  # [E]
    bias: np.ndarray  # [K]

    def flat_entries(self) -> np.ndarray:
        """Where the values lie in the flat vector."""
        return self.entries

    def add_to(self, total: np.ndarray) -> None:
        np.add.at(total, self.entries, self.values)
        total[-len(self.bias) :] += self.bias


@dataclass(frozen=True)
class JoinedSum:
    """Sums over consecutive parts of one vector, each part of the same length: the heads of an
    ensemble.
    """

    parts: tuple[UpdateSum, ...]

    def add_to(self, total: np.ndarray) -> None:
        for part, place in zip(self.parts, np.split(total, len(self.parts)), strict=True):
            part.add_to(place)


@dataclass(frozen=True)
class IndividualUpdates:
    """Updates that were not added up, one for each accepted client; None: it had no events."""

    updates: tuple[np.ndarray | None, ...]

    def add_to(self, total: np.ndarray) -> None:
        for update in self.updates:
            if update is not None:
                total += update


def clip_factor(norm: float, clip_norm: float) -> float:
    """The factor of a client's update so that its norm is at most the clip norm."""
    return min(1.0, clip_norm / norm) if norm > 0 else 1.0


class CompressionStage(Protocol):
    """A way to write an update in fewer bytes. The client encodes, the server decodes; both halves
    are pure.

    `rng` is addressed by (seed, round, client), so that the same update is always written the same
    way.
    """

    def encode(self, update: np.ndarray, rng: np.random.Generator) -> Vectors:
        """The client's half: the arrays that are sent in place of an update [P]."""
        ...

    def decode(self, payload: Vectors, size: int) -> np.ndarray:
        """The server's half: what it makes of them, [size]."""
        ...


@dataclass(frozen=True)
class Contribution:
    """The message of a chunk of clients: sums by name, and figures per client."""

    sums: Mapping[str, UpdateSum]
    norms: np.ndarray  # float64 [clients]: of all that is clipped together, before clipping
    memory: Mapping[int, Memories] = field(default_factory=dict)  # what each client will remember
    bytes: np.ndarray | None = None  # int64 [clients] sent; None where nothing is compressed
    whole: bool = False  # sums are int64: whole steps, each name scaled as in the joint norm


@dataclass(frozen=True)
class Pipeline:
    """The stages that an update goes through in one round: encoded and decoded, then clipped, then
    summed.

    Clipping comes last, because a stage may enlarge the norm that noise and accounting rest on.
    """

    clip_norm: float = inf
    stages: tuple[CompressionStage, ...] = ()
    seed: int = 0
    round: int = 0
    keep_individual_updates: bool = False  # the server's accumulator asks for each by itself
    step: float | None = None  # sums are of whole steps, of that many clip norms

    @property
    def only_clips(self) -> bool:
        """Whether a learner may clip and sum by itself, in its fused loop."""
        return not self.stages and not self.keep_individual_updates and self.step is None

    def collect(
        self,
        sent: Iterable[Mapping[str, np.ndarray | SparseVector] | None],
        clients: np.ndarray,
        sends: Sends,
        remember: Callable[[int, dict[str, Any]], Memories] | None = None,
    ) -> Contribution:
        """The sum of what clients send, one update at a time; None for a client without events.

        `sends` names the arrays and what they are; those without a scale are not clipped. A client
        whose norm is not finite is left out of the sum. `remember` is given a client's place in the
        chunk and what the server sees of its vectors, before clipping, and returns what the client
        will remember.
        """
        scales = {name: one.scale for name, one in described(sends).items()}
        totals: Vectors = {}
        kept: dict[str, list[np.ndarray | None]] = {name: [] for name in sends}
        memory: dict[int, Memories] = {}
        norms, sizes = np.zeros(len(clients)), np.zeros(len(clients), np.int64)
        for i, (client, vectors) in enumerate(zip(clients, sent, strict=True)):
            if vectors is None:
                for updates in kept.values():
                    updates.append(None)
                continue
            seen = {
                name: self._through_stages(vectors[name], int(client), k)
                for k, name in enumerate(scales)
            }
            sizes[i] = sum(size for _, size in seen.values())
            with np.errstate(over="ignore"):
                norms[i] = joint_norm({name: vector for name, (vector, _) in seen.items()}, scales)
            if not np.isfinite(norms[i]):
                continue
            if remember is not None:
                memory[int(client)] = remember(
                    i, {name: vector for name, (vector, _) in seen.items()}
                )
            for name, (vector, _) in seen.items():
                factor = 1.0 if scales[name] is None else clip_factor(norms[i], self.clip_norm)
                if self.step is not None:
                    if name not in totals:
                        totals[name] = np.zeros(vector.shape, np.int64)
                    # scaled as in the joint norm, in which the noise is measured
                    scale = factor * (scales[name] or 1.0)
                    add_steps(totals[name], vector, scale, self.step * self.clip_norm)
                    continue
                clipped: Any = vector.dtype.type(factor) * vector
                if self.keep_individual_updates:
                    kept[name].append(clipped)
                    continue
                if name not in totals:
                    totals[name] = np.zeros(vector.shape, vector.dtype)
                if isinstance(clipped, SparseVector):
                    clipped.add_to(totals[name])
                else:
                    totals[name] += clipped
        sums: dict[str, UpdateSum] = {
            name: DenseSum(totals[name]) if name in totals else IndividualUpdates(())
            for name in sends
        }
        if self.keep_individual_updates:
            sums = {name: IndividualUpdates(tuple(updates)) for name, updates in kept.items()}
        sent_bytes = sizes if self.stages else None
        return Contribution(sums, norms, memory, sent_bytes, self.step is not None)

    def _through_stages(self, sent: Any, client: int, name: int) -> tuple[Any, int]:
        """The vector as the server sees it, and in how many bytes it came.

        A sparse vector stays sparse unless a stage or a rule has to see all of it.
        """
        vector, size = sent if self.only_clips else np.asarray(sent), sent.nbytes
        for number, stage in enumerate(self.stages):
            rng = generator(self.seed, Purpose.COMPRESSION, self.round, client, name, number)
            payload = stage.encode(vector.reshape(-1), rng)
            if not (
                isinstance(payload, dict)
                and all(isinstance(part, np.ndarray) for part in payload.values())
            ):
                raise ConfigError(
                    f"compression.name: {type(stage).__name__}.encode must return arrays by name"
                )
            size = sum(array.nbytes for array in payload.values())
            decoded = np.asarray(stage.decode(payload, vector.size), vector.dtype)
            if decoded.shape != (vector.size,):
                made = f"{type(stage).__name__}.decode made {decoded.shape} of ({vector.size},)"
                raise ConfigError(f"compression.name: {made}")
            vector = decoded.reshape(vector.shape)
        return vector, size


def joint_norm(
    vectors: Mapping[str, np.ndarray | SparseVector], scales: Mapping[str, float | None]
) -> float:
    """The norm of the vectors joined, each scaled by its own scale; those without one do not count.

    Summed by numpy itself: the sums of BLAS depend on how many threads it has.
    """
    squares = (
        scale**2 * float(np.square(_values(vectors[name]), dtype=np.float64).sum())
        for name, scale in scales.items()
        if scale is not None
    )
    return float(np.sqrt(sum(squares)))


def _values(vector: np.ndarray | SparseVector) -> np.ndarray:
    return vector.values if isinstance(vector, SparseVector) else vector


@dataclass(frozen=True)
class FixedClipping:
    """One norm for all rounds; infinity for no clipping."""

    norm: float = inf

    def __post_init__(self) -> None:
        if not self.norm > 0:
            raise ValueError(f"norm must be positive, not {self.norm}")

    @property
    def initial(self) -> float:
        return self.norm

    def following(self, clip_norm: float, unclipped: float) -> float:
        return clip_norm


@dataclass(frozen=True)
class AdaptiveClipping:
    """Moves the norm towards the given quantile of the update norms (Andrew et al.), here without
    noise.
    """

    quantile: float = 0.8
    initial: float = 1.0
    rate: float = 0.2

    def __post_init__(self) -> None:
        require(self, initial="positive", rate="positive", quantile="between 0 and 1")

    def following(self, clip_norm: float, unclipped: float) -> float:
        """The next round's norm, given this one's and the share of clients that was not clipped."""
        return clip_norm * exp(-self.rate * (unclipped - self.quantile))


Clipping = FixedClipping | AdaptiveClipping
"""Where the clip norm starts (`initial`) and how it moves after a round (`following`)."""


def rejection_reason(update: object, like: np.ndarray) -> str | None:
    """The reason to refuse an update to weights like `like`, or None if it is sound."""
    found = norm_or_reason(update, like)
    return found if isinstance(found, str) else None


def norm_or_reason(update: object, like: np.ndarray) -> float | str:
    """The norm of a sound update to weights like `like`, or the reason to refuse it."""
    if not isinstance(update, np.ndarray):
        return f"not an array but {type(update).__name__}"
    if update.dtype != like.dtype:
        return f"dtype {update.dtype}, expected {like.dtype}"
    if update.shape != like.shape:
        return f"shape {update.shape}, expected {like.shape}"
    wrong = np.count_nonzero(~np.isfinite(update))
    if wrong:
        return f"{wrong} of {update.size} values are not finite"
    with np.errstate(over="ignore"):
        norm = float(np.linalg.norm(update.astype(np.float64, copy=False)))
    return norm if np.isfinite(norm) else "its norm is not finite"


_SLACK = 1 - 2.0**-24  # of the clip norm, for errors of floating point in norms and products


def in_steps(update: np.ndarray, factor: float, step: float) -> np.ndarray:
    """An update times its clip factor in whole steps, cut towards 0: int64.

    No entry grows, so what is summed is no longer than the clip norm: sums of whole numbers are
    exact in any order, and one client moves them by that much and no more.

    Examples:
        >>> in_steps(np.array([0.6, -0.8], np.float32), 0.5, 0.125)
        array([ 2, -3])
    """
    steps: np.ndarray = np.trunc(update.astype(np.float64) * (factor * _SLACK / step))
    return steps.astype(np.int64)


def add_steps(total: np.ndarray, update: np.ndarray, factor: float, step: float) -> None:
    """Add an update `in_steps` to an int64 sum of its shape; of text it touches few weights."""
    flat, added = total.reshape(-1), update.reshape(-1)
    at = np.flatnonzero(added != 0)
    flat[at] += in_steps(added[at], factor, step)
