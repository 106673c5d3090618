"""From the columns of a table to contexts: which columns, what each becomes, and the words of text.

Tables with labels and logs share it. One pass over the table looks at the cells and decides
(`Survey`); where text was found on the way, a second one counts its words. The decision is a
`ContextPlan`, which encodes batches here and leaves an `Encoder` for devices.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbandit.core.errors import ConfigError, DataError, explaining, refuse
from fedbandit.core.progress import ProgressReporter
from fedbandit.core.ragged import Ragged
from fedbandit.data import open_dataset
from fedbandit.data.dataset import FederatedDataset
from fedbandit.data.encoder import Encoder
from fedbandit.data.importers import check_counts
from fedbandit.data.importers.columns import Table, TableBatch
from fedbandit.data.importers.profile import ColumnOverride, ColumnReading, Profile
from fedbandit.data.text import BagOfWords, FrequencyCounter, tokenise

_MOST_FEATURES = 10_000_000
Rows = Callable[[TableBatch], np.ndarray | None]
"""The rows of a batch that count: bool [rows], or None for all of them."""


@dataclass(frozen=True, kw_only=True)
class ColumnOptions:
    """Which columns decide, and what is made of them; the names are those of the command line's
    options.

    Without `text` and `features` every column that has no other role is looked at. With `like`
    another data set decides: its words, columns, scaling and actions are used, so that a model
    trained on one can be evaluated on the other.
    """

    text: Sequence[str] = ()
    features: Sequence[str] = ()  # numbers; alone they become a dense array
    treat: Sequence[str] = ()  # COLUMN=KIND: what is said in place of what would be found
    vocabulary: int = 10_000
    categories: int = 100  # the most values of a category with a feature for each; more are hashed
    scale: str = "standard"  # or none
    dense: bool | None = None
    missing: Sequence[str] = ()  # cells that hold nothing, beside the usual ones
    encoding: str | None = None
    delimiter: str | None = None
    header: bool | None = None  # whether a CSV file's first row has names; None: if it looks so
    like: Path | str | None = None  # a data set whose words, columns, scaling and actions are used

    def __post_init__(self) -> None:
        for name in ("text", "features", "treat", "missing"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
        check_counts(actions=None, vocabulary=self.vocabulary)
        decided = "like: the other data set decides the columns; leave out features and as"
        refuse(
            (
                not 2 <= self.categories <= 10_000,
                f"categories: must be from 2 to 10,000, got {self.categories}",
            ),
            (
                self.scale not in ("standard", "none"),
                f"scale: must be standard or none, got {self.scale!r}",
            ),
            (self.dense and self.text, "dense: words are never dense; leave out text or dense"),
            (self.like is not None and (self.features or self.treat), decided),
        )
        for one in self.treat:
            name, _, kind = one.rpartition("=")
            if not name:
                raise ConfigError(f"as: expected COLUMN=KIND, got {one!r}")
            ColumnOverride.parse(kind)

    def table(self, source: Any) -> Table:
        """The file or frame, opened as the options say."""
        return Table(
            source,
            encoding=self.encoding,
            delimiter=self.delimiter,
            missing=self.missing,
            header=self.header,
        )


@dataclass(frozen=True)
class ContextPlan:
    """A decision about all columns: how each is read here, and how it is encoded here and
    everywhere.

    `readings` knows this file (how numbers and dates are written in it); `encoder` knows none, and
    is stored in the data set's header and in model files. Text alone needs no encoder.
    """

    readings: tuple[ColumnReading, ...]
    words: tuple[str, ...]
    encoder: Encoder | None  # None: text alone

    @property
    def kind(self) -> Literal["dense", "sparse"]:
        """Whether contexts are dense arrays or sparse rows."""
        dense = self.constant or (self.encoder is not None and self.encoder.dense)
        return "dense" if dense else "sparse"

    @property
    def constant(self) -> bool:
        """Whether nothing is known of user and moment; a context is then the number 1."""
        return self.encoder is None and not self.words

    @property
    def width(self) -> int:
        """The number of features of a context."""
        return max(len(self.words), 1) if self.encoder is None else self.encoder.width

    @property
    def text(self) -> list[str]:
        """The columns that are text."""
        return [reading.name for reading in self.readings if reading.kind == "text"]

    @property
    def names(self) -> list[str]:
        """The columns that are used."""
        return [reading.name for reading in self.readings if reading.kind != "ignore"]

    def header(self) -> dict[str, Any]:
        """Kind, shape, vocabulary and encoder, for a `DatasetWriter`."""
        return {
            "kind": self.kind,
            "shape": (self.width,),
            "vocabulary": self.words if self.words else None,
            "encoder": self.encoder,
        }

    def encoding(self) -> Callable[[TableBatch, np.ndarray], np.ndarray | Ragged]:
        """A function that makes the contexts of some rows of a batch: float32 [n, width] or sparse
        rows.

        Words are normalised to length 1 row by row; other columns are weighed by the encoder.
        """
        bag = BagOfWords(self.words)
        text, encoder = self.text, self.encoder

        def contexts(batch: TableBatch, rows: np.ndarray) -> np.ndarray | Ragged:
            """Contexts of some rows of a batch."""
            if self.constant:
                return np.ones((len(rows), 1), np.float32)
            bags = None
            if text:
                sentences = batch.joined(text)
                bags = bag.encode(tokenise(sentences[row]) for row in rows.tolist())
            if encoder is None:
                assert bags is not None
                return bags
            cells = {}
            for reading in self.readings:
                if reading.column is not None:
                    found = reading.cells(batch)
                    chosen = (
                        found[rows]
                        if isinstance(found, np.ndarray)
                        else [found[row] for row in rows.tolist()]
                    )
                    cells[reading.name] = chosen
            return encoder.matrix(cells) if encoder.dense else encoder.sparse(bags, cells)

        return contexts

    def rows(self) -> list[tuple[str, str, str, str]]:
        """For each column its name, what it becomes, its number of features, and what is missing.

        The numbers of a list are one line, by their first.
        """
        lines = []
        for reading in self.readings:
            if re.search(r"\[[1-9]\d*\]$", reading.name):
                continue
            if reading.kind == "ignore":
                lines.append((reading.name, f"left out: {reading.note}", "", ""))
                continue
            width, becomes, gone = "", f"text: {len(self.words):,} words", []
            if reading.column is not None:
                width, becomes = f"{reading.column.width:,}", reading.column.describe()
            elif reading.name == self.text[0]:
                width = f"{len(self.words):,}"
            else:
                becomes = f"text: counted with {self.text[0]}"
            if reading.written not in ("", "1234.5", "year-month-day"):
                becomes += f", written as {reading.written}"
            if reading.missing:
                gone.append(f"{reading.missing:,} missing")
            if reading.wrong:
                gone.append(f"{reading.wrong:,} not a {reading.kind}")
            lines.append((reading.name, becomes, width, ", ".join(gone)))
        return lines

    def describe(self) -> str:
        """The contexts in one line."""
        if self.constant:
            return "contexts: a constant, since no column says anything of user and moment"
        if self.kind == "dense":
            return f"contexts: {self.width:,} dense features"
        if self.encoder is None:
            return f"contexts: {self.width:,} words"
        hybrid = (
            f"{len(self.words):,} words and {self.width - len(self.words):,} others"
            if self.words
            else "sparse"
        )
        return f"contexts: {self.width:,} features, {hybrid}"


class Survey:
    """Looks at the columns in one pass over a table (`add`, batch by batch), and then decides.

    Only counts and moments are kept, never cells. `names` are the columns that it has to see.
    """

    def __init__(
        self,
        table: Table,
        options: ColumnOptions,
        roles: Iterable[str],
        of_items: bool = False,
        may_be_empty: bool = False,
    ) -> None:
        self._table, self._options = table, options
        self._of_items, self._may_be_empty = of_items, may_be_empty
        self.like = None if options.like is None else open_dataset(options.like)
        self._wishes = self._read_wishes(roles)
        if self.like is not None:
            self._check_like(self.like)
        kinds = {name: wish.kind if wish else "" for name, wish in self._wishes.items()}
        known = [name for name, kind in kinds.items() if kind == "text"]
        self._profiles = {
            name: Profile(name, wish) for name, wish in self._wishes.items() if name not in known
        }
        # Words are counted in the first pass where options say what is text.
        early = self.like is None and (len(known) == len(kinds) or options.text)
        self._text = known if early else []
        self._words = FrequencyCounter()
        self._seen = [name for name in self._profiles if not kinds[name].startswith("ignore")]
        self.names = [*self._seen, *self._text]

    @property
    def _encoder(self) -> Encoder | None:
        """The encoder of the data set that decides, if one does."""
        if self.like is None:
            return None
        return self.like.header.item_encoder if self._of_items else self.like.header.encoder

    def add(self, batch: TableBatch, rows: np.ndarray | None = None) -> None:
        """Look at a batch, or at some of its rows: bool [rows]."""
        for name in self._seen:
            self._profiles[name].add(batch, rows)
        if self._text:
            _count(self._words, batch.joined(self._text), rows)

    def decide(
        self, progress: ProgressReporter, extra: Sequence[str] = (), rows: Rows = lambda batch: None
    ) -> ContextPlan:
        """The plan for all columns; reads the table again where it has found text.

        `extra` are further columns that `rows` needs to say which rows of a batch count: bool
        [rows], None for all. `DataError` where no column is left to decide from, with the reason
        for each.
        """
        if self.like is not None:
            return self._decided_by(self.like)
        readings = tuple(self._reading(name) for name in self._wishes)
        text = [reading.name for reading in readings if reading.kind == "text"]
        if text and text != self._text:
            self._words = FrequencyCounter()
            for batch in self._table.batches(
                [*text, *extra], progress=progress, what="Counting words"
            ):
                _count(self._words, batch.joined(text), rows(batch))
        words = tuple(self._words.top(self._options.vocabulary)) if text else ()
        columns = tuple(reading.column for reading in readings if reading.column is not None)
        if not columns and not words and not self._may_be_empty:
            reasons = "; ".join(f"{one.name}: {one.note or 'no words'}" for one in readings[:5])
            raise DataError(
                f"{self._table.label}: no column is left to decide from{f' ({reasons})' if reasons else ''}"
            )
        encoder = None
        if columns:
            dense = self._options.dense
            if dense is None:
                dense = bool(self._options.features) and all(
                    one.kind in ("number", "flag") for one in columns
                )
            if dense and words:
                raise ConfigError(
                    f"dense: words are never dense, and {text[0]} is text; --as '{text[0]}=ignore'"
                )
            encoder = Encoder(
                columns, tuple(text) if words else (), len(words), dense and not words
            )
            if encoder.width > _MOST_FEATURES:
                raise DataError(
                    f"{self._table.label}: {encoder.width:,} features; {_MOST_FEATURES:,} are the most"
                )
        return ContextPlan(readings, words, encoder)

    def _reading(self, name: str) -> ColumnReading:
        """The reading of one column; an error names the column and its place."""
        if name not in self._profiles:
            return ColumnReading(name, "text")
        with explaining(self._table.column(name), DataError):
            return self._profiles[name].decide(
                categories=self._options.categories, scale=self._options.scale
            )

    def _read_wishes(self, roles: Iterable[str]) -> dict[str, ColumnOverride | None]:
        """The columns that decide, in the table's order, and what the options say about each."""
        table, options, taken = self._table, self._options, set(roles)
        wishes: dict[str, ColumnOverride | None] = {}
        for name in table.matching(options.features):
            wishes[name] = ColumnOverride("number")
        text = list(options.text)
        if self.like is not None and not text:
            encoder = self._encoder
            text = (
                list(encoder.text) if encoder else list(self.like.header.source.get("columns", []))
            )
        table.require(text)
        wishes |= {name: ColumnOverride("text") for name in text}
        if self.like is not None and self._encoder is not None:
            names = [column.name for column in self._encoder.columns]
            table.require(names)
            return {**wishes, **dict.fromkeys(names)}
        for one in options.treat:
            pattern, _, kind = one.rpartition("=")
            wishes |= {name: ColumnOverride.parse(kind) for name in table.matching([pattern])}
        if not options.text and not options.features and self.like is None:
            index = ColumnOverride("ignore:the index of a pandas frame")
            wishes |= {
                name: index if name in table.index else None
                for name in table.names
                if name not in wishes and name not in taken
            }
        return {name: wishes[name] for name in table.names if name in wishes}

    def _check_like(self, like: FederatedDataset) -> None:
        """Refuse another data set that cannot decide about this table's columns."""
        encoder = self._encoder
        text = () if encoder is None else encoder.text
        other = encoder and self._options.text and tuple(self._options.text) != text
        neither = encoder is None and (like.header.kind != "sparse" or not self._wishes)
        name = f"like: {like.header.name}"
        refuse(
            (other, f"{name} has its text in {', '.join(text) or 'no column'}"),
            (neither, f"{name} has no columns of a table, nor text; name what is text"),
        )

    def _decided_by(self, like: FederatedDataset) -> ContextPlan:
        """The plan that another data set's encoder and words make for this table."""
        encoder = self._encoder
        text = encoder.text if encoder is not None else tuple(self._wishes)
        readings = [ColumnReading(name, "text") for name in text]
        for column in encoder.columns if encoder is not None else ():
            readings.append(self._profiles[column.name].read_as(column))
        known = like.item_vocabulary if self._of_items else like.vocabulary
        words = tuple(known()) if text else ()
        order = {name: place for place, name in enumerate(self._table.names)}
        return ContextPlan(tuple(sorted(readings, key=lambda one: order[one.name])), words, encoder)


def _count(words: FrequencyCounter, texts: list[str], rows: np.ndarray | None) -> None:
    """Count the words of some texts, or of those rows that count: bool [rows]."""
    for row in range(len(texts)) if rows is None else np.flatnonzero(rows).tolist():
        words.add(tokenise(texts[row]))


def summary(
    table: Table, roles: Sequence[tuple[str, str]], plan: ContextPlan, facts: Sequence[str]
) -> str:
    """A table for people: for each column what it becomes, its number of features, and what is
    missing.

    `roles` has the columns that are no part of a context, such as the client and the labels;
    `facts` are further lines below.
    """
    rows = [(name, what, "", "") for name, what in roles] + plan.rows()
    order = {name: place for place, name in enumerate(table.names)}
    rows.sort(key=lambda row: order.get(row[0], len(order)))
    head = ("column", "becomes", "features", "missing")
    widths = [min(max(len(row[place]) for row in [head, *rows]), 72) for place in range(4)]
    lines = [f"{table.label}: {len(table.names)} columns; {table.source.kind}"]
    for name, what, features, missing in [head, *rows]:
        line = f"  {name:<{widths[0]}}  {what:<{widths[1]}}  {features:>{widths[2]}}  {missing}"
        lines.append(line.rstrip())
    return "\n".join([*lines, plan.describe(), *facts])
