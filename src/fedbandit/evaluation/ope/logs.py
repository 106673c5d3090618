"""Logged feedback as records of off-policy evaluation: from a logged data set, or from a table with its own columns."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedbandit.acting import explore
from fedbandit.core.errors import DataError
from fedbandit.core.prediction import Prediction
from fedbandit.core.progress import SILENT
from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import Log, Split
from fedbandit.data.formats.columns import Table
from fedbandit.data.text import in_natural_order, split_labels
from fedbandit.evaluation.ope.estimators import Records
from fedbandit.policies import Policy
from fedbandit.policies.rules import takes_contexts

RowScores = Callable[[np.ndarray], np.ndarray]
"""Rows of a split -> a number for every action, [n, K]: predicted or true rewards."""
RowPredictions = Callable[[np.ndarray], Prediction]
"""Rows of a split -> what a model says about them: what a policy decides by."""
_ROWS = 4096


def records_of(
    split: Split,
    policy: Policy,
    num_actions: int,
    predictions: RowPredictions | None = None,
    rewards: RowScores | None = None,
    within: tuple[float, float] | None = None,
) -> Records:
    """The records of a logged split for a policy; `predictions` for a policy that needs some, `rewards` a reward model.

    What the reward model says is cut to the range `within`, for bounds that need one.
    """
    log = log_of(split)
    n = split.num_examples
    target = np.zeros(n)
    predicted, expected = (np.zeros(n), np.zeros(n)) if rewards is not None else (None, None)
    for start in range(0, n, _ROWS):
        rows = np.arange(start, min(start + _ROWS, n))
        given = (
            Prediction(np.zeros((len(rows), num_actions)))
            if predictions is None
            else predictions(rows)
        )
        contexts = split.contexts(rows) if takes_contexts(type(policy)) else None
        exact, available = given.astype(np.float64), available_at(log, rows, num_actions)
        probabilities = explore(policy, exact, available, contexts)
        actions = np.asarray(log.actions[rows])[:, None]
        target[rows] = np.take_along_axis(probabilities, actions, axis=1)[:, 0]
        if rewards is not None:
            # Action by action and before any average: only so is the weighted prediction, on average, the expected one.
            modelled = rewards(rows) if within is None else np.clip(rewards(rows), *within)
            predicted[rows] = np.take_along_axis(modelled, actions, axis=1)[:, 0]  # type: ignore[index]
            expected[rows] = (probabilities * modelled).sum(axis=1)  # type: ignore[index]
    return records_for(split, target, predicted, expected)


def records_for(
    split: Split,
    target: np.ndarray,
    predicted: np.ndarray | None = None,
    expected: np.ndarray | None = None,
) -> Records:
    """The records of a logged split, where the evaluated policy's probability of each logged action is known."""
    log = log_of(split)
    return Records(
        clients=np.arange(split.num_clients),
        bounds=np.asarray(split.offsets, np.int64),
        rewards=np.asarray(log.rewards, np.float64),
        propensities=np.asarray(log.propensities, np.float64),
        target=np.asarray(target, np.float64),
        predicted=predicted,
        expected=expected,
    )


def available_at(log: Log, rows: np.ndarray, num_actions: int) -> np.ndarray | None:
    """Which actions could be taken, bool [n, K]; None where always all of them."""
    if log.available is None:
        return None
    sets = log.available.take(rows)
    mask = np.zeros((len(rows), num_actions), bool)
    mask[sets.row_of_entry(), sets.ids] = True
    return mask


def log_of(split: Split) -> Log:
    """The split's log; a split of labels has none."""
    if split.log is None:
        raise DataError(
            "the data set holds labels, not logged feedback; `fedbandit data import logged` makes one"
        )
    return split.log


@dataclass(frozen=True, kw_only=True)
class LogColumns:
    """Which columns mean what. Without `client` every row counts as a client of its own."""

    action: str = "action"
    reward: str = "reward"
    propensity: str | None = "propensity"  # None: the table has none
    client: str | None = None
    target: str | None = None  # the evaluated policy's probability of the action taken
    available: str | None = None
    separator: str = "|"


@dataclass(frozen=True)
class LogTable:
    """A logged split without contexts, the names of its actions, and the target column where one was named."""

    split: Split
    actions: tuple[str, ...]
    target: np.ndarray | None  # float64 [n], in the order of the split


def read_log_table(table: Table, columns: LogColumns) -> LogTable:
    """The logged decisions of a file or a frame, grouped by client."""
    texts = [
        name for name in (columns.action, columns.client, columns.available) if name is not None
    ]
    numbers = [
        name for name in (columns.reward, columns.propensity, columns.target) if name is not None
    ]
    table.require([*texts, *numbers])
    cells: dict[str, list[str]] = {name: [] for name in texts}
    figures: dict[str, list[np.ndarray]] = {name: [] for name in numbers}
    for batch in table.batches(texts, numbers, progress=SILENT, what="Reading decisions"):
        for name in texts:
            cells[name] += [cell.strip() for cell in batch.texts(name)]
        for name in numbers:
            figures[name].append(batch.exact(name))
    if not cells[columns.action]:
        raise DataError(f"{table.label}: the table has no rows")
    values = {name: np.concatenate(parts) for name, parts in figures.items()}
    if columns.propensity is not None:
        _check(table.label, "propensity", columns.propensity, values[columns.propensity], above=0.0)
    if columns.target is not None:
        _check(table.label, "probability", columns.target, values[columns.target], above=-1e-12)
    return _grouped(table.label, columns, cells, values)


def _grouped(
    label: str, columns: LogColumns, cells: dict[str, list[str]], values: dict[str, np.ndarray]
) -> LogTable:
    taken = cells[columns.action]
    sets = (
        [split_labels(cell, columns.separator) for cell in cells[columns.available]]
        if columns.available
        else []
    )
    names = {*taken, *(name for row in sets for name in row)}
    if "" in names:
        raise DataError(
            f"{label}: column {columns.action}, row {taken.index('')}: the action is missing"
        )
    actions = in_natural_order(names)
    code = {name: number for number, name in enumerate(actions)}
    owners = np.array(cells[columns.client] if columns.client else range(len(taken)))
    ids, owner = np.unique(owners, return_inverse=True)
    order = np.argsort(owner, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(ids)))])
    available = (
        _available(f"{label}: column {columns.available}", taken, sets, code)
        if columns.available
        else None
    )
    log = Log(
        actions=np.array([code[name] for name in taken], np.int32)[order],
        rewards=values[columns.reward][order],
        propensities=np.ones(len(taken))
        if columns.propensity is None
        else values[columns.propensity][order],
        available=None if available is None else available.take(order),
    )
    no_labels = Ragged(np.zeros(len(taken) + 1, np.int64), np.empty(0, np.int32))
    names_of_clients = np.array([str(name).encode() for name in ids])
    split = Split(
        names_of_clients, offsets, np.empty((len(taken), 0), np.float32), no_labels, log=log
    )
    target = None if columns.target is None else values[columns.target][order]
    return LogTable(split, tuple(actions), target)


def _available(
    column: str, taken: list[str], sets: list[list[str]], code: dict[str, int]
) -> Ragged:
    """The sets of available actions; an empty cell means that every action was."""
    everything = list(range(len(code)))
    rows = [sorted({code[name] for name in names}) or everything for names in sets]
    for number, (name, could) in enumerate(zip(taken, rows, strict=True)):
        if code[name] not in could:
            raise DataError(
                f"{column}, row {number}: the action that was taken is not among the available ones"
            )
    return Ragged.from_rows(rows)


def _check(label: str, what: str, column: str, values: np.ndarray, above: float) -> None:
    bad = np.flatnonzero(~((values > above) & (values <= 1)))
    if len(bad):
        row = int(bad[0])
        raise DataError(f"{label}: column {column}, row {row}: a {what} cannot be {values[row]:g}")
