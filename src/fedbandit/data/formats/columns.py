"""Chosen columns of a table as a stream of batches: of a CSV or Parquet file, or of a frame in
memory.

`Table` opens any of them; `batches` can be called any number of times, since imports read twice.
Missing columns are named before any work, with the nearest names. Knows nothing of what the columns
mean.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.parts import nearest
from fedbandit.core.progress import ProgressReporter
from fedbandit.data.formats import cells
from fedbandit.data.formats.dialect import check_text, find_dialect

_CSV_BLOCK = 1 << 20  # bytes; also the longest row that can be read
_ROWS = 16384  # of Parquet and of frames at a time
_ALIASES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "csv", ".txt": "csv"}
_KINDS = "expected a name ending in .csv, .tsv, .txt or .parquet"
_MOST_COLUMNS = 100_000
_INDEX = "__index_level_"  # what pandas calls an index without a name, which says nothing


class Source(Protocol):
    """Where rows come from, any number of times: `Csv`, `Parquet`, `Frame`, or a log in another
    layout.

    `names` are its columns, `size` is in units of `unit` (None: not known), and `records` streams
    some of the columns.
    """

    label: str  # what messages call it
    file: str  # its name without the folder
    names: list[str]
    first: int  # the number of the first row, as a person counts them
    unit: str

    def size(self) -> float | None: ...

    def records(self, names: Sequence[str]) -> Iterator[tuple[Any, float]]:
        """Record batches with at least these columns, and how far each comes in the units of
        `size`.
        """
        ...

    def describe(self) -> str: ...


@dataclass(frozen=True)
class TableBatch:
    """Some consecutive rows of a table; `first` is the number of the first one, as a person counts
    them.

    Columns are Arrow arrays. Messages name the column by its place and the row by its number, so
    that a person finds the cell.
    """

    table: "Table"
    first: int
    columns: Mapping[str, Any]

    def place(self, name: str, row: int) -> str:
        """Where a cell of this batch stands in the table, for the beginning of a message."""
        return f"{self.table.column(name)}, row {self.first + row}"

    def array(self, name: str) -> Any:
        """A column as an Arrow array of one of few types."""
        try:
            column = self.columns[name]
            column.validate(full=True)  # text that is not UTF-8 would fail wherever it is read
            return cells.without(cells.plain(column), self.table.missing)
        except (pa.ArrowException, DataError) as error:
            raise DataError(f"{self._near(name)}: {one_line(error)}") from None

    def names(self, name: str) -> list[str]:
        """A column as names without the space around them; missing values are empty strings."""
        array = self.array(name)
        if pa.types.is_nested(array.type):
            raise DataError(
                f"{self.table.column(name)}: expected text or whole numbers, found {array.type}"
            )
        try:
            return cells.names(array)
        except DataError as error:
            raise DataError(f"{self._near(name)}: {error}") from None

    def texts(self, name: str) -> list[str]:
        """A column as texts; missing values are empty."""
        array = self.array(name)
        if pa.types.is_nested(array.type):
            raise DataError(f"{self.table.column(name)}: expected text, found {array.type}")
        if not pa.types.is_string(array.type):
            return self.names(name)
        return [cell or "" for cell in array.to_pylist()]

    def joined(self, names: Sequence[str]) -> list[str]:
        """Several text columns as one text per row."""
        return [
            " ".join(found) for found in zip(*(self.texts(name) for name in names), strict=True)
        ]

    def exact(self, name: str, written: str = "1234.5") -> np.ndarray:
        """A column of numbers without gaps, float64 [rows]; what is missing or no number is named
        by its row.
        """
        array = self.array(name)
        try:
            found = cells.numbers(array, written)
        except DataError as error:
            raise DataError(f"{self.table.column(name)}: {error}") from None
        self.check_finite(name, found)
        return found

    def check_finite(self, name: str, found: np.ndarray) -> None:
        """Raise `DataError` with the row of the first number that is missing, or that float32
        cannot hold.
        """
        with np.errstate(over="ignore"):
            bad = np.flatnonzero(~np.isfinite(found.astype(np.float32)))
        if len(bad):
            cell = self.array(name)[int(bad[0])].as_py()
            shown = f", found {cell[:40]!r}" if isinstance(cell, str) and cell.strip() else ""
            raise DataError(
                f"{self.place(name, int(bad[0]))}: missing, or not a finite number{shown}"
            )

    def _near(self, name: str) -> str:
        """As `place`, where the cell is not known."""
        return f"{self.table.column(name)}, rows {self.first} to {self.first + len(self) - 1}"

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


class Table:
    """A file or a frame whose chosen columns can be streamed any number of times.

    Names are stripped, and those that are empty become `column 3`; two of the same name are
    refused. `missing` are words that mean "no value" beside the usual ones.

    Examples:
        >>> import pyarrow as pa
        >>> from fedbandit.core.progress import SILENT
        >>> table = Table(pa.table({"user": ["a", "b"], "x": [1.0, 2.0]}))
        >>> [batch.names("user") for batch in table.batches(["user"], progress=SILENT, what="")]
        [['a', 'b']]
    """

    def __init__(
        self,
        source: Any,
        *,
        encoding: str | None = None,
        delimiter: str | None = None,
        missing: Iterable[str] = (),
    ) -> None:
        self.missing = frozenset(word.strip().lower() for word in missing)
        if hasattr(source, "records"):
            self.source: Source = source
        elif isinstance(source, str | Path):
            self.source = _file(Path(source), encoding, delimiter)
        else:
            self.source = Frame(source)
        self.label = self.source.label
        self.names = [
            str(name).strip() or f"column {place}"
            for place, name in enumerate(self.source.names, start=1)
        ]
        if len(self.names) > _MOST_COLUMNS:
            raise DataError(
                f"{self.label}: {len(self.names):,} columns; {_MOST_COLUMNS:,} can be read"
            )
        self._own = dict(zip(self.names, self.source.names, strict=True))
        for place, name in enumerate(self.names):
            if (earlier := self.names.index(name)) != place:
                both = f"columns {earlier + 1} and {place + 1}"
                raise DataError(
                    f"{self.label}: more than one column is called {name!r}: {both}; rename one of them"
                )

    def column(self, name: str) -> str:
        """A column by its name and its place as people count, behind the table's own name."""
        return f"{self.label}: column {name} ({self.names.index(name) + 1} of {len(self.names)})"

    def require(self, names: Iterable[str]) -> None:
        """Raise `DataError` with the nearest names unless all the columns exist."""
        for name in names:
            if name not in self.names:
                raise DataError(f"{self.label}: no column {name!r}{nearest(name, self.names)}")

    def matching(self, patterns: Iterable[str]) -> list[str]:
        """The columns named, separated by commas, or matched by a pattern such as `x_*`; in the
        table's order.
        """
        chosen: set[str] = set()
        for entry in patterns:
            parts = [entry] if entry in self.names else [part.strip() for part in entry.split(",")]
            for pattern in (part for part in parts if part):
                found = {
                    name for name in self.names if name == pattern or fnmatchcase(name, pattern)
                }
                if not found:
                    self.require([pattern])
                chosen |= found
        return [name for name in self.names if name in chosen]

    def batches(
        self,
        names: Iterable[str],
        more: Iterable[str] = (),
        *,
        progress: ProgressReporter,
        what: str,
    ) -> Iterator[TableBatch]:
        """Stream the named columns; cells of CSV files are text."""
        chosen = list(dict.fromkeys([*names, *more]))
        source, first = self.source, self.source.first
        with (
            _ClearErrors(self.label),
            progress.task(what, source.size(), unit=source.unit) as advance,
        ):
            for record, amount in source.records([self._own[name] for name in chosen]):
                advance(amount)
                if record.num_rows:
                    yield TableBatch(
                        self, first, {name: record.column(self._own[name]) for name in chosen}
                    )
                first += record.num_rows


def _file(path: Path, encoding: str | None, delimiter: str | None) -> Source:
    if path.is_dir():
        raise DataError(f"{path}: is a folder, not a .csv, .tsv or .parquet file")
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    kind = _ALIASES.get(path.suffix.lower())
    if kind is None:
        raise DataError(f"{path}: {_KINDS}")
    with _ClearErrors(str(path)):
        return Parquet(path) if kind == "parquet" else Csv(path, encoding, delimiter)


class Csv:
    """Rows of a text file; all cells are text."""

    unit, first = "B", 2  # the header is row 1, as spreadsheets and the reader have it

    def __init__(
        self, path: Path, encoding: str | None = None, delimiter: str | None = None
    ) -> None:
        self.path, self.label, self.file = path, str(path), path.name
        self.dialect = find_dialect(path, encoding, delimiter)
        if encoding is not None:
            check_text(path, self.dialect.encoding)
        with self._open(None, str(path)) as reader:
            self.names: list[str] = reader.schema.names

    def size(self) -> float:
        """The bytes of the file."""
        return self.path.stat().st_size

    def describe(self) -> str:
        """Encoding and delimiter, in words."""
        return self.dialect.describe()

    def _open(self, names: Sequence[str] | None, source: Any) -> Any:
        types = None if names is None else {name: pa.string() for name in names}
        convert = pa.csv.ConvertOptions(
            column_types=types, include_columns=list(names) if names else None
        )
        parse = pa.csv.ParseOptions(delimiter=self.dialect.delimiter, newlines_in_values=True)
        encoding = "utf-8" if self.dialect.encoding == "utf-8-sig" else self.dialect.encoding
        read = pa.csv.ReadOptions(block_size=_CSV_BLOCK, use_threads=False, encoding=encoding)
        return pa.csv.open_csv(
            source, read_options=read, parse_options=parse, convert_options=convert
        )

    def records(self, names: Sequence[str]) -> Iterator[tuple[Any, float]]:
        """Record batches of text cells, and the bytes that each took of the file."""
        with pa.OSFile(str(self.path)) as file, self._open(names, file) as reader:
            position = 0
            for record in reader:
                now = self.path.stat().st_size if file.closed else file.tell()
                yield record, now - position
                position = now


class Parquet:
    """Rows of a Parquet file, with its own types."""

    unit, first = "rows", 1

    def __init__(self, path: Path) -> None:
        self.path, self.label, self.file = path, str(path), path.name
        self.names: list[str] = pa.parquet.read_schema(path).names

    def size(self) -> float:
        """The number of rows."""
        return int(pa.parquet.read_metadata(self.path).num_rows)

    def describe(self) -> str:
        """The name of the format."""
        return "Parquet"

    def records(self, names: Sequence[str]) -> Iterator[tuple[Any, float]]:
        """Record batches of the columns, and the number of rows of each."""
        with pa.parquet.ParquetFile(self.path) as file:
            for record in file.iter_batches(
                batch_size=_ROWS, columns=list(names), use_threads=False
            ):
                yield record, record.num_rows


class Frame:
    """Rows of a pandas or polars frame, an Arrow table, or a data set of Hugging Face's `datasets`."""

    unit, first = "rows", 1

    def __init__(self, frame: Any) -> None:
        self.label = self.file = "the frame"
        self._frame = frame
        if isinstance(frame, Mapping):
            splits = ", ".join(str(name) for name in list(frame)[:5])
            raise ConfigError(f"the frame: holds several ({splits}); give one of them")
        if not (hasattr(frame, "__arrow_c_stream__") or hasattr(frame, "with_format")):
            kind = type(frame).__name__
            raise ConfigError(
                f"the frame: a {kind} is neither a file's name nor a frame of pandas, polars or Arrow"
            )
        with _ClearErrors(self.label):
            columns = getattr(frame, "column_names", None)
            if not columns and not hasattr(frame, "__arrow_c_stream__"):
                raise ConfigError("the frame: does not know its columns; load it in full")
            names = [str(name) for name in columns or self._reader().schema.names]
            self.names = [name for name in names if not name.startswith(_INDEX)]

    def size(self) -> float | None:
        """The number of rows, where the frame knows it."""
        return len(self._frame) if hasattr(self._frame, "__len__") else None

    def describe(self) -> str:
        """The library and the type of the frame."""
        return f"{type(self._frame).__module__.partition('.')[0]} {type(self._frame).__name__}"

    def _reader(self) -> Any:
        return pa.RecordBatchReader.from_stream(self._frame)

    def records(self, names: Sequence[str]) -> Iterator[tuple[Any, float]]:
        """Record batches of the columns, and the number of rows of each."""
        for table in self._tables():
            for record in table.select(list(names)).to_batches(max_chunksize=_ROWS):
                yield record, record.num_rows

    def _tables(self) -> Iterator[Any]:
        if hasattr(self._frame, "with_format"):  # Hugging Face: blocks of rows as Arrow tables
            yield from self._frame.with_format("arrow").iter(batch_size=_ROWS)
        else:
            for record in self._reader():
                yield pa.Table.from_batches([record])


class _ClearErrors:
    """Turns whatever the file reader says into one line that names the file."""

    def __init__(self, label: str) -> None:
        self._label = label

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, pa.ArrowException | UnicodeDecodeError) or (
            isinstance(error, OSError) and error.errno is None
        ):
            raise DataError(f"{self._label}: cannot be read: {one_line(error)}") from None


def one_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]
