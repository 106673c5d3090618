"""From rows of the event log to arrays that a learner trains on: the door where each row is
checked.

Learners behind it trust what they are given. Runs on the device: contexts go nowhere else.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from fedbandit.core.contexts import Candidates, Contexts, Features, ItemSpec
from fedbandit.core.errors import DataError
from fedbandit.core.ragged import Ragged
from fedbandit.deploy.device.log import LogRow, Record
from fedbandit.deploy.device.model_files import DeviceModel, ItemCatalogue, check_features
from fedbandit.deploy.device.model_in_use import Shown, stacked

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
    settled: (
        np.ndarray
    )  # int64 [n]: the order in which events became readable; the highest one marks this snapshot
    available: (
        np.ndarray | None
    )  # bool [n, K]: the actions that could be chosen; None: always all of them
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
) -> Record:
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
    return Record(
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
    device by their digest.
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
    sound, damaged = _sound(fitting, model, last, known)
    settled = np.array([row.settled for row in sound], np.int64)
    values = _joined([row.values for row in sound], "<f4").astype(np.float32)
    shared: Features
    if model.kind == "sparse":
        lengths = [len(row.values) // 4 for row in sound]
        ids = _joined([row.ids or b"" for row in sound], "<i4").astype(np.int32)
        shared = Ragged(np.cumsum([0, *lengths]).astype(np.int64), ids, values)
    else:
        shared = values.reshape(len(sound), *model.shape)
    events = Events(
        bounds=np.array([0, len(sound)], np.int64),
        contexts=Contexts(shared, _all_candidates(sound, model.items, known)),
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
        damaged=damaged,
    )


def _all_candidates(
    rows: Sequence[LogRow], items: ItemSpec | None, catalogues: Catalogues
) -> Candidates | None:
    """The candidates of all rows, one after the other; None for fixed actions."""
    if items is None:
        return None
    each = [_candidates(row, items, catalogues) for row in rows]
    bounds = np.cumsum([0, *(len(one.items) for one in each)])
    if not each:
        empty = np.zeros((0, *items.shape), np.float32)
        blank = Ragged(np.zeros(1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32))
        return Candidates(bounds, bounds[1:], empty if items.kind == "dense" else blank)
    features = stacked([one.features for one in each])
    return Candidates(bounds, np.concatenate([one.items for one in each]), features)


def why_damaged(
    row: LogRow, model: DeviceModel, last: int, catalogues: Catalogues | None = None
) -> str | None:
    """Why no agent with this model can have written the row, or None if one can; SQLite keeps any
    type anywhere.
    """
    k = model.num_actions
    if model.items is not None:
        try:
            k = len(_candidates(row, model.items, catalogues or {}).items)
        except (ValueError, TypeError, IndexError, DataError) as error:
            return f"candidates are not readable: {str(error)[:50]}"
    if not (type(row.version) is int and row.version >= 0):
        return "version is not a count"
    if not (type(row.settled) is int and 0 < row.settled <= last):
        return "settled is not a place in the order of events"
    if not (type(row.action) is int and 0 <= row.action < k):
        return f"action is not one of {k}"
    if not (_is_number(row.propensity) and 0 < row.propensity <= 1):
        return "propensity is not above 0 and at most 1"
    if not (_is_number(row.reward) and abs(row.reward) <= _LARGEST):
        return "reward is not a finite float32"
    if row.available is not None:
        if not (isinstance(row.available, bytes) and len(row.available) == (k + 7) // 8):
            return f"available is not a bit for each of {k} actions"
        if not row.available[row.action // 8] >> (7 - row.action % 8) & 1:
            return "available does not include the action"
    return _why_not_a_context(row, model) or (None if row.intact else "its checksum does not match")


def _why_not_a_context(row: LogRow, model: DeviceModel) -> str | None:
    if not isinstance(row.values, bytes) or len(row.values) % 4:
        return "values are not float32"
    if not np.isfinite(np.frombuffer(row.values, "<f4")).all():
        return "values are not finite"
    if model.kind == "dense":
        if row.ids is not None:
            return "word ids where the model has dense features"
        size = prod(model.shape)
        return (
            None
            if len(row.values) == 4 * size
            else f"values are {len(row.values) // 4}, the model has {size}"
        )
    if not isinstance(row.ids, bytes) or len(row.ids) % 4:
        return "word ids are not int32"
    ids = np.frombuffer(row.ids, "<i4")
    if len(ids) and (ids[0] < 0 or ids[-1] >= model.shape[0] or (ids[1:] <= ids[:-1]).any()):
        return f"word ids do not ascend from 0 to {model.shape[0] - 1}"
    if len(row.ids) == len(row.values):
        return None
    shorter = "word ids" if len(row.ids) < len(row.values) else "values"
    return f"{shorter} are missing: {len(ids)} word ids, {len(row.values) // 4} values"


def _sound(
    rows: list[LogRow], model: DeviceModel, last: int, catalogues: Catalogues
) -> tuple[list[LogRow], int]:
    """The rows that can be trained on, and how many are damaged; these are named in one warning."""
    sound, named = [], []
    for row in rows:
        reason = why_damaged(row, model, last, catalogues)
        if reason is None:
            sound.append(row)
        else:
            named.append(f"event {row.sequence}: {reason}")
    if named:
        more = f"; and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        _logger.warning(
            "event log: %d of %d damaged: %s%s",
            len(named),
            len(rows),
            "; ".join(named[:_NAMED]),
            more,
        )
    return sound, len(named)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and isfinite(value)


def _joined(parts: list[bytes], dtype: str) -> np.ndarray:
    return np.frombuffer(b"".join(parts), dtype)


def _available(rows: list[LogRow], num_actions: int) -> np.ndarray | None:
    if all(row.available is None for row in rows):
        return None
    available = np.ones((len(rows), num_actions), bool)
    for i, row in enumerate(rows):
        if row.available is not None:
            bits = np.unpackbits(np.frombuffer(row.available, np.uint8), count=num_actions)
            available[i] = bits.astype(bool)
    return available
