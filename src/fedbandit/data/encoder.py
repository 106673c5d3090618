"""From a row of a table to a context: words first, then the features of each column.

What importers and devices share. Numpy alone, since a device has no more. Knows nothing of files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date, datetime
from functools import cached_property
from hashlib import blake2b
from math import sqrt
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedbandit.core.files import read_checked
from fedbandit.core.parts import nearest
from fedbandit.core.ragged import Ragged

Kind = Literal["number", "category", "hashed", "date", "flag"]
Cells = np.ndarray | Sequence[str]
"""A column's cells: float64 [n] with NaN where missing (dates in seconds), or names with "" where missing."""
MISSING = frozenset(
    {"", "na", "n/a", "#n/a", "nan", "null", "<na>", "nat"}
)  # names that say that there is none
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_PARTS = {"weekday": 7, "hour": 2, "year": 2}  # of a date, with their numbers of features
_FARTHEST = 5.0  # standard deviations; what lies beyond counts as this, so that one cell cannot throw training
LARGEST = 1e30  # of a number in a cell: far beyond any measurement, far within float32
_DAY, _YEAR = 86_400.0, 31_556_952.0  # seconds
_MOST_FEATURES = 2**31 - 1
_Count = Annotated[int, Field(ge=0, le=_MOST_FEATURES)]


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column that is not text: what it holds, and the features that it becomes.

    `ValueError` for one that no table could have.

    Examples:
        >>> Column(name="device", kind="category", values=("phone", "tv")).features()
        ['device=phone', 'device=tv']
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    name: str
    kind: Kind
    missing: bool = False  # one more feature says that the value is missing
    log: bool = False  # numbers: log(1 + x) comes before scaling
    scaled: bool = True  # numbers: (x - mean) / deviation, at most 5 either way
    mean: Annotated[float, Field(ge=-LARGEST, le=LARGEST)] = 0.0
    deviation: Annotated[float, Field(ge=1 / LARGEST, le=LARGEST)] = 1.0
    values: tuple[str, ...] = ()  # categories: a feature for each; others are none of them
    buckets: _Count = 0  # hashed: a value's feature is its hash modulo this
    parts: tuple[Literal["weekday", "hour", "year"], ...] = ()  # dates

    def __post_init__(self) -> None:
        owners = {"values": "category", "buckets": "hashed", "parts": "date"}
        for name, kind in owners.items():
            if bool(getattr(self, name)) != (self.kind == kind):
                raise ValueError(f"{name} of a {self.kind}: they go with {kind}, and only with it")
        if len({*self.values, *self.parts}) != len(self.values) + len(self.parts):
            raise ValueError("values or parts are named twice")

    @property
    def width(self) -> int:
        """The number of its features."""
        own = {"number": 1, "flag": 1, "category": len(self.values), "hashed": self.buckets}
        return own.get(self.kind, sum(_PARTS[part] for part in self.parts)) + self.missing

    def features(self) -> list[str]:
        """The names of its features."""
        names = [self.name] if self.kind in ("number", "flag") else []
        names += [f"{self.name}={value}" for value in self.values]
        names += [f"{self.name}#{bucket}" for bucket in range(self.buckets)]
        for part in self.parts:
            own = list(WEEKDAYS) if part == "weekday" else [f"{part} sin", f"{part} cos"]
            names += [f"{self.name}: {one}" for one in own]
        return [*names, f"{self.name} is missing"] if self.missing else names

    def encode(self, cells: Cells) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Its features that are not zero: rows int64 [entries], positions int64 [entries], values
        float64 [entries].
        """
        missing = (
            np.isnan(cells)
            if isinstance(cells, np.ndarray)
            else np.array([not cell for cell in cells], bool)
        )
        there = np.flatnonzero(~missing)
        if isinstance(cells, np.ndarray):
            parts = (
                self._dates(there, cells[there])
                if self.kind == "date"
                else [self._numbers(there, cells[there])]
            )
        else:
            parts = [self._names(there, [cells[row] for row in there.tolist()])]
        if self.missing:
            rows = np.flatnonzero(missing)
            parts.append((rows, np.full(len(rows), self.width - 1), np.ones(len(rows))))
        rows, positions, values = (np.concatenate(each) for each in zip(*parts, strict=True))
        kept = values != 0
        return rows[kept], positions[kept], values[kept]

    def _numbers(
        self, rows: np.ndarray, found: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Numbers scaled as the column says, or flags as 1 and -1."""
        first = np.zeros(len(rows), np.int64)
        if self.kind == "flag":
            return rows, first, np.where(found != 0, 1.0, -1.0)
        if self.log:
            found = np.log1p(np.maximum(found, 0.0))
        if self.scaled:
            found = np.clip((found - self.mean) / self.deviation, -_FARTHEST, _FARTHEST)
        return rows, first, found

    def _names(
        self, rows: np.ndarray, found: list[str]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Names as the features of their values, or of their hashes; unknown ones have none."""
        places = (
            {name: _bucket(name, self.buckets) for name in set(found)}
            if self.kind == "hashed"
            else self._places
        )
        positions = np.array([places.get(name, -1) for name in found], np.int64)
        known = positions >= 0
        return rows[known], positions[known], np.ones(int(known.sum()))

    @cached_property
    def _places(self) -> dict[str, int]:
        """The feature of each known value."""
        return {name: place for place, name in enumerate(self.values)}

    def _dates(
        self, rows: np.ndarray, seconds: np.ndarray
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Each part on its circle or its own features; together they weigh as much as any other
        column.
        """
        parts, start, weight = [], 0, 1 / sqrt(len(self.parts))
        for part in self.parts:
            if part == "weekday":
                day = (
                    np.floor(seconds / _DAY).astype(np.int64) + 3
                ) % 7  # the first of January 1970 was a Thursday
                parts.append((rows, start + day, np.full(len(rows), weight)))
            else:
                angle = (
                    2
                    * np.pi
                    * (seconds % _DAY / _DAY if part == "hour" else seconds % _YEAR / _YEAR)
                )
                for place, values in enumerate((np.sin(angle), np.cos(angle))):
                    parts.append((rows, np.full(len(rows), start + place), weight * values))
            start += _PARTS[part]
        return parts

    def cell(self, value: object) -> float | str:
        """An app's value for this column as a cell; `ValueError` if it cannot be one."""
        names = self.kind in ("category", "hashed")
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or (isinstance(value, float) and value != value):
            return "" if names else np.nan
        if names:
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if not isinstance(value, str | int):
                raise ValueError(f"context: {self.name} is a category, got {type(value).__name__}")
            name = str(value).lower() if isinstance(value, bool) else str(value).strip()
            return "" if name.lower() in MISSING else name
        if self.kind == "date":
            return _seconds(self.name, value)
        if not isinstance(value, int | float) or (
            self.kind == "number" and isinstance(value, bool)
        ):
            raise ValueError(f"context: {self.name} is a {self.kind}, got {type(value).__name__}")
        if self.kind == "flag" and value not in (0, 1):
            raise ValueError(f"context: {self.name} is true or false, got {value}")
        if (
            not abs(value) <= LARGEST
        ):  # NaN is not, and a large whole number need not become a float
            raise ValueError(f"context: {self.name} is not finite or beyond {LARGEST:g}")
        return float(value)

    def describe(self) -> str:
        """The encoding in a few words, for people."""
        if self.kind == "number":
            if not self.scaled:
                return "number, as it is"
            kind = "number, log(1 + x), scaled" if self.log else "number, scaled"
            return f"{kind} by mean {self.mean:.4g} and deviation {self.deviation:.4g}"
        if self.kind == "category":
            shown = ", ".join(self.values[:4])
            return f"category: {shown if len(self.values) <= 4 else f'{shown} and {len(self.values) - 4} more'}"
        if self.kind == "hashed":
            return f"category of many values, hashed into {self.buckets}"
        return f"date: {', '.join(self.parts)}" if self.kind == "date" else "flag: true or false"


@dataclass(frozen=True)
class Encoder:
    """The features of a table's contexts: `words` words of the `text` columns, then those of each
    other column.

    Words have an L2 norm of 1. Every other column has about 1, and so have all of them together by
    a fixed factor, so that neither side drowns the other and learning rates mean what they mean for
    text. Dense contexts are not weighed.

    Examples:
        >>> encoder = Encoder((Column(name="age", kind="number", mean=40.0, deviation=10.0),))
        >>> encoder.matrix({"age": np.array([50.0, 30.0])}).tolist()
        [[1.0], [-1.0]]
        >>> Encoder.from_json(encoder.to_json()) == encoder
        True
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    columns: tuple[Column, ...]
    text: tuple[str, ...] = ()
    words: _Count = 0
    dense: bool = False

    def __post_init__(self) -> None:
        names = [*self.text, *(column.name for column in self.columns)]
        if len(set(names)) != len(names):
            raise ValueError("columns are named twice")
        if (self.words > 0) != bool(self.text) or (self.dense and self.words):
            raise ValueError("words and text do not belong together")
        if not 1 <= self.width <= _MOST_FEATURES:
            raise ValueError("has no features or too many")

    @property
    def width(self) -> int:
        """The number of features of a context."""
        return self.words + sum(column.width for column in self.columns)

    def features(self, vocabulary: Sequence[str] = ()) -> list[str]:
        """The name of every feature, in the order of their numbers."""
        return [*vocabulary, *(name for column in self.columns for name in column.features())]

    def sparse(self, bags: Ragged | None, cells: Mapping[str, Cells]) -> Ragged:
        """Contexts as rows of (feature, value); `bags` holds the rows' words, where there are text
        columns.

        `cells` has the cells of every other column: float64 [n] for numbers, dates and flags, n
        names for categories. Features of a row ascend.
        """
        n = len(next(iter(cells.values()))) if bags is None else len(bags)
        shares = 2 if self.words and self.columns else 1
        rows, ids, values = (
            [np.empty(0, np.int64)],
            [np.empty(0, np.int64)],
            [np.empty(0, np.float64)],
        )
        if bags is not None:
            assert bags.values is not None
            rows.append(bags.row_of_entry())
            ids.append(bags.ids.astype(np.int64))
            values.append(bags.values.astype(np.float64) / sqrt(shares))
        start = self.words
        for column in self.columns:
            own_rows, positions, found = column.encode(cells[column.name])
            weight = (
                1.0
                if column.kind == "number" and not column.scaled
                else 1 / sqrt(shares * len(self.columns))
            )
            rows.append(own_rows)
            ids.append(start + positions)
            values.append(weight * found)
            start += column.width
        row, feature, value = np.concatenate(rows), np.concatenate(ids), np.concatenate(values)
        order = np.lexsort((feature, row))
        offsets = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=n))]).astype(np.int64)
        return Ragged(offsets, feature[order].astype(np.int32), value[order].astype(np.float32))

    def matrix(self, cells: Mapping[str, Cells]) -> np.ndarray:
        """Dense contexts, float32 [n, width], from the cells of every column; not weighed."""
        out = np.zeros((len(next(iter(cells.values()))), self.width), np.float32)
        start = self.words
        for column in self.columns:
            rows, positions, values = column.encode(cells[column.name])
            out[rows, start + positions] = values
            start += column.width
        return out

    def cells(self, given: Mapping[str, object]) -> tuple[str, dict[str, Cells]]:
        """An app's values of one row, by column: its text, and its other cells. `ValueError` if
        it does not fit.
        """
        known = [*self.text, *(column.name for column in self.columns)]
        for name in given:
            if name not in known:
                raise ValueError(f"context: no column {name!r}{nearest(str(name), known)}")
        texts = [given.get(name) or "" for name in self.text]
        for name, found in zip(self.text, texts, strict=True):
            if not isinstance(found, str):
                raise ValueError(f"context: {name} is a text, got {type(found).__name__}")
        cells: dict[str, Cells] = {}
        for column in self.columns:
            cell = column.cell(given.get(column.name))
            cells[column.name] = [cell] if isinstance(cell, str) else np.array([cell], np.float64)
        return " ".join(str(found) for found in texts), cells

    def to_json(self) -> dict[str, Any]:
        """As plain values; only what differs from the defaults."""
        plain = Column(name="", kind="number")
        columns = [
            {
                key: value
                for key, value in asdict(column).items()
                if key in ("name", "kind") or value != vars(plain)[key]
            }
            for column in self.columns
        ]
        return {"text": self.text, "words": self.words, "dense": self.dense, "columns": columns}

    @classmethod
    def from_json(cls, found: object) -> "Encoder":
        """From what `to_json` has made; `ValueError` says what is wrong."""
        try:
            return read_checked(cls, found)
        except ValueError as error:
            raise ValueError(f"encoder: {error}") from None


def _bucket(name: str, buckets: int) -> int:
    """The place of a hashed name: the same on every machine and in every version."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") % buckets


def _seconds(name: str, value: object) -> float:
    """The wall clock of a date in seconds since 1970, whatever its zone."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.strip())
        except ValueError:
            raise ValueError(
                f"context: {name} is a date such as 2024-05-31 or 2024-05-31T08:00, got {value!r}"
            ) from None
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if not isinstance(value, datetime):
        raise ValueError(f"context: {name} is a date, got {type(value).__name__}")
    return (value.replace(tzinfo=None) - datetime(1970, 1, 1)).total_seconds()
