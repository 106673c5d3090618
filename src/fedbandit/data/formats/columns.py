"""Chosen columns of a CSV or Parquet file as a stream of batches, with missing columns named before any work.

Knows nothing of what the columns mean.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from fedbandit.core.errors import DataError
from fedbandit.core.parts import nearest
from fedbandit.core.progress import Progress

_CSV_BLOCK = 1 << 20  # bytes; also the longest row that can be read
_ROWS = 16384  # of Parquet at a time
_ALIASES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "tsv", ".txt": "csv"}


@dataclass(frozen=True)
class TableBatch:
    """Some consecutive rows of a file; `first` is the number of the first one, as a person counts them."""

    path: Path
    first: int
    columns: dict[str, Any]

    def place(self, name: str, row: int) -> str:
        """Where a cell of this batch stands in the file, for the beginning of a message."""
        return f"{self.path}: column {name}, row {self.first + row}"

    def texts(self, name: str) -> list[str]:
        """A column as strings; missing values are empty strings."""
        column = self.columns[name]
        if pa.types.is_floating(column.type) or pa.types.is_nested(column.type):
            raise DataError(f"{self.path}: column {name}: expected text or whole numbers, found {column.type}")
        try:
            texts: list[str] = pc.fill_null(column.cast(pa.string()), "").to_pylist()
            return texts
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise DataError(f"{self._near(name)}: not text: {one_line(error)}") from None

    def joined(self, names: Sequence[str]) -> list[str]:
        """Several text columns as one text per row."""
        return [" ".join(cells) for cells in zip(*(self.texts(name) for name in names), strict=True)]

    def numbers(self, names: Sequence[str]) -> np.ndarray:
        """Columns as float32 [rows, columns]; a missing value is an error that names its row."""
        out = np.empty((len(self), len(names)), np.float32)
        for position, name in enumerate(names):
            out[:, position] = self.exact(name)
        return out

    def exact(self, name: str) -> np.ndarray:
        """One column as float64 [rows]."""
        try:
            values: np.ndarray = self.columns[name].cast(pa.float64()).to_numpy(zero_copy_only=False)
        except pa.ArrowException as error:
            raise DataError(f"{self._near(name)}: not a number: {one_line(error)}") from None
        with np.errstate(over="ignore"):
            bad = np.flatnonzero(~np.isfinite(values.astype(np.float32)))
        if len(bad):
            raise DataError(f"{self.place(name, int(bad[0]))}: missing or not finite (NaN or infinity)")
        return values

    def _near(self, name: str) -> str:
        """As `place`, where the cell is not known."""
        return f"{self.path}: column {name}, rows {self.first} to {self.first + len(self) - 1}"

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


class Table:
    """A CSV, TSV or Parquet file whose chosen columns can be streamed any number of times."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise DataError(f"{self.path}: is a folder, not a .csv, .tsv or .parquet file")
        if not self.path.is_file():
            raise DataError(f"{self.path}: no such file")
        kind = _ALIASES.get(self.path.suffix.lower())
        if kind is None:
            raise DataError(f"{self.path}: expected a name ending in .csv, .tsv or .parquet")
        self._delimiter = "\t" if kind == "tsv" else ","
        self._parquet = kind == "parquet"
        with self._clear_errors():
            self.names: list[str] = self._read_names()

    def require(self, names: Iterable[str]) -> None:
        """Raise `DataError` with the nearest names unless all the columns exist."""
        for name in names:
            if name not in self.names:
                raise DataError(f"{self.path}: no column {name!r}{nearest(name, self.names)}")

    def matching(self, patterns: Iterable[str]) -> list[str]:
        """The columns named, separated by commas, or matched by a pattern such as `x_*`; in the file's order."""
        chosen: set[str] = set()
        for pattern in (part.strip() for entry in patterns for part in entry.split(",")):
            if not pattern:
                continue
            found = {name for name in self.names if name == pattern or fnmatchcase(name, pattern)}
            if not found:
                self.require([pattern])
            chosen |= found
        return [name for name in self.names if name in chosen]

    def batches(
        self, texts: Iterable[str], numbers: Iterable[str] = (), *, progress: Progress, what: str
    ) -> Iterator[TableBatch]:
        """Stream the named columns; `texts` are never guessed to be dates or numbers."""
        columns: dict[str, Any] = {name: pa.string() for name in texts} | {name: pa.float64() for name in numbers}
        first = 1 if self._parquet else 2  # the header is row 1 of a CSV file, as spreadsheets and the reader have it
        unit = "rows" if self._parquet else "B"
        with self._clear_errors(), progress.task(what, self._size(), unit=unit) as advance:
            for record, amount in self._parquet_batches(columns) if self._parquet else self._csv_batches(columns):
                advance(amount)
                if record.num_rows:
                    yield TableBatch(self.path, first, {name: record.column(name) for name in columns})
                first += record.num_rows

    def _size(self) -> int:
        return pa.parquet.read_metadata(self.path).num_rows if self._parquet else self.path.stat().st_size

    def _read_names(self) -> list[str]:
        schema = pa.parquet.read_schema(self.path) if self._parquet else self._open_csv(None).schema
        names: list[str] = schema.names
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise DataError(f"{self.path}: more than one column is called {repeated[0]!r}")
        return names

    def _open_csv(self, columns: dict[str, Any] | None, source: Any = None) -> Any:
        convert = pa.csv.ConvertOptions(column_types=columns, include_columns=list(columns) if columns else None)
        parse = pa.csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True)
        read = pa.csv.ReadOptions(block_size=_CSV_BLOCK, use_threads=False)
        return pa.csv.open_csv(source or self.path, read_options=read, parse_options=parse, convert_options=convert)

    def _csv_batches(self, columns: dict[str, Any]) -> Iterator[tuple[Any, float]]:
        with pa.OSFile(str(self.path)) as file, self._open_csv(columns, file) as reader:
            position = 0
            for record in reader:
                now = self.path.stat().st_size if file.closed else file.tell()
                yield record, now - position
                position = now

    def _parquet_batches(self, columns: dict[str, Any]) -> Iterator[tuple[Any, float]]:
        with pa.parquet.ParquetFile(self.path) as file:
            for record in file.iter_batches(batch_size=_ROWS, columns=list(columns), use_threads=False):
                yield record, record.num_rows

    def _clear_errors(self) -> "_ClearErrors":
        return _ClearErrors(self.path)


class _ClearErrors:
    """Turns whatever the file reader says into one line that names the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, pa.ArrowException | UnicodeDecodeError) or (
            isinstance(error, OSError) and error.errno is None
        ):
            raise DataError(f"{self._path}: cannot be read: {one_line(error)}") from None


def one_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]
