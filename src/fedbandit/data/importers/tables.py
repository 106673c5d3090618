"""Tables a user has, from CSV, Parquet or a frame: rows with labels, or logged decisions.

Read twice: once to find what the columns are and to count words and labels, once to write. Where
text is found on the way, words take a third pass. Only counts and one batch are in memory.
"""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from fedbandit.core.errors import ConfigError, DataError, refuse
from fedbandit.core.progress import SILENT, ProgressReporter
from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import FederatedDataset, Log
from fedbandit.data.importers import (
    Addresses,
    Dropped,
    HoldOut,
    Rows,
    cells,
    check_counts,
    one_each,
    unlabelled,
    write_rows,
)
from fedbandit.data.importers.columns import WHOLE, Table, TableBatch, split_names
from fedbandit.data.importers.contexts import ColumnOptions, ContextPlan, Survey, summary
from fedbandit.data.importers.items import ItemOptions, ItemTable, Lists, places
from fedbandit.data.importers.profile import ColumnOverride, ColumnReading, Profile
from fedbandit.data.text import (
    FrequencyCounter,
    LabelEncoder,
    case_map,
    in_natural_order,
)
from fedbandit.data.writer import DatasetWriter, check_target

_SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
_SEPARATORS = ("|", ";", ",")
_CONDITION = re.compile(r"^\s*(.+?)\s*(>=|<=|==|!=|>|<)\s*(.+?)\s*$")
_COMPARE: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {
    ">=": np.greater_equal,
    "<=": np.less_equal,
    ">": np.greater,
    "<": np.less,
}
_MANY = 20  # clients of a log from which on whole clients are held out; of fewer, a part of each


@dataclass(frozen=True, kw_only=True)
class RowOptions(ColumnOptions):
    """Which columns mean what, whatever the rows answer; names as on the command line."""

    importer: ClassVar[str]
    client: str
    split: str | None = None  # a column that says train or test
    where: str | None = None  # COLUMN>=NUMBER or so: rows that do not fit are left out
    actions: int | None = None
    test_fraction: float = 0.1
    items: ItemOptions | None = None  # of a catalogue, in place of fixed actions

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(actions=self.actions)
        HoldOut(self.test_fraction, by_client=True)
        unfit = self.where is not None and not _CONDITION.match(self.where)
        both = self.items is not None and self.actions is not None
        refuse(
            (unfit, f"where: expected COLUMN>=NUMBER or so, got {self.where!r}"),
            (both, "actions: the items of a catalogue are chosen from; leave it out"),
        )

    def answers(self, table: Table, progress: ProgressReporter) -> "Answers":
        """The part that reads what rows answer: labels or feedback."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TableOptions(RowOptions):
    """A table with labels; the names are those of the command line's options.

    `labels` names one column, whose cells may hold several labels, or several: further labels, or
    marks (true where the label of the column's name applies). `actions` is the number of labels
    that are kept, the most frequent first: by default 50 where there is text, otherwise all.
    """

    importer = "table"
    labels: str | Sequence[str]
    label_separator: str | None = None  # None: found in the cells; "none": a cell is one label
    drop_unlabelled: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(
            (self.label_separator == "", "label-separator: may not be empty"),
            (not self.labels, "labels: name the column, or the columns, with the labels"),
        )

    def answers(self, table: Table, progress: ProgressReporter) -> "Answers":
        """Labels of the named columns, or the item that one column names."""
        if self.items is None:
            return _Labels(table, self)
        return _Picks(table, self, ItemTable(self.items, progress))


@dataclass(frozen=True, kw_only=True)
class LoggedOptions(RowOptions):
    """Logged decisions: client, context, action, reward, propensity, and what was available.

    `available` lists the actions that could be taken at each row, in a list or in a cell with a
    separator; an empty cell means all. With `actions` they are the whole numbers 0 to N-1,
    otherwise the names that occur.
    """

    importer = "logged"
    action: str
    reward: str
    propensity: str | None  # None: it is not known, and estimated afterwards
    available: str | None = None
    separator: str = "|"

    def __post_init__(self) -> None:
        super().__post_init__()
        both = self.like is not None and self.actions is not None
        refuse(
            (self.separator == "", "separator: may not be empty"),
            (both, "like: the other data set names the actions; leave out actions"),
        )

    def answers(self, table: Table, progress: ProgressReporter) -> "Answers":
        """Feedback on the actions, or the items, that were taken."""
        if self.items is None:
            return _Feedback(table, self)
        return _ItemFeedback(table, self, ItemTable(self.items, progress))


class Answers(ABC):
    """Reads what rows answer: looks at every batch once, decides, then reads batch after batch."""

    columns: list[str]  # that it reads; no part of a context

    @abstractmethod
    def look(self, batch: TableBatch, rows: np.ndarray | None) -> None:
        """Count what a batch holds; `rows`, bool [rows], are those that count, None: all."""

    @abstractmethod
    def settle(self) -> None:
        """Called when all batches were looked at; `DataError` where nothing can be answered."""

    @abstractmethod
    def decide(self, plan: ContextPlan, like: FederatedDataset | None) -> dict[str, Any]:
        """Settle what the actions are: fields of the header."""

    @abstractmethod
    def read(self, batch: TableBatch, rows: Rows) -> Rows:
        """The rows of a batch with their answers; `rows` has clients, contexts and no labels."""

    @abstractmethod
    def describe(self) -> tuple[list[tuple[str, str]], str]:
        """For each column what it is, and a remark behind the number of rows."""

    def amounts(self, batch: TableBatch) -> np.ndarray:
        """The rewards of a batch, float64 [rows], by which whole clients are held out evenly."""
        return np.zeros(len(batch))

    def hold_out(
        self, fraction: float, plan: ContextPlan, totals: Mapping[str, tuple[float, float]]
    ) -> HoldOut:
        """The rule for what is held out: whole clients where there are many."""
        return HoldOut(fraction, by_client=len(totals) >= _MANY)

    def facts(self) -> dict[str, Any]:
        """Counts for the header's `source`, once all rows were read."""
        return {}


def import_table(
    source: Any,
    out: Path | str,
    options: RowOptions,
    progress: ProgressReporter = SILENT,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Import a CSV or Parquet file or a frame, and return the folder of the data set.

    `options` say whether rows have labels (`TableOptions`) or are logged decisions
    (`LoggedOptions`). Vocabulary and actions are the most frequent words and labels. `say` is told,
    before anything is written, what was made of every column. Rows without a client, and those
    without any action unless they are to be kept, are dropped and counted. Of logs an action that
    is not known, a reward that is not finite or a propensity outside (0, 1] is refused with its row.
    """
    check_target(out)
    found = _Found(source, options, progress)
    say(found.summary())
    table, plan, answers = found.table, found.plan, found.answers
    encode = plan.encoding()

    def batches() -> Iterator[Rows]:
        columns = [*plan.names, *found.roles]
        for batch in table.batches(columns, progress=progress, what="Writing examples"):
            unfit = found.unfit(batch)
            rows = Rows(
                batch.names(options.client),
                partial(encode, batch),
                Ragged.from_rows([[]] * len(batch)),
                {} if unfit is None else {"rows_that_do_not_fit": unfit},
                found.test_rows(batch),
            )
            yield answers.read(batch, rows)

    hold_out = answers.hold_out(options.test_fraction, plan, found.totals)
    source = {"importer": options.importer, "file": table.source.file, "columns": plan.names}
    with DatasetWriter(out, source=source, **found.header, **plan.header()) as writer:
        return write_rows(writer, batches(), hold_out, Dropped(), answers.facts)


def preview_table(source: Any, options: RowOptions, progress: ProgressReporter = SILENT) -> str:
    """A preview of `import_table` in words; nothing is written."""
    return _Found(source, options, progress).summary()


class _Found:
    """All that the first passes have found: the plan for contexts, and what rows answer.

    With a split column only training rows count; without one all of them do.
    """

    def __init__(self, source: Any, options: RowOptions, progress: ProgressReporter) -> None:
        self.options, self.table = options, options.table(source)
        self.answers = options.answers(self.table, progress)
        extra = [options.split] if options.split else []
        condition = _CONDITION.match(options.where) if options.where else None
        self._condition = condition.groups() if condition else None
        extra += [self._condition[0]] if self._condition else []
        self.roles = [options.client, *self.answers.columns, *extra]
        self.table.require(self.roles)
        items = options.items is not None
        survey = Survey(self.table, options, self.roles, may_be_empty=items)
        self.totals: dict[str, tuple[float, float]] = {}  # events and rewards of each client
        self.rows = 0
        for batch in self.table.batches(
            [*self.roles, *survey.names], progress=progress, what="Looking at the columns"
        ):
            amounts = self.answers.amounts(batch)
            for client, amount in zip(batch.names(options.client), amounts.tolist(), strict=True):
                events, reward = self.totals.get(client, (0.0, 0.0))
                self.totals[client] = events + 1, reward + amount
            self.rows += len(batch)
            self.answers.look(batch, self._counted(batch))
            survey.add(batch, self._counted(batch))
        self.totals.pop("", None)
        self.answers.settle()
        self.plan = survey.decide(progress, extra, self._counted)
        self.header = self.answers.decide(self.plan, survey.like)

    def test_rows(self, batch: TableBatch) -> np.ndarray | None:
        """Which rows the split column holds out: bool [rows]; None without such a column."""
        column = self.options.split
        if column is None:
            return None
        found = batch.names(column)
        for row, cell in enumerate(found):
            if cell.lower() not in _SPLITS:
                where = batch.place(column, row)
                raise DataError(f"{where}: expected train or test, found {cell!r}")
        return np.array([_SPLITS[cell.lower()] == "test" for cell in found])

    def _counted(self, batch: TableBatch) -> np.ndarray | None:
        """The rows that are looked at: training rows that fit; None for all."""
        masks = [one for one in (self.test_rows(batch), self.unfit(batch)) if one is not None]
        return ~np.any(masks, axis=0) if masks else None

    def unfit(self, batch: TableBatch) -> np.ndarray | None:
        """The rows that the option `where` leaves out: bool [rows]; None without it."""
        if self._condition is None:
            return None
        name, sign, value = self._condition
        if sign in ("==", "!="):
            fits = np.array([cell == value for cell in batch.names(name)], bool)
            return fits if sign == "!=" else ~fits
        try:
            found, limit = cells.numbers(batch.array(name)), float(value)
        except ValueError:
            raise ConfigError(f"where: {value!r} is not a number") from None
        return ~_COMPARE[sign](found, limit)

    def summary(self) -> str:
        """The columns and what becomes of each, as text."""
        roles, remark = self.answers.describe()
        roles = [(self.options.client, f"the client: {len(self.totals):,} of them"), *roles]
        if self.options.split:
            roles.append((self.options.split, "train or test"))
        return summary(self.table, roles, self.plan, [f"rows: {self.rows:,}{remark}"])


class _Labels(Answers):
    """The labels of rows: in one column, with or without a separator, in several, or marked in
    several.
    """

    def __init__(self, table: Table, options: TableOptions) -> None:
        self._table, self._options = table, options
        labels, separator = options.labels, options.label_separator
        self.columns = table.matching([labels] if isinstance(labels, str) else labels)
        self._separator = separator or WHOLE
        self._several = self._splits = self._marks = False
        self._empty = 0
        ways = (*_SEPARATORS, WHOLE) if separator is None else (separator,)
        self._counts = {way: FrequencyCounter() for way in ways}
        self._multiple, self._split = dict.fromkeys(ways, False), dict.fromkeys(ways, False)
        self._true: dict[str, int] = dict.fromkeys(self.columns, 0)
        self._only_marks = len(self.columns) > 1
        self._two_marks = False
        self._actions: list[str] = []

    def look(self, batch: TableBatch, rows: np.ndarray | None) -> None:
        """Count the labels of a batch, for each way to separate them that is still possible."""
        wanted = list(range(len(batch))) if rows is None else np.flatnonzero(rows).tolist()
        if self._only_marks:
            self._count_marks(batch, wanted)
        found = [batch.lists(name) for name in self.columns]
        # Rows with the same cells are looked at once.
        for here, times in Counter(
            tuple(cell for column in found for cell in column[row]) for row in wanted
        ).items():
            self._empty += times if not here else 0
            for separator, counter in self._counts.items():
                names = split_names(list(here), separator)
                self._multiple[separator] |= len(set(names)) > 1
                self._split[separator] |= len(names) > len(here)
                counter.add({name: times * number for name, number in Counter(names).items()})

    def _count_marks(self, batch: TableBatch, rows: list[int]) -> None:
        """Count the marks of a batch, as long as all cells are marks."""
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

    def settle(self) -> None:
        """Settle how labels are separated."""
        self._ranked = self._frequent()
        if not self._ranked:
            raise DataError(f"{self._table.column(self.columns[0])}: has no labels")

    def decide(self, plan: ContextPlan, like: FederatedDataset | None) -> dict[str, Any]:
        """Settle which labels are actions."""
        if like is not None:
            self._actions = list(like.header.actions)
            if not set(self._actions) & set(self._ranked):
                of = f"{', '.join(self.columns)} is an action of {like.header.name}"
                raise DataError(f"{self._table.label}: no label of {of}")
        else:
            most = self._options.actions
            actions = self._ranked[: 50 if most is None and plan.words else most]
            self._actions = actions if plan.words else in_natural_order(actions)
        self._encoder = LabelEncoder(self._actions)
        lower_case = case_map(self._actions)
        return {"actions": self._actions, "multilabel": self._several, "lower_case": lower_case}

    def _frequent(self) -> list[str]:
        """The labels, most frequent first."""
        if self._only_marks:
            self._marks, self._several = True, self._two_marks
            marked = [name for name in self.columns if self._true[name]]
            return sorted(marked, key=lambda name: -self._true[name])
        if self._options.label_separator is None:
            self._separator = next((one for one in _SEPARATORS if self._divides(one)), WHOLE)
        self._several, self._splits = self._multiple[self._separator], self._split[self._separator]
        return self._counts[self._separator].top()

    def _divides(self, separator: str) -> bool:
        """Whether it separates labels: a bar always does, the others where the parts occur
        elsewhere, too.
        """
        if not self._split[separator]:
            return False
        return separator == "|" or self._counts[separator].distinct <= self._counts[WHOLE].distinct

    def read(self, batch: TableBatch, rows: Rows) -> Rows:
        """The labels of a batch; rows without any action are wrong unless they are to be kept."""
        names = self._rows(batch)
        labels, wrong = self._encoder.encode(names), dict(rows.wrong)
        if self._options.drop_unlabelled:
            wrong |= unlabelled(labels, np.array([bool(row) for row in names]))
        return replace(rows, labels=labels, wrong=wrong)

    def _rows(self, batch: TableBatch) -> list[list[str]]:
        """The labels of every row, by name."""
        if self._marks:
            flags = [cells.flags(batch.array(name)) == 1 for name in self.columns]
            return [
                [name for name, own in zip(self.columns, flags, strict=True) if own[row]]
                for row in range(len(batch))
            ]
        found = [batch.lists(name) for name in self.columns]
        return [
            split_names([cell for column in found for cell in column[row]], self._separator)
            for row in range(len(batch))
        ]

    def hold_out(
        self, fraction: float, plan: ContextPlan, totals: Mapping[str, tuple[float, float]]
    ) -> HoldOut:
        """Text is held out by client, other examples within clients."""
        return HoldOut(fraction, by_client=bool(plan.words))

    def describe(self) -> tuple[list[tuple[str, str]], str]:
        """The label columns, and what happens to rows without a label."""
        several = ", several in a row" if self._several else ""
        how = f", separated by {self._separator!r}" if self._splits else ""
        if self._marks:
            roles = [(name, "a label: it applies where the cell is true") for name in self.columns]
        else:
            actions = f"{len(self._actions):,} actions{how}{several}"
            roles = [(self.columns[0], f"the labels: {actions}")]
            roles += [(name, f"more labels of {self.columns[0]}") for name in self.columns[1:]]
        gone = "dropped" if self._options.drop_unlabelled else "kept"
        return roles, f"; {self._empty:,} without a label are {gone}"


class _Picks(Answers):
    """Items that were picked out of a catalogue, each from a list of candidates."""

    def __init__(self, table: Table, options: TableOptions, items: ItemTable) -> None:
        labels = options.labels
        found = table.matching([labels] if isinstance(labels, str) else labels)
        if len(found) != 1:
            raise ConfigError("labels: one column names the item that was picked")
        self._table, self._column, self._lists = table, found[0], Lists(items)
        self.columns = [self._column, *self._lists.columns]
        self._addresses = Addresses()
        self._unknown = 0

    def look(self, batch: TableBatch, rows: np.ndarray | None) -> None:
        """Count how popular items are, and find how times are written."""
        names = batch.names(self._column)
        wanted = range(len(names)) if rows is None else np.flatnonzero(rows).tolist()
        self._lists.count([names[row] for row in wanted])
        self._lists.clock.look(batch)

    def settle(self) -> None:
        """Refuse events of which none picks an item of the catalogue."""
        if not self._lists.popularity.any():
            where = self._table.column(self._column)
            raise DataError(f"{where}: names no item of {self._lists.items.table.label}")

    def decide(self, plan: ContextPlan, like: FederatedDataset | None) -> dict[str, Any]:
        """The catalogue, in place of actions."""
        return self._lists.header()

    def read(self, batch: TableBatch, rows: Rows) -> Rows:
        """Lists in an order of their own, and the place of the item that was picked."""
        names, lists = batch.names(self._column), self._lists
        picked = np.array([lists.items.codes.get(name, -1) for name in names], np.int64)
        times, address = lists.clock.read(batch), self._addresses.of(rows.clients)
        if lists.given is None:
            shown = lists.around(picked, address, times)
        else:
            shown, unknown = lists.known(batch.lists(lists.given, lists.separator))
            self._unknown += unknown
        shown = lists.shuffled(shown, address)
        place, counts = places(shown, picked), np.diff(shown.offsets)
        wrong = {
            **rows.wrong,
            "rows_without_label": np.array([not name for name in names], bool),
            "rows_of_unknown_items": picked < 0,
            **lists.clock.wrong(times),
            "rows_without_candidates": counts == 0,
            "rows_with_one_candidate": counts == 1,
            "rows_whose_label_is_no_candidate": place < 0,
        }
        return lists.listed(replace(rows, labels=one_each(place), wrong=wrong), shown, times)

    def describe(self) -> tuple[list[tuple[str, str]], str]:
        """The columns of the events, and the catalogue."""
        roles, remark = self._lists.describe("picked")
        return [(self._column, "the item that was picked"), *roles], remark

    def facts(self) -> dict[str, Any]:
        """The origin of the lists, and the number of names in them that are no items."""
        unknown = {"unknown_candidates": self._unknown} if self._unknown else {}
        return {"candidates": self._lists.origin(), **unknown}


class _Feedback(Answers):
    """Logged decisions: the action taken, its reward and propensity, and what could be taken."""

    def __init__(self, table: Table, options: LoggedOptions) -> None:
        self._table, self._options = table, options
        numbers = [options.reward, *([options.propensity] if options.propensity else [])]
        self.columns = [options.action, *numbers]
        self.columns += [options.available] if options.available else []
        self._profiles = [Profile(name, ColumnOverride("raw")) for name in numbers]
        self._names: set[str] = set()

    def look(self, batch: TableBatch, rows: np.ndarray | None) -> None:
        """Collect the names of actions, and how numbers are written."""
        self._names.update(batch.names(self._options.action))
        if self._options.available:
            sets = batch.lists(self._options.available, self._options.separator)
            self._names.update(name for row in sets for name in row)
        for profile in self._profiles:
            profile.add(batch)

    def settle(self) -> None:
        """Refuse a log that names no action."""
        self._names.discard("")
        if not self._names:
            raise DataError(f"{self._table.column(self._options.action)}: names no action")

    def decide(self, plan: ContextPlan, like: FederatedDataset | None) -> dict[str, Any]:
        """Settle the actions: those that occur, those counted by an option, or another data set's."""
        actions = in_natural_order(self._names)
        if self._options.actions is not None:
            actions = [str(code) for code in range(self._options.actions)]
        if like is not None:
            actions = list(like.header.actions)
        self._among = "" if like is None else f" among those of {like.header.name}"
        self._readings = [self._reading(profile) for profile in self._profiles]
        self._codes = {name: code for code, name in enumerate(actions)}
        return {"actions": actions, "logged": True}

    def _reading(self, profile: Profile) -> ColumnReading:
        """Numbers, or what is true and false."""
        try:
            return profile.decide(categories=2, scale="none")
        except DataError:
            flags = profile.decide_flags()
            if flags is None:
                where = self._table.column(profile.name)
                raise DataError(f"{where}: holds no numbers") from None
            return flags

    def read(self, batch: TableBatch, rows: Rows) -> Rows:
        """The feedback of a batch; what is wrong is refused with its row."""
        column = self._options.action
        names = batch.names(column)
        taken = [self._code(name, batch, column, row) for row, name in enumerate(names)]
        actions = np.array(taken, np.int32)
        rewards = _numbers(batch, self._readings[0])
        propensities = np.ones(len(batch))
        if self._options.propensity is not None:
            propensities = _numbers(batch, self._readings[1])
        bad = np.flatnonzero(~((propensities.astype(np.float32) > 0) & (propensities <= 1)))
        if len(bad):
            where = batch.place(self._options.propensity or "", int(bad[0]))
            found = propensities[bad[0]]
            raise DataError(f"{where}: a propensity must be above 0 and at most 1, found {found}")
        numbers = rewards.astype(np.float32), propensities.astype(np.float32)
        return replace(rows, log=Log(actions, *numbers, self._available(batch, actions)))

    def _available(self, batch: TableBatch, actions: np.ndarray) -> Ragged | None:
        """The sets of available actions; an empty cell means that every action was."""
        column = self._options.available
        if not column:
            return None
        everything, sets = list(range(len(self._codes))), []
        for row, found in enumerate(self._coded(batch, column, self._options.separator)):
            could = sorted(set(found)) or everything
            if int(actions[row]) not in could:
                what = "the action that was taken is not among the available ones"
                raise DataError(f"{batch.place(column, row)}: {what}")
            sets.append(could)
        return Ragged.from_rows(sets)

    def _coded(self, batch: TableBatch, column: str, separator: str = WHOLE) -> list[list[int]]:
        """The actions that the cells of a column name; an unknown one is refused with its row."""
        return [
            [self._code(name, batch, column, row) for name in names]
            for row, names in enumerate(batch.lists(column, separator))
        ]

    def _code(self, name: str, batch: TableBatch, column: str, row: int) -> int:
        """The number of a named action; an unknown one is refused with its row."""
        if name not in self._codes:
            called = f"no action called {name!r}{self._among}"
            where = batch.place(column, row)
            raise DataError(f"{where}: {called if name else 'the action is missing'}")
        return self._codes[name]

    def amounts(self, batch: TableBatch) -> np.ndarray:
        """The rewards, as far as they can be read before the whole file was seen."""
        array = batch.array(self._options.reward)
        if pa.types.is_nested(array.type) or pa.types.is_timestamp(array.type):
            return np.zeros(len(batch))
        found = cells.numbers(array)
        return np.nan_to_num(np.where(np.isnan(found), cells.flags(array), found))

    def hold_out(
        self, fraction: float, plan: ContextPlan, totals: Mapping[str, tuple[float, float]]
    ) -> HoldOut:
        """Whole clients with their share of the rewards, where there are many."""
        if len(totals) >= _MANY:
            return HoldOut.balanced(fraction, totals)
        return super().hold_out(fraction, plan, totals)

    def describe(self) -> tuple[list[tuple[str, str]], str]:
        """The columns of the feedback."""
        options = self._options
        roles = [
            (options.action, f"the action that was taken: {len(self._codes):,} of them"),
            (options.reward, "its reward"),
        ]
        roles += [(options.propensity, "its probability")] if options.propensity else []
        if options.available:
            roles.append((options.available, "the actions that could be taken"))
        return roles, ""


class _ItemFeedback(_Feedback):
    """Logged decisions over a catalogue: actions are places in the list of each decision."""

    def __init__(self, table: Table, options: LoggedOptions, items: ItemTable) -> None:
        super().__init__(table, options)
        self._lists = Lists(items)
        self.columns += self._lists.columns

    def look(self, batch: TableBatch, rows: np.ndarray | None) -> None:
        """Collect the names of items, and how numbers and times are written."""
        super().look(batch, rows)
        self._lists.clock.look(batch)

    def decide(self, plan: ContextPlan, like: FederatedDataset | None) -> dict[str, Any]:
        """The catalogue, in place of actions."""
        super().decide(plan, None)
        self._codes = self._lists.items.codes
        return {**self._lists.header(), "logged": True}

    def read(self, batch: TableBatch, rows: Rows) -> Rows:
        """The feedback of a batch; lists keep the order of the file."""
        rows, lists = super().read(batch, rows), self._lists
        assert rows.log is not None
        taken, times = rows.log.actions.astype(np.int64), lists.clock.read(batch)
        if lists.given is None:
            shown = lists.around(taken, Addresses().of(rows.clients), times)
        else:
            shown = Ragged.from_rows(self._coded(batch, lists.given, lists.separator))
        place = places(shown, taken)
        if (place < 0).any():
            row = int(np.argmin(place))
            what = "the action that was taken is not among the candidates"
            raise DataError(f"{batch.place(lists.given or self._options.action, row)}: {what}")
        one = {"rows_with_one_candidate": np.diff(shown.offsets) == 1}
        wrong = {**rows.wrong, **one, **lists.clock.wrong(times)}
        log = replace(rows.log, actions=place.astype(np.int32))
        return lists.listed(replace(rows, log=log, wrong=wrong), shown, times)

    def describe(self) -> tuple[list[tuple[str, str]], str]:
        """The columns of the feedback, and the catalogue."""
        roles, remark = self._lists.describe("taken")
        return [*super().describe()[0], *roles], remark

    def facts(self) -> dict[str, Any]:
        """The origin of the lists."""
        return {"candidates": self._lists.origin()}


def _numbers(batch: TableBatch, reading: ColumnReading) -> np.ndarray:
    """A column without gaps: float64 [rows]."""
    found = reading.cells(batch)
    assert isinstance(found, np.ndarray)
    batch.check_finite(reading.name, found)
    return found
