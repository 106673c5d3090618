"""Kinds of the columns of a table: decided from its cells in one pass, unless an option says it.

A column is tried as flags, dates in three orders, numbers in three notations, categories and text;
the first that nearly all cells fit wins. Keeps counts and moments, never cells. Knows nothing of
clients, labels or data sets.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedbandit.core.errors import ConfigError, DataError, explaining
from fedbandit.data.encoder import Cells, Column
from fedbandit.data.importers import cells
from fedbandit.data.importers.columns import Table, TableBatch
from fedbandit.data.text import FrequencyCounter, in_natural_order

_MOST = (
    0.95  # of a column's cells: this share must be numbers or dates; the others count as missing
)
_MOST_DISTINCT = 20_000
_TRIES = 1000  # cells after which a column that holds few numbers is not read as numbers any more
_SKEWED = 3.0  # skewness from which numbers that are never negative are scaled by their logarithm
_FEW = 20  # sentences that are the values of a category if each occurs often; rows that say little about a column
_BUCKETS = (64, 1024)
_SEASONS = 120 * 86_400  # seconds that dates must span before the time of the year says anything
_WRITTEN = {
    "point": "1234.5", "comma": "1.234,5",
    "ymd": "year-month-day", "mdy": "month/day/year", "dmy": "day.month.year",
}  # fmt: skip
_ID = re.compile(r"(^|[^a-zA-Z])(id|key|no|nr|number|code|index)$|[a-z]I[dD]$|uuid|guid", re.I)
_MANY_ROWS = 200  # in which whole numbers never repeat: ids, whatever they are called
KINDS = ("text", "number", "log", "raw", "category", "hashed", "date", "flag", "ignore")


@dataclass(frozen=True)
class ColumnOverride:
    """An option's word about a column, in place of what would be found: `COLUMN=KIND[:DETAIL]`.

    KIND is one of `KINDS`; DETAIL is a number of buckets (`hashed:256`), an order of dates
    (`date:dmy`) or a notation of numbers (`number:comma`).
    """

    kind: str
    buckets: int | None = None
    written: str | None = None

    @classmethod
    def parse(cls, given: str) -> "ColumnOverride":
        """From KIND or KIND:DETAIL; `ConfigError` says what is possible."""
        kind, _, detail = given.partition(":")
        if kind not in KINDS:
            raise ConfigError(f"as: {kind!r} is not a kind of column; one of {', '.join(KINDS)}")
        if not detail:
            return cls(kind)
        if kind == "hashed" and detail.isdigit() and 1 <= int(detail) <= 2**20:
            return cls(kind, buckets=int(detail))
        possible = {
            "date": ("ymd", "mdy", "dmy"),
            **dict.fromkeys(("number", "log", "raw"), ("point", "comma")),
        }
        if detail in possible.get(kind, ()):
            return cls(kind, written=_WRITTEN[detail])
        raise ConfigError(
            f"as: {given!r}: possible are hashed:1 to hashed:{2**20}, date:dmy (ymd, mdy), number:comma"
        )


@dataclass(frozen=True)
class ColumnReading:
    """The reading of a column of this very file, and the column that it becomes.

    `column` is the part that other files share: kind, scaling, categories. `written` is of this
    file alone. Cells that are no number or date, though most are, count as missing and are
    reported.
    """

    name: str
    kind: str  # text, ignore, or the kind of the column
    column: Column | None = None
    written: str = ""  # how its numbers or dates are written
    note: str = ""  # why it is left out
    missing: int = 0
    wrong: int = 0  # cells that are no number or date; they count as missing

    def cells(self, batch: TableBatch) -> Cells:
        """The column's cells in a batch, as its encoder wants them."""
        array = batch.array(self.name)
        with explaining(batch.table.column(self.name), DataError):
            if self.kind == "number":
                return cells.numbers(array, self.written)
            if self.kind == "date":
                return cells.dates(array, self.written)
            if self.kind == "flag":
                return cells.flags(array)
        return batch.names(self.name)


@dataclass
class _Moments:
    """Mean, spread and skewness of numbers that come in blocks.

    Blocks are merged by the formulas of Chan et al. and Pébay for central moments, which lose no
    digits where sums of powers would.
    """

    count: int = 0
    mean: float = 0.0
    second: float = 0.0
    third: float = 0.0
    low: float = np.inf
    high: float = -np.inf

    def add(self, block: np.ndarray) -> None:
        """Merge a block of numbers, float64 [n]."""
        if not len(block):
            return
        a, b, mean = self.count, len(block), float(block.mean())
        apart = block - mean
        second, third = float((apart**2).sum()), float((apart**3).sum())
        delta, n = mean - self.mean, a + b
        self.third += (
            third
            + delta**3 * a * b * (a - b) / n**2
            + 3 * delta * (a * second - b * self.second) / n
        )
        self.second += second + delta**2 * a * b / n
        self.mean += delta * b / n
        self.count = n
        self.low, self.high = min(self.low, float(block.min())), max(self.high, float(block.max()))

    @property
    def deviation(self) -> float:
        """The standard deviation over all numbers so far; 0 without any."""
        return sqrt(self.second / self.count) if self.count else 0.0

    @property
    def skewness(self) -> float:
        """The third standardised moment; 0 where all numbers are the same."""
        return self.third / self.count / self.deviation**3 if self.deviation > 0 else 0.0


class Profile:
    """Counts and moments of one column so far; `decide` says what it is.

    At most 20,000 distinct values are counted, and a notation that fits few of the first thousand
    cells is not tried any more: a column costs the same whether the file has a thousand rows or a
    billion.
    """

    def __init__(self, name: str, wish: ColumnOverride | None = None) -> None:
        self.name, self.wish = name, wish
        self.rows = self._before = self.named = self.present = self._words = self._flags = 0
        self._type = ""
        self._distinct = FrequencyCounter(_MOST_DISTINCT)
        self._numbers = {written: _Moments() for written in cells.NUMBERS}
        self._logs = {written: _Moments() for written in cells.NUMBERS}
        self._dates = {written: _Moments() for written in cells.DATES}
        self._clock = dict.fromkeys(cells.DATES, False)
        self._slashes = self._counts_rows = False
        self._whole = True  # numbers so far
        self._last: float | None = None

    def add(self, batch: TableBatch, rows: np.ndarray | None = None) -> None:
        """Look at the cells of a batch, or of some of its rows: bool [rows]."""
        array = batch.array(self.name)
        if rows is not None:
            array = array.filter(pa.array(rows))
        if not len(array):
            return
        self.rows += len(array)
        self.present += int(cells.present(array, cells.NO_VALUE).sum())
        named = cells.present(array, cells.MISSING)
        self._before = self.named
        self.named += int(named.sum())
        array = array.filter(pa.array(named))
        if not len(array):
            return
        kind = array.type
        self._type = "list" if pa.types.is_nested(kind) else str(kind)
        if pa.types.is_string(kind):
            self._add_strings(array)
        elif pa.types.is_timestamp(kind):
            self._add_dates("year-month-day", cells.dates(array))
        elif self._type != "list":
            found = cells.numbers(array)
            self._add_numbers("1234.5", found)
            self._flags += int(np.isin(found, (0, 1)).sum())
            values, counts = np.unique(found[np.isfinite(found)], return_counts=True)
            whole = [str(int(one)) if one.is_integer() else repr(one) for one in values.tolist()]
            self._distinct.add(dict(zip(whole, counts.tolist(), strict=True)))

    def _add_strings(self, array: Any) -> None:
        """Count words, flags, and what each notation of numbers and dates can read."""
        trimmed = pc.utf8_trim_whitespace(array)
        found = pc.value_counts(trimmed)
        values, counts = found.field("values").to_pylist(), found.field("counts").to_pylist()
        self._distinct.add(dict(zip(values, counts, strict=True)))
        self._words += int(
            pc.sum(pc.add(pc.count_substring_regex(trimmed, r"\s+"), 1)).as_py() or 0
        )
        self._flags += int(np.isfinite(cells.flags(trimmed)).sum())
        for written, numbers in self._numbers.items():
            if self._hopeful(numbers.count, "number", "log", "raw"):
                self._add_numbers(written, cells.numbers(trimmed, written))
        for written in self._dates:
            if self._hopeful(self._dates[written].count, "date"):
                self._add_dates(written, cells.dates(trimmed, written))
        self._slashes |= bool(pc.any(pc.match_substring(trimmed, "/")).as_py())

    def _hopeful(self, found: int, *kinds: str) -> bool:
        """Whether a notation is still tried: an option asks for it, or it fits half of the
        cells.
        """
        wished = self.wish is not None and self.wish.kind in kinds
        return wished or self._before < _TRIES or found * 2 >= self._before

    def _add_dates(self, written: str, seconds: np.ndarray) -> None:
        """Merge seconds of one notation, and note whether there is a time of day."""
        seconds = seconds[~np.isnan(seconds)]
        self._dates[written].add(seconds)
        self._clock[written] |= bool((seconds % 86_400 != 0).any())

    def _add_numbers(self, written: str, found: np.ndarray) -> None:
        """Merge numbers of one notation, and their logarithms; NaN is left out."""
        known = found[~np.isnan(found)]
        self._numbers[written].add(known)
        self._logs[written].add(np.log1p(np.maximum(known, 0.0)))
        if written == "1234.5":
            self._follow(found)

    def _follow(self, found: np.ndarray) -> None:
        """Whether the column counts rows, as an exported index does, or holds whole numbers."""
        known = found[~np.isnan(found)]
        self._whole = self._whole and bool((known == np.floor(known)).all())
        before = found[:1] - 1 if self._last is None else np.array([self._last])
        self._counts_rows = bool((np.diff(np.concatenate([before, found])) == 1).all()) and (
            self._last is None or self._counts_rows
        )
        self._last = float(found[-1])

    def decide(self, *, categories: int, scale: str) -> ColumnReading:
        """The reading of the column, by its cells or by the override.

        Values of a category beyond `categories` are hashed; `scale` is `standard` (mean 0,
        deviation 1, and the logarithm of numbers that are very skewed) or `none`. `DataError` where
        an override asks for something that most cells are not.
        """
        kind = self.wish.kind if self.wish is not None else self._kind(categories)
        if kind.startswith("ignore"):
            return ColumnReading(self.name, "ignore", note=kind.partition(":")[2] or "as asked")
        if self._type == "list" or not self.present:
            what = "holds lists" if self._type == "list" else "is empty"
            raise DataError(f"{what}, and cannot be read as {kind}")
        if kind == "text":
            return ColumnReading(self.name, "text", missing=self.rows - self.named)
        if kind in ("number", "log", "raw"):
            return self._number(kind, scale)
        if kind == "date":
            return self._date()
        if kind == "flag":
            wrong = self.present - self._flags
            if not self._flags:
                raise DataError("holds no true or false, yes or no, 1 or 0")
            return self._read("flag", wrong)
        return self._category(kind, categories)

    def decide_flags(self) -> ColumnReading | None:
        """The column as true and false, if that is what all its cells are."""
        return self._read("flag", 0) if self._flags == self.present > 0 else None

    def as_time(self, table: Table) -> ColumnReading:
        """The column as times: dates, or numbers in seconds."""
        dates = max(one.count for one in self._dates.values())
        numbers = max(one.count for one in self._numbers.values())
        with explaining(f"{table.column(self.name)}: no times", DataError):
            return self._date() if dates >= numbers else self._number("raw", "none")

    def _kind(self, categories: int) -> str:
        """The kind that the cells speak for; `ignore:` is followed by the reason."""
        present, distinct = self.present, self._distinct.distinct
        if not present or self._type == "list":
            return "ignore:holds lists" if self._type == "list" else "ignore:is empty"
        if self._type in ("bool",) or (
            self._flags == present and distinct <= 2 and self.named == present
        ):
            return "flag" if distinct > 1 or self._type == "bool" else "ignore:always the same"
        if max(one.count for one in self._dates.values()) >= _MOST * present:
            return "date"
        if distinct == 1 and self.named == self.rows:
            return "ignore:always the same"
        if max(one.count for one in self._numbers.values()) >= _MOST * present:
            if self._counts_rows and self.named == self.rows > _FEW:
                return "ignore:counts the rows"
            unique = self.named > _FEW and distinct >= min(self.named, _MOST_DISTINCT)
            called = _ID.search(self.name) is not None or _MANY_ROWS < self.named <= _MOST_DISTINCT
            return (
                "ignore:a number of its own in each row"
                if self._whole and unique and called
                else "number"
            )
        words = self._words / self.named
        repeated = distinct <= min(_FEW, self.named / 5)  # sentences to choose from, not to write
        if (words >= 2.5 and not repeated) or (words >= 1.5 and distinct > categories):
            return "text"
        if distinct > 0.9 * self.named and self.named > _FEW:
            return "ignore:a different value in nearly every row"
        return "category" if distinct <= categories else "hashed"

    def _number(self, kind: str, scale: str) -> ColumnReading:
        """The column as numbers: their notation, and whether and how they are scaled."""
        written, numbers = self._best(self._numbers)
        self._enough(numbers.count, "numbers")
        scaled = kind != "raw" and (scale == "standard" or kind == "log")
        log = kind == "log" or (
            kind == "number" and numbers.low >= 0 and numbers.skewness > _SKEWED
        )
        used = self._logs[written] if log and scaled else numbers
        if scaled and used.deviation < 1e-12 * max(abs(used.mean), 1e-18):
            if self.wish is None:
                gone = "" if self.present == self.rows else " or missing"
                return ColumnReading(self.name, "ignore", note=f"always the same{gone}")
            log = scaled = False  # nothing to scale by
        mean, deviation = (used.mean, used.deviation) if scaled else (0.0, 1.0)
        wrong = self.present - numbers.count
        return self._read(
            "number",
            wrong,
            written,
            log=log and scaled,
            scaled=scaled,
            mean=mean,
            deviation=deviation,
        )

    def _date(self) -> ColumnReading:
        """The column as dates: their order, and the parts of a date that can tell something."""
        written, found = self._best(self._dates)
        self._enough(found.count, "dates")
        parts = ["weekday", *(["hour"] if self._clock[written] else [])]
        parts += ["year"] if found.high - found.low >= _SEASONS else []
        return self._read("date", self.present - found.count, written, parts=tuple(parts))

    def _enough(self, found: int, what: str) -> None:
        """Refuse a column that an option takes for something that most of its cells are not."""
        if found * 2 < self.present:
            shown = next((name for name in self._distinct.top() if name), "")[:40]
            raise DataError(
                f"{found:,} of {self.present:,} cells are {what}; the most frequent is {shown!r}"
            )

    def _best(self, ways: Mapping[str, _Moments]) -> tuple[str, _Moments]:
        """The notation that the override names, or that fits most cells; of equals the first.

        03/04/2024 alone is ambiguous; with slashes the month comes first, as where most such files
        come from.
        """
        order = list(ways)
        if ways is self._dates and not self._slashes:
            order[1:] = reversed(order[1:])
        best = max(order, key=lambda way: ways[way].count)
        written = best if self.wish is None else self.wish.written or best
        return written, ways[written]

    def _category(self, kind: str, categories: int) -> ColumnReading:
        """The column as categories, or hashed where there are too many for a feature each."""
        missing = self.rows - self.named
        if kind == "hashed":
            least, most = _BUCKETS
            enough = 1 << max(self._distinct.distinct - 1, 1).bit_length()
            buckets = (self.wish.buckets if self.wish else None) or min(max(enough, least), most)
            how: dict[str, Any] = {"kind": "hashed", "buckets": buckets}
        else:
            values = in_natural_order(self._distinct.top(categories))
            how = {"kind": "category", "values": tuple(values)}
        column = Column(name=self.name, missing=missing > 0, **how)
        return ColumnReading(self.name, column.kind, column, missing=missing)

    def _read(self, kind: Any, wrong: int, written: str = "", **how: Any) -> ColumnReading:
        """A reading whose wrong cells count as missing."""
        missing = self.rows - self.present
        column = Column(name=self.name, kind=kind, missing=missing + wrong > 0, **how)
        return ColumnReading(self.name, kind, column, written, missing=missing, wrong=wrong)

    def read_as(self, column: Column) -> ColumnReading:
        """The reading of this file's column for a column that another table decided."""
        if column.kind in ("number", "date"):
            written, best = self._best(self._numbers if column.kind == "number" else self._dates)
            found = best.count
        else:
            written, found = "", self._flags if column.kind == "flag" else self.named
        there = self.named if column.kind in ("category", "hashed") else self.present
        return ColumnReading(
            self.name, column.kind, column, written, missing=self.rows - there, wrong=there - found
        )
