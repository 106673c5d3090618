"""Tables of items: a catalogue with features, and for every event the items it could choose from.

An item may occur in several rows, each from another time on: its features have changed, and the
newest row before an event counts. Lists of candidates are given, sampled by popularity, or all
items that existed by then; their order is addressed by the event, so that it never tells the label.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.core.contexts import Features, rows_at
from fedbandit.core.errors import ConfigError, DataError, refuse
from fedbandit.core.progress import SILENT, ProgressReporter
from fedbandit.core.ragged import Ragged
from fedbandit.core.randomness import Purpose, uniforms
from fedbandit.data.dataset import Catalogue, FederatedDataset
from fedbandit.data.encoder import Encoder
from fedbandit.data.importers import Rows
from fedbandit.data.importers.columns import TableBatch
from fedbandit.data.importers.contexts import ColumnOptions, ContextPlan, Survey
from fedbandit.data.importers.profile import ColumnReading, Profile
from fedbandit.data.writer import rewrite

_ORDER, _NEGATIVES = 1001, 1002  # addresses of random numbers, apart from those of embedded data
_ALWAYS = -1e18  # seconds: an item without a time has always existed
_MOST_LISTED = 1000  # items of which all can be candidates of every event
_SEVERAL_DRAWS = 3  # times as many negatives are drawn as are needed, at first
_MOST_DRAWS = 200  # in all, before the rarest items fill a list


@dataclass(frozen=True, kw_only=True)
class ItemOptions:
    """Where items come from, and what an event could choose from; names as on the command line."""

    table: Any  # a file's name, a frame, or a source of rows
    column: str  # the item's id in that table
    candidates: str | None = None  # the events' column with the items that were shown
    negatives: int | str | None = None  # sampled beside the label; "all": every item
    separator: str = "|"
    time: str | None = None  # the events' column that says when
    item_time: str | None = None  # the items' column that says from when a row holds
    columns: ColumnOptions = field(default_factory=ColumnOptions)  # how item columns are read

    def __post_init__(self) -> None:
        both = self.candidates is not None and self.negatives is not None
        number = self.negatives if isinstance(self.negatives, int) else 1
        named = isinstance(self.negatives, str) and self.negatives != "all"
        refuse(
            (both, "negatives: the candidates are given; leave out one of the two"),
            (named, f"negatives: must be a number or all, got {self.negatives!r}"),
            (not 1 <= number <= 10_000, f"negatives: must be from 1 to 10,000, got {number}"),
        )


class ItemTable:
    """The items of a table with their features, ready to be looked up by name and time."""

    def __init__(self, options: ItemOptions, progress: ProgressReporter) -> None:
        self.options = options
        self.table = table = options.columns.table(options.table)
        times = [options.item_time] if options.item_time else []
        roles = [options.column, *times]
        table.require(roles)
        survey = Survey(table, options.columns, roles, of_items=True)
        clock = Clock(options.item_time)
        for batch in table.batches(
            [*roles, *survey.names], progress=progress, what="Looking at the items"
        ):
            clock.look(batch)
            survey.add(batch)
        self.plan: ContextPlan = survey.decide(progress)
        names, since, parts = self._read(clock, progress)
        self._sort(names, since, parts)

    def _read(
        self, clock: "Clock", progress: ProgressReporter
    ) -> tuple[list[str], np.ndarray, list[Features]]:
        """Names, times and features of all rows of the table, in its order."""
        encode, column = self.plan.encoding(), self.options.column
        names: list[str] = []
        since: list[np.ndarray] = []
        parts: list[Features] = []
        wanted = [column, *self.plan.names, *([clock.column] if clock.column else [])]
        for batch in self.table.batches(wanted, progress=progress, what="Reading the items"):
            own = batch.names(column)
            kept = np.flatnonzero([bool(name) for name in own])
            names += [own[row] for row in kept.tolist()]
            since.append(np.nan_to_num(clock.read(batch)[kept], nan=_ALWAYS))
            parts.append(encode(batch, kept))
        if len(set(names)) < 2:
            raise DataError(f"{self.table.column(column)}: fewer than two items")
        return names, np.concatenate(since), parts

    def _sort(self, names: list[str], since: np.ndarray, parts: list[Features]) -> None:
        """Rows by item, in the order of their first rows, and by time; of equals the last counts."""
        self.codes = {name: code for code, name in enumerate(dict.fromkeys(names))}
        item = np.array([self.codes[name] for name in names], np.int32)
        order = np.lexsort((since, item))
        last = np.append((np.diff(item[order]) != 0) | (np.diff(since[order]) != 0), True)
        order = order[last]
        self.repeated = len(names) - len(order)  # rows that a later one of the same time replaces
        self.features = rows_at(_joined(parts), order)
        self.item, self.since = item[order], since[order]
        self.first = np.searchsorted(self.item, np.arange(len(self.codes) + 1))
        self._moments = np.unique(self.since)
        ranks = np.searchsorted(self._moments, self.since)
        self._keys = self.item.astype(np.int64) * (len(self._moments) + 1) + ranks

    def __len__(self) -> int:
        return len(self.codes)

    def rows(self, items: np.ndarray, times: np.ndarray) -> np.ndarray:
        """The rows of items at some times: the newest before each, or the item's first one."""
        before = np.searchsorted(self._moments, times, side="right")
        found = np.searchsorted(self._keys, items * (len(self._moments) + 1) + before) - 1
        newest: np.ndarray = np.maximum(found, self.first[items])
        return newest

    def catalogue(self) -> Catalogue:
        """All rows, as a data set keeps them."""
        names = np.array([name.encode() for name in self.codes], dtype=bytes)
        several = len(self.item) > len(names)
        since = self.since if self.options.item_time else None
        return Catalogue(self.features, names, self.item if several else None, since)

    def header(self) -> dict[str, Any]:
        """Catalogue, encoder and words, for a `DatasetWriter`."""
        plan = self.plan
        encoder = plan.encoder or Encoder((), tuple(plan.text), len(plan.words))
        return {
            "catalogue": self.catalogue(),
            "item_encoder": encoder,
            "item_vocabulary": plan.words,
        }

    def describe(self) -> str:
        """The catalogue in one line."""
        counts = f"{len(self):,} items"
        if len(self.item) > len(self):
            counts += f" in {len(self.item):,} versions"
        gone = f"; {self.repeated:,} rows are replaced by later ones" if self.repeated else ""
        features = self.plan.describe().replace("contexts", "features")
        return f"catalogue: {counts} of {self.table.label}; {features}{gone}"


class Clock:
    """Reads the time column of a table: dates in any notation, or numbers in seconds."""

    def __init__(self, column: str | None) -> None:
        self.column = column
        self._profile = None if column is None else Profile(column)
        self._reading: ColumnReading | None = None

    def look(self, batch: TableBatch) -> None:
        """Find out how times are written."""
        if self._profile is not None:
            self._profile.add(batch)

    def read(self, batch: TableBatch) -> np.ndarray:
        """Seconds, float64 [rows]; NaN where a cell holds none, or without a column."""
        if self._profile is None:
            return np.full(len(batch), np.nan)
        if self._reading is None:
            self._reading = self._profile.as_time(batch.table)
        found = self._reading.cells(batch)
        assert isinstance(found, np.ndarray)
        return found

    def wrong(self, times: np.ndarray) -> dict[str, np.ndarray]:
        """The rows that have no time though there is a column of times, by the reason."""
        return {} if self.column is None else {"rows_without_time": np.isnan(times)}


class Lists:
    """Makes the list of candidates of every event, and finds the label's place in it.

    Lists stand in the events' column `given`, or are made: all items, or sampled ones.
    """

    def __init__(self, items: ItemTable) -> None:
        self.items, self.popularity = items, np.zeros(len(items), np.int64)
        options = items.options
        self.given, self.separator = options.candidates, options.separator
        self.clock = Clock(options.time)
        self.columns = [name for name in (self.given, options.time) if name is not None]
        many = len(items) > _MOST_LISTED
        if many and self.given is None and options.negatives in (None, "all"):
            raise ConfigError(
                f"negatives: there are {len(items):,} items; give --candidates, or --negatives N"
                " to sample them by popularity"
            )

    def header(self) -> dict[str, Any]:
        """Catalogue, encoder and words, for a `DatasetWriter`."""
        return {**self.items.header(), "timed": self.clock.column is not None}

    def listed(self, rows: Rows, lists: Ragged, times: np.ndarray) -> Rows:
        """The rows with their lists: of each item the version that holds at the event's time."""
        when = np.nan_to_num(times, nan=np.inf)[lists.row_of_entry()]
        shown = self.items.rows(lists.ids.astype(np.int64), when)
        candidates = Ragged(lists.offsets, shown.astype(np.int32))
        timed = self.clock.column is not None
        return replace(rows, candidates=candidates, times=times if timed else None)

    def count(self, names: Sequence[str]) -> None:
        """Count how often items are chosen: their popularity."""
        codes = [self.items.codes[name] for name in names if name in self.items.codes]
        self.popularity += np.bincount(codes, minlength=len(self.items))

    def around(
        self, chosen: np.ndarray, address: tuple[np.ndarray, np.ndarray], times: np.ndarray
    ) -> Ragged:
        """Items for each event, int32, where none are given: all, or sampled ones beside the chosen.

        `chosen` are items, int64 [n]; `address` are the keys of clients and the positions of events
        among their client's. Items that do not exist at an event's time are left out.
        """
        times = np.nan_to_num(times, nan=np.inf)
        there = self.items.since[self.items.first[:-1]]
        negatives = self.items.options.negatives
        if not isinstance(negatives, int):
            alive = (there[None] <= times[:, None]) | (np.arange(len(there)) == chosen[:, None])
            return Ragged(
                np.append(0, np.cumsum(alive.sum(axis=1))), np.nonzero(alive)[1].astype(np.int32)
            )
        sums = np.cumsum(self.popularity + 1.0)
        drawn = np.empty((len(chosen), 0), np.int64)
        wanted, draws = min(negatives, len(there) - 1), 0
        while True:
            more = _SEVERAL_DRAWS * negatives + 8
            places = draws + np.arange(more)
            keys, positions = (part[:, None] for part in address)
            u = uniforms(0, Purpose.DATA, _NEGATIVES, keys, positions, places)
            drawn = np.hstack([drawn, np.searchsorted(sums, u * sums[-1], side="right")])
            draws += more
            usable = (there[drawn] <= times[:, None]) & (drawn != chosen[:, None]) & _first(drawn)
            if (usable.sum(axis=1) >= wanted).all() or draws >= _MOST_DRAWS:
                break
        usable &= np.cumsum(usable, axis=1) <= wanted
        counts = usable.sum(axis=1)
        offsets = np.append(0, np.cumsum(counts + 1))
        ids = np.empty(offsets[-1], np.int32)
        is_chosen = np.zeros(offsets[-1], bool)
        is_chosen[offsets[:-1]] = True
        ids[is_chosen], ids[~is_chosen] = chosen, drawn[usable]
        return Ragged(offsets, ids)

    def shuffled(self, lists: Ragged, address: tuple[np.ndarray, np.ndarray]) -> Ragged:
        """The same lists, each in an order that client, position and items decide."""
        owner = lists.row_of_entry()
        keys, positions = address
        u = uniforms(0, Purpose.DATA, _ORDER, keys[owner], positions[owner], lists.ids)
        return Ragged(lists.offsets, lists.ids[np.lexsort((u, owner))])

    def origin(self) -> str:
        """The origin of the lists, in words."""
        options = self.items.options
        if options.candidates is not None:
            return f"given in {options.candidates}"
        if isinstance(options.negatives, int):
            return f"the item that was picked and {options.negatives} sampled by popularity"
        return "all items" + (" that existed by then" if options.item_time else "")

    def describe(self, done: str) -> tuple[list[tuple[str, str]], str]:
        """Roles of the columns of lists and times, and the catalogue in words."""
        roles = [(self.given, f"the items that could be {done}")] if self.given else []
        roles += [(self.clock.column, "when")] if self.clock.column else []
        return roles, f"\n{self.items.describe()}\ncandidates: {self.origin()}"

    def known(self, names: Sequence[Sequence[str]]) -> tuple[Ragged, int]:
        """Given lists as items, each once; and how many names are unknown."""
        find = self.items.codes.get
        found = [[find(name, -1) for name in dict.fromkeys(row)] for row in names]
        kept = [[code for code in row if code >= 0] for row in found]
        return Ragged.from_rows(kept), sum(map(len, found)) - sum(map(len, kept))


def places(lists: Ragged, chosen: np.ndarray) -> np.ndarray:
    """Where each row's chosen entry stands in its list: int64 [n], -1 where it does not."""
    owner = lists.row_of_entry()
    at = np.flatnonzero(lists.ids == chosen[owner])
    found = np.full(len(lists), -1)
    found[owner[at[::-1]]] = (at - lists.offsets[owner[at]])[::-1]  # the first of several
    return found


def append_items(
    dataset: FederatedDataset,
    out: Path | str,
    table: Any,
    column: str,
    time: str | None = None,
    progress: ProgressReporter = SILENT,
) -> Path:
    """Write a data set again with the rows of a further table: new items, and new versions of known.

    Features are made by the encoder in the data set's header, so that models trained before score
    the new items. Lists of candidates keep the rows that they name; new ones can name any.
    """
    known = dataset.train.catalogue
    if known is None or known.names is None or dataset.header.item_encoder is None:
        raise DataError(
            f"{dataset.header.name}: has no catalogue that was made of a table of items"
        )
    columns = ColumnOptions(like=dataset.path)
    found = ItemTable(
        ItemOptions(table=table, column=column, item_time=time, columns=columns), progress
    )
    names = [known.name(item) for item in range(len(known))]
    codes = {name: code for code, name in enumerate(dict.fromkeys([*names, *found.codes]))}
    own = np.array([codes[name] for name in found.codes], np.int32)[found.item]
    before = known.item_of(np.arange(len(known.features))).astype(np.int32)
    since = known.since if known.since is not None else np.full(len(before), _ALWAYS)
    catalogue = Catalogue(
        _joined([known.features, found.features]),
        np.array([name.encode() for name in codes], dtype=bytes),
        np.append(before, own),
        np.append(since, found.since),
    )
    return rewrite(dataset, out, catalogue=catalogue, source={"appended_items": len(own)})


def _joined(parts: Sequence[Features]) -> Features:
    """Features of several batches as one, dense or sparse."""
    if not isinstance(parts[0], Ragged):
        return np.concatenate([np.asarray(part) for part in parts])
    sparse = [part for part in parts if isinstance(part, Ragged)]
    lengths = np.concatenate([np.diff(part.offsets) for part in sparse])
    values = np.concatenate([np.asarray(part.values) for part in sparse])
    ids = np.concatenate([part.ids for part in sparse])
    return Ragged(np.append(0, np.cumsum(lengths)), ids, values)


def _first(drawn: np.ndarray) -> np.ndarray:
    """Whether an entry is the first of its value in its row: bool, as `drawn`."""
    order = np.argsort(drawn, axis=1, kind="stable")
    ranked = np.take_along_axis(drawn, order, axis=1)
    new = np.hstack([np.ones((len(drawn), 1), bool), ranked[:, 1:] != ranked[:, :-1]])
    found = np.empty_like(new)
    np.put_along_axis(found, order, new, axis=1)
    return found
