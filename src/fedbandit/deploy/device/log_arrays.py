"""From rows of the event log to arrays that a learner trains on. Runs on the device: contexts go nowhere else."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedbandit.core.ragged import Ragged
from fedbandit.deploy.device.acting import Context
from fedbandit.deploy.device.log import LogRow, Record
from fedbandit.deploy.device.model_files import DeviceModel

if TYPE_CHECKING:
    from fedbandit.events import Events


@dataclass(frozen=True)
class Logged:
    """A snapshot of what a device can train on: one client's events, oldest first."""

    events: "Events"
    sequence: np.ndarray  # int64 [n]: ascending, never used twice in a log
    settled: np.ndarray  # int64 [n]: the order in which events became readable; the highest one marks this snapshot
    available: np.ndarray | None  # bool [n, K]: the actions that could be chosen; None: always all of them
    left_out: int  # events whose contexts or actions mean something else than this model's

    def __len__(self) -> int:
        return len(self.events)


def record(
    model: DeviceModel, context: Context, action: int, propensity: float, available: np.ndarray | None
) -> Record:
    """A decision as bytes; the numbers in the byte order of every machine that this runs on."""
    return Record(
        version=model.version,
        space=model.space,
        action=action,
        propensity=propensity,
        available=None if available is None else np.packbits(available).tobytes(),
        ids=None if context.ids is None else context.ids.astype("<i4").tobytes(),
        values=context.values.astype("<f4").tobytes(),
    )


def logged_events(rows: Sequence[LogRow], model: DeviceModel, counted: int = 0) -> Logged:
    """The rows that fit the model as arrays; those settled after `counted` are fresh."""
    from fedbandit.events import Events

    fitting = [row for row in rows if row.space == model.space]
    settled = np.array([row.settled for row in fitting], np.int64)
    values = _joined([row.values for row in fitting], "<f4").astype(np.float32)
    contexts: np.ndarray | Ragged
    if model.kind == "sparse":
        lengths = [len(row.values) // 4 for row in fitting]
        ids = _joined([row.ids or b"" for row in fitting], "<i4").astype(np.int32)
        contexts = Ragged(np.cumsum([0, *lengths]).astype(np.int64), ids, values)
    else:
        contexts = values.reshape(len(fitting), *model.shape)
    events = Events(
        bounds=np.array([0, len(fitting)], np.int64),
        contexts=contexts,
        actions=np.array([row.action for row in fitting], np.int64),
        rewards=np.array([row.reward for row in fitting], np.float32),
        propensities=np.array([row.propensity for row in fitting], np.float64),
        versions=np.array([row.version for row in fitting], np.int32),
        fresh=settled > counted,
    )
    return Logged(
        events=events,
        sequence=np.array([row.sequence for row in fitting], np.int64),
        settled=settled,
        available=_available(fitting, model.num_actions),
        left_out=len(rows) - len(fitting),
    )


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
