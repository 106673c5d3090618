"""From rows of the event log to arrays that a learner trains on: the door where each row is
checked.

Learners behind it trust what they are given. Runs on the device: contexts go nowhere else.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from fedbandit.core.contexts import Candidates, Contexts, Features, ItemSpec
from fedbandit.core.errors import DataError
from fedbandit.core.ragged import Ragged
from fedbandit.deploy.device.log import LogRow
from fedbandit.deploy.device.model_files import DeviceModel, ItemCatalogue, check_features
from fedbandit.deploy.device.model_in_use import Shown, dense, sparse, stacked

if TYPE_CHECKING:
    from fedbandit.events import Events

_logger = logging.getLogger("fedbandit.deploy")
_LARGEST = float(np.finfo(np.float32).max)
MOST_BYTES = 65_536  # of features that one event brings along
Catalogues = Mapping[str, ItemCatalogue]
_NAMED = 3  # damaged rows that a warning describes; the rest are counted


@dataclass(frozen=True)
class Logged:
    """A snapshot of what a device can train on: one client's events, oldest first."""

    events: "Events"
    sequence: np.ndarray  # int64 [n]: ascending, never used twice in a log
    # int64 [n]: the order in which events became readable; the highest one marks this snapshot.
    settled: np.ndarray
    # bool [n, K]: the actions that could be chosen; None: always all of them.
    available: np.ndarray | None
    left_out: int  # events whose contexts or actions mean something else than this model's
    damaged: int = 0  # events whose rows no agent can have written

    def __len__(self) -> int:
        return len(self.events)


def record(
    model: DeviceModel,
    context: Contexts,
    action: int,
    propensity: float,
    available: np.ndarray | None,
    shown: Shown | None = None,
) -> LogRow:
    """A decision as bytes, in the byte order of every machine that this runs on.

    Of candidates only those outside the catalogue bring their features, and no more than
    `MOST_BYTES` of them.
    """
    catalogue, own = None if model.catalogue is None else model.catalogue.digest, None
    if shown is not None and shown.own is not None:
        own = _packed(shown.own)
        if len(own) > MOST_BYTES:
            said = f"{len(own):,} bytes of features, of which a log takes {MOST_BYTES:,}"
            raise DataError(f"candidates outside the catalogue have {said}")
    shared = context.shared
    values = np.asarray(shared.values if isinstance(shared, Ragged) else shared[0])
    return LogRow(
        version=model.version,
        space=model.space,
        action=action,
        propensity=propensity,
        available=None if available is None else np.packbits(available).tobytes(),
        ids=shared.ids.astype("<i4").tobytes() if isinstance(shared, Ragged) else None,
        values=values.astype("<f4").tobytes(),
        catalogue=catalogue if shown is not None else None,
        items=None if shown is None else shown.numbers.astype("<i8").tobytes(),
        own=own,
    )


def _packed(features: Features) -> bytes:
    """Features of some rows; sparse ones with the bounds of the rows before them."""
    if not isinstance(features, Ragged):
        return features.astype("<f4").tobytes()
    arrays = ((features.offsets, "<i8"), (features.ids, "<i4"), (features.values, "<f4"))
    return b"".join(np.asarray(array).astype(kind).tobytes() for array, kind in arrays)


def _unpacked(payload: bytes, rows: int, items: ItemSpec) -> Features:
    """The inverse of `_packed`; `ValueError` where the bytes are not those of this many rows."""
    if items.kind == "dense":
        return np.frombuffer(payload, "<f4").astype(np.float32).reshape(rows, *items.shape)
    head = 8 * (rows + 1)
    offsets = np.frombuffer(payload[:head], "<i8").astype(np.int64)
    middle = head + 4 * int(offsets[-1])
    ids = np.frombuffer(payload[head:middle], "<i4").astype(np.int32)
    return Ragged(offsets, ids, np.frombuffer(payload[middle:], "<f4").astype(np.float32))


def _candidates(row: LogRow, items: ItemSpec, catalogues: Catalogues) -> Candidates:
    """The candidates of a row with their features; `ValueError` where no agent wrote such."""
    numbers = np.frombuffer(row.items or b"", "<i8").astype(np.int64)
    catalogue = catalogues.get(row.catalogue or "")
    outside = numbers[numbers < 0]
    if not len(numbers) or (-outside != np.arange(1, len(outside) + 1)).any():
        raise ValueError("no list of items")
    if len(outside) < len(numbers) and (catalogue is None or numbers.max() >= len(catalogue)):
        raise ValueError("items of another catalogue")
    own = _unpacked(row.own or b"", len(outside), items) if len(outside) else None
    if own is not None:
        check_features(own, items.kind, items.shape)
        if len(own) != len(outside):
            raise ValueError("features of other rows")
    features = Shown(("",) * len(numbers), numbers, own).features(catalogue)
    return Candidates(np.array([0, len(numbers)]), numbers, features)


def logged_events(
    rows: Sequence[LogRow],
    model: DeviceModel,
    counted: int = 0,
    last: int = 2**63 - 1,
    catalogues: Catalogues | None = None,
) -> Logged:
    """The rows that fit the model as arrays; those settled after `counted` are fresh.

    `last` is the highest sequence number that the log has given out; `catalogues` are those on the
    device by their digest. Damaged rows are left out, counted, and named in one warning.
    """
    from fedbandit.events import Events

    known = dict(catalogues or {})
    if model.catalogue is not None:
        known[model.catalogue.digest] = model.catalogue
    fitting = [row for row in rows if row.space == model.space]
    if model.items is not None:  # items of a catalogue that is gone mean nothing any more
        fitting = [
            r for r in fitting if r.catalogue in (None, *known) or not isinstance(r.items, bytes)
        ]
    sound, decisions, damaged = list[LogRow](), list[Contexts](), list[str]()
    for row in fitting:
        try:
            decisions.append(_decision(row, model, last, known))
            sound.append(row)
        except ValueError as error:
            damaged.append(f"event {row.sequence}: {error}")
    if damaged:
        more = f"; and {len(damaged) - _NAMED} more" if len(damaged) > _NAMED else ""
        said = f"{'; '.join(damaged[:_NAMED])}{more}"
        _logger.warning("event log: %d of %d damaged: %s", len(damaged), len(fitting), said)
    settled = np.array([row.settled for row in sound], np.int64)
    events = Events(
        bounds=np.array([0, len(sound)], np.int64),
        contexts=_together(decisions, model),
        actions=np.array([row.action for row in sound], np.int64),
        rewards=np.array([row.reward for row in sound], np.float32),
        propensities=np.array([row.propensity for row in sound], np.float64),
        versions=np.array([row.version for row in sound], np.int64),
        fresh=settled > counted,
    )
    return Logged(
        events=events,
        sequence=np.array([row.sequence for row in sound], np.int64),
        settled=settled,
        available=_available(sound, model.num_actions),
        left_out=len(rows) - len(fitting),
        damaged=len(damaged),
    )


def _together(decisions: Sequence[Contexts], model: DeviceModel) -> Contexts:
    """Contexts of one decision each, one after the other; of none at all, empty ones."""
    shared = stacked(
        [_no_rows(model.kind, model.shape), *(decision.shared for decision in decisions)]
    )
    if model.items is None:
        return Contexts(shared)
    shown = [decision.candidates for decision in decisions if decision.candidates is not None]
    features = [_no_rows(model.items.kind, model.items.shape), *(one.features for one in shown)]
    items = np.concatenate([np.zeros(0, np.int64), *(one.items for one in shown)])
    bounds = np.cumsum([0, *(len(one.items) for one in shown)])
    return Contexts(shared, Candidates(bounds, items, stacked(features)))


def _no_rows(kind: str, shape: tuple[int, ...]) -> Features:
    if kind == "dense":
        return np.zeros((0, *shape), np.float32)
    return Ragged(np.zeros(1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32))


def _decision(row: LogRow, model: DeviceModel, last: int, catalogues: Catalogues) -> Contexts:
    """One row's context and candidates; `ValueError` says why no agent can have written the row.

    SQLite keeps any type anywhere.
    """
    candidates, k = None, model.num_actions
    if model.items is not None:
        try:
            candidates = _candidates(row, model.items, catalogues)
        except (ValueError, TypeError, IndexError, DataError) as error:
            raise ValueError(f"candidates are not readable: {str(error)[:50]}") from None
        k = len(candidates.items)
    bits, action = row.available, row.action
    for fine, otherwise in (
        (type(row.version) is int and row.version >= 0, "version is not a count"),
        (
            type(row.settled) is int and 0 < row.settled <= last,
            "settled is not a place in the order of events",
        ),
        (type(action) is int and 0 <= action < k, f"action is not one of {k}"),
        (
            _is_number(row.propensity) and 0 < row.propensity <= 1,
            "propensity is not above 0 and at most 1",
        ),
        (
            _is_number(row.reward) and abs(row.reward) <= _LARGEST,
            "reward is not a finite float32",
        ),
        (
            bits is None or (isinstance(bits, bytes) and len(bits) == (k + 7) // 8),
            f"available is not a bit for each of {k} actions",
        ),
    ):
        if not fine:
            raise ValueError(otherwise)
    if bits is not None and not bits[action // 8] >> (7 - action % 8) & 1:
        raise ValueError("available does not include the action")
    shared = _shared(row, model)
    if not row.intact:
        raise ValueError("its checksum does not match")
    return Contexts(shared, candidates)


def _shared(row: LogRow, model: DeviceModel) -> Features:
    """The features of a row's context; `ValueError` where they are not of the model's shape."""
    values = _numbers(row.values, "<f4", "values")
    if model.kind == "sparse":
        return sparse(_numbers(row.ids, "<i4", "word ids"), values, model.shape[0])
    if row.ids is not None:
        raise ValueError("word ids where the model has dense features")
    return dense(values, model.shape)


def _numbers(payload: Any, kind: str, what: str) -> np.ndarray:
    """The numbers in a column's bytes; `ValueError` where it holds anything else."""
    if not isinstance(payload, bytes) or len(payload) % 4:
        raise ValueError(f"{what} are not numbers of 4 bytes each")
    return np.frombuffer(payload, kind)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and isfinite(value)


def _available(rows: list[LogRow], num_actions: int) -> np.ndarray | None:
    if all(row.available is None for row in rows):
        return None
    available = np.ones((len(rows), num_actions), bool)
    for i, row in enumerate(rows):
        if row.available is not None:
            bits = np.unpackbits(np.frombuffer(row.available, np.uint8), count=num_actions)
            available[i] = bits.astype(bool)
    return available
