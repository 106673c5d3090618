"""From rows of the event log to arrays that a learner trains on: the door where each row is checked.

Learners behind it trust what they are given. Runs on the device: contexts go nowhere else.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, prod
from typing import TYPE_CHECKING

import numpy as np

from fedbandit.core.contexts import Contexts, Features
from fedbandit.core.ragged import Ragged
from fedbandit.deploy.device.log import LogRow, Record
from fedbandit.deploy.device.model_files import DeviceModel

if TYPE_CHECKING:
    from fedbandit.events import Events

_logger = logging.getLogger("fedbandit.deploy")
_LARGEST = float(np.finfo(np.float32).max)
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
) -> Record:
    """A decision about one context as bytes, in the byte order of every machine that this runs on."""
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
    )


def logged_events(
    rows: Sequence[LogRow], model: DeviceModel, counted: int = 0, last: int = 2**63 - 1
) -> Logged:
    """The rows that fit the model as arrays; those settled after `counted` are fresh.

    `last` is the highest sequence number that the log has given out.
    """
    from fedbandit.events import Events

    fitting = [row for row in rows if row.space == model.space]
    sound, damaged = _sound(fitting, model, last)
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
        contexts=Contexts(shared),
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


def why_damaged(row: LogRow, model: DeviceModel, last: int) -> str | None:
    """Why no agent with this model can have written the row, or None if one can; SQLite keeps any type anywhere."""
    k = model.num_actions
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
    return _why_not_a_context(row, model)


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


def _sound(rows: list[LogRow], model: DeviceModel, last: int) -> tuple[list[LogRow], int]:
    """The rows that can be trained on, and how many are damaged; these are named in one warning."""
    sound, named = [], []
    for row in rows:
        reason = why_damaged(row, model, last)
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


def _is_number(value: object) -> bool:
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
