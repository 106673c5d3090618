"""Any table a user has: a client id, columns to decide from, and labels, from CSV, Parquet or a
frame.

Read twice: once to find what the columns are and to count words and labels, once to write. Where
text is found on the way, words take a third pass. Only counts and one batch are in memory.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.progress import SILENT, ProgressReporter
from fedbandit.data.formats import cells
from fedbandit.data.formats.columns import Table, TableBatch
from fedbandit.data.importers.common import (
    Dropped,
    HoldOut,
    add_rows,
    check_counts,
    check_separator,
)
from fedbandit.data.importers.contexts import ColumnOptions, ContextPlan, Survey, summary
from fedbandit.data.text import (
    FrequencyCounter,
    LabelEncoder,
    case_map,
    in_natural_order,
    split_labels,
)
from fedbandit.data.writer import DatasetWriter, check_target

_SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
_SEPARATORS = ("|", ";", ",")
_WHOLE = "none"  # in place of a separator: a cell is one label


@dataclass(frozen=True, kw_only=True)
class TableOptions(ColumnOptions):
    """Which columns of a table mean what; the names are those of the command line's options.

    `labels` names one column, whose cells may hold several labels, or several: further labels, or
    marks (true where the label of the column's name applies).
    """

    client: str
    labels: str | Sequence[str]
    split: str | None = None
    label_separator: str | None = None  # None: found in the cells; "none": a cell is one label
    actions: int | None = None  # None: 50 for text, every label for features
    drop_unlabelled: bool = True
    test_fraction: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(actions=self.actions)
        check_separator("label-separator", self.label_separator)
        HoldOut(self.test_fraction, by_client=True)
        if not self.labels:
            raise ConfigError("labels: name the column, or the columns, with the labels")


def import_table(
    source: Any,
    out: Path | str,
    options: TableOptions,
    progress: ProgressReporter = SILENT,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Import a CSV or Parquet file or a frame, and return the folder of the data set.

    Vocabulary and actions are its most frequent words and labels. `say` is told, before anything is
    written, what was made of every column. Rows without a client, and those without any action
    unless they are to be kept, are dropped and counted.
    """
    check_target(out)
    found = _Found.of(source, options, progress)
    say(found.summary(options))
    table, plan = found.table, found.plan
    writer = DatasetWriter(
        out,
        name=Path(out).name,
        actions=found.actions,
        multilabel=found.labels.several,
        lower_case=case_map(found.actions),
        source={"importer": "table", "file": table.source.file, "columns": plan.names},
        **plan.header(),
    )
    encoder, encode = LabelEncoder(found.actions), plan.encoding()
    hold_out = HoldOut(options.test_fraction, by_client=bool(plan.words))
    dropped = Dropped()
    with writer:
        for batch in table.batches(
            [*plan.names, *found.roles], progress=progress, what="Writing examples"
        ):
            clients = batch.names(options.client)
            names = found.labels.rows(batch)
            labels = encoder.encode(names)
            named = np.array([bool(row) for row in names], bool)
            keep = dropped.choose(clients, labels, options.drop_unlabelled, named)
            owners = [clients[row] for row in keep.tolist()]
            is_test = (
                _test_rows(batch, options.split)[keep]
                if options.split
                else hold_out.is_test(owners)
            )
            add_rows(writer, owners, encode(batch, keep), labels.take(keep), is_test)
        writer.source |= dropped.report()
        return writer.finish()


def preview_table(source: Any, options: TableOptions, progress: ProgressReporter = SILENT) -> str:
    """A preview of `import_table` in words; nothing is written."""
    return _Found.of(source, options, progress).summary(options)


@dataclass(frozen=True)
class _Found:
    """All that the first passes have found."""

    table: Table
    plan: ContextPlan
    labels: "_Labels"
    actions: list[str]
    clients: int
    rows: int
    unlabelled: int

    @property
    def roles(self) -> list[str]:
        return self.labels.roles

    @classmethod
    def of(cls, source: Any, options: TableOptions, progress: ProgressReporter) -> "_Found":
        """With a split column only training rows count; without one all of them do."""
        table = options.table(source)
        columns = table.matching(
            [options.labels] if isinstance(options.labels, str) else options.labels
        )
        roles = [options.client, *columns, *([options.split] if options.split else [])]
        table.require(roles)

        def counted(batch: TableBatch) -> np.ndarray | None:
            return ~_test_rows(batch, options.split) if options.split else None

        survey = Survey(table, options, roles)
        labels = _Labels(columns, roles, options.label_separator)
        clients: set[str] = set()
        rows = 0
        for batch in table.batches(
            [*roles, *survey.names], progress=progress, what="Looking at the columns"
        ):
            clients.update(batch.names(options.client))
            rows += len(batch)
            labels.count(batch, counted(batch))
            survey.add(batch, counted(batch))
        like = survey.like
        frequent = labels.decide()
        if not frequent:
            raise DataError(f"{table.column(columns[0])}: has no labels")
        plan = survey.decide(progress, [options.split] if options.split else [], counted)
        if like is not None:
            actions = list(like.header.actions)
            if not set(actions) & set(frequent):
                raise DataError(
                    f"{table.label}: no label of {', '.join(columns)} is an action of {like.header.name}"
                )
        else:
            most = options.actions if options.actions is not None or not plan.words else 50
            actions = frequent[:most]
            if not plan.words:
                actions = in_natural_order(actions)
        return cls(table, plan, labels, actions, len(clients - {""}), rows, labels.empty)

    def summary(self, options: TableOptions) -> str:
        """The columns and what becomes of each, as text."""
        roles = [(options.client, f"the client: {self.clients:,} of them")]
        several = ", several in a row" if self.labels.several else ""
        how = f", separated by {self.labels.separator!r}" if self.labels.splits else ""
        columns = self.labels.columns
        if self.labels.marks:
            roles += [(name, "a label: it applies where the cell is true") for name in columns]
        else:
            roles.append((columns[0], f"the labels: {len(self.actions):,} actions{how}{several}"))
            roles += [(name, f"more labels of {columns[0]}") for name in columns[1:]]
        if options.split:
            roles.append((options.split, "train or test"))
        gone = "dropped" if options.drop_unlabelled else "kept"
        facts = [f"rows: {self.rows:,}; {self.unlabelled:,} without a label are {gone}"]
        return summary(self.table, roles, self.plan, facts)


class _Labels:
    """The labels of rows: in one column, with or without a separator, in several, or marked in
    several.
    """

    def __init__(self, columns: list[str], roles: list[str], separator: str | None) -> None:
        self.columns, self.roles = columns, roles
        self.separator = separator or _WHOLE
        self.several = self.splits = self.marks = False
        self.empty = 0
        self._open = separator is None
        self._counts = {one: FrequencyCounter() for one in (*_SEPARATORS, _WHOLE)}
        if separator is not None:
            self._counts = {self.separator: FrequencyCounter()}
        self._multiple = dict.fromkeys(self._counts, False)
        self._split = dict.fromkeys(self._counts, False)
        self._true: dict[str, int] = dict.fromkeys(columns, 0)
        self._only_marks = len(columns) > 1
        self._two_marks = False

    def count(self, batch: TableBatch, rows: np.ndarray | None) -> None:
        """Count the labels of a batch, for each way to separate them that is still possible."""
        wanted = list(range(len(batch))) if rows is None else np.flatnonzero(rows).tolist()
        if self._only_marks:
            self._count_marks(batch, wanted)
        found = [self._cells(batch, name) for name in self.columns]
        # Rows with the same cells are looked at once.
        for here, times in Counter(
            tuple(cell for column in found for cell in column[row]) for row in wanted
        ).items():
            self.empty += times if not here else 0
            for separator, counter in self._counts.items():
                names = _split(list(here), separator)
                self._multiple[separator] |= len(set(names)) > 1
                self._split[separator] |= len(names) > len(here)
                counter.add({name: times * number for name, number in Counter(names).items()})

    def _count_marks(self, batch: TableBatch, rows: list[int]) -> None:
        marked = np.zeros(len(batch), np.int64)
        for name in self.columns:
            array = batch.array(name)
            flags = (
                cells.flags(array)
                if not pa.types.is_nested(array.type)
                else np.full(len(batch), np.nan)
            )
            self._only_marks &= not (np.isnan(flags) & cells.present(array, cells.NO_VALUE)).any()
            if not self._only_marks:
                return
            self._true[name] += int((flags[rows] == 1).sum())
            marked += flags == 1
        self._two_marks |= bool((marked[rows] > 1).any())

    def decide(self) -> list[str]:
        """Settle how labels are separated: the labels, most frequent first."""
        if self._only_marks:
            self.marks, self.several = True, self._two_marks
            return sorted(
                (name for name in self.columns if self._true[name]),
                key=lambda name: -self._true[name],
            )
        if self._open:
            self.separator = next((one for one in _SEPARATORS if self._divides(one)), _WHOLE)
        self.several, self.splits = self._multiple[self.separator], self._split[self.separator]
        return self._counts[self.separator].top()

    def _divides(self, separator: str) -> bool:
        """Whether it separates labels: a bar always does, the others where the parts occur
        elsewhere, too.
        """
        if not self._split[separator]:
            return False
        return separator == "|" or self._counts[separator].distinct <= self._counts[_WHOLE].distinct

    def rows(self, batch: TableBatch) -> list[list[str]]:
        """The labels of every row."""
        if self.marks:
            flags = [cells.flags(batch.array(name)) == 1 for name in self.columns]
            return [
                [name for name, own in zip(self.columns, flags, strict=True) if own[row]]
                for row in range(len(batch))
            ]
        found = [self._cells(batch, name) for name in self.columns]
        return [
            _split([cell for column in found for cell in column[row]], self.separator)
            for row in range(len(batch))
        ]

    def _cells(self, batch: TableBatch, name: str) -> list[list[str]]:
        """The cells of a column that hold something; a list holds any number."""
        array = batch.array(name)
        if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
            return [
                [str(one).strip() for one in found or [] if one is not None]
                for found in array.to_pylist()
            ]
        return [[cell] if cell else [] for cell in batch.names(name)]


def _split(found: list[str], separator: str) -> list[str]:
    if separator == _WHOLE:
        return found
    return [name for cell in found for name in split_labels(cell, separator)]


def _test_rows(batch: TableBatch, column: str | None) -> np.ndarray:
    assert column is not None
    found = batch.names(column)
    unknown = next((row for row, cell in enumerate(found) if cell.lower() not in _SPLITS), None)
    if unknown is not None:
        raise DataError(
            f"{batch.place(column, unknown)}: expected train or test, found {found[unknown]!r}"
        )
    return np.array([_SPLITS[cell.lower()] == "test" for cell in found])
