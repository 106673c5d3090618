"""Sending the rows of a batch to the training or the test split."""

from collections.abc import Sequence

import numpy as np

from fedbandit.data.dataset import Log
from fedbandit.data.ragged import Ragged
from fedbandit.data.writer import DatasetWriter


def add_rows(
    writer: DatasetWriter,
    clients: Sequence[str],
    contexts: np.ndarray | Ragged,
    labels: Ragged,
    is_test: np.ndarray,
    log: Log | None = None,
) -> None:
    """Add a batch; `is_test` says for each row where it goes: bool [rows]."""
    for split, wanted in (("train", ~is_test), ("test", is_test)):
        rows = np.flatnonzero(wanted)
        if len(rows):
            chosen = contexts[rows] if isinstance(contexts, np.ndarray) else contexts.take(rows)
            names = [clients[row] for row in rows.tolist()]
            part = None if log is None else take_log(log, rows)
            writer.add_many(names, chosen, labels.take(rows), split=split, log=part)


def take_log(log: Log, rows: np.ndarray) -> Log:
    """The feedback of the given rows."""
    available = None if log.available is None else log.available.take(rows)
    return Log(log.actions[rows], log.rewards[rows], log.propensities[rows], available)
