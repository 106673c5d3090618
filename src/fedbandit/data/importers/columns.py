"""Chosen columns of a table as a stream of batches: of a CSV or Parquet file, or of a frame in
memory.

`Table` opens any of them; `batches` can be called any number of times, since imports read twice.
Missing columns are named before any work, with the nearest names. Knows nothing of what the columns
mean.
"""

import codecs
import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice, pairwise
from pathlib import Path
from statistics import mode
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from fedbandit.core.errors import ConfigError, DataError, explaining, refuse
from fedbandit.core.parts import nearest
from fedbandit.core.progress import ProgressReporter
from fedbandit.data.importers import cells, check_unpacked, refuse_packed
from fedbandit.data.text import split_labels

_CSV_BLOCK = 1 << 20  # bytes; also the longest row that can be read
_ROWS = 16384  # of Parquet and of frames at a time
_BATCH_BYTES = 1 << 27  # of Parquet at a time, and of a row group that was packed very small
_TEXT_BYTES = 1 << 25  # of texts at a time, where each is stored once for many rows
_SMALLER = "if it is right, write it again in smaller row groups"
_LARGEST_FOOTER = 1 << 25  # bytes
_ALIASES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "csv", ".txt": "csv"}
_KINDS = (
    "expected a name ending in .csv, .tsv, .txt or .parquet; --delimiter reads any name as text"
)
_EXCEL = (".xlsx", ".xlsm", ".xls", ".ods")
_DEEPEST = 5  # levels of structs
_MOST_PARTS = 4096  # numbers of a list
_MOST_COLUMNS = 100_000
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before utf-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_SAMPLE = 1 << 16  # bytes from which the delimiter is found
_LINES = 200
_BLOCK = 1 << 20
WHOLE = "none"  # in place of a separator: a cell is one name
_INDEX = "__index_level_"  # what pandas calls an index without a name, which says nothing


class Source(Protocol):
    """Where rows come from, any number of times: `Csv`, `Parquet`, `Frame`, or a log in another
    layout.
    """

    label: str  # what messages call it
    file: str  # its name without the folder
    names: list[str]  # of its columns
    kind: str  # its format, in words
    size: float | None  # in units of `unit`; None: not known
    unit: str
    first: int  # the number of the first row, as a person counts them

    def records(self, names: Sequence[str]) -> Iterator[tuple[Any, float]]:
        """Record batches with at least these columns, and how far each comes in the units of
        `size`.
        """
        ...


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
        with explaining(self._near(name), pa.ArrowException, DataError):
            column = self.columns[name]
            column.validate(full=True)  # text that is not UTF-8 would fail wherever it is read
            return cells.without(cells.plain(column), self.table.missing)

    def names(self, name: str) -> list[str]:
        """A column as names without the space around them; missing values are empty strings."""
        array = self.array(name)
        if pa.types.is_nested(array.type):
            where = self.table.column(name)
            raise DataError(f"{where}: expected text or whole numbers, found {array.type}")
        with explaining(self._near(name), DataError):
            return cells.names(array)

    def texts(self, name: str) -> list[str]:
        """A column as texts; missing values are empty."""
        array = self.array(name)
        is_text = pa.types.is_string(array.type)
        return [cell or "" for cell in array.to_pylist()] if is_text else self.names(name)

    def lists(self, name: str, separator: str = WHOLE) -> list[list[str]]:
        """The names in each cell: a list holds any number, a text those between separators."""
        array = self.array(name)
        if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
            return [
                [str(one).strip() for one in found or [] if one is not None]
                for found in array.to_pylist()
            ]
        return [split_names([cell] if cell else [], separator) for cell in self.names(name)]

    def joined(self, names: Sequence[str]) -> list[str]:
        """Several text columns as one text per row."""
        return [
            " ".join(found) for found in zip(*(self.texts(name) for name in names), strict=True)
        ]

    def exact(self, name: str) -> np.ndarray:
        """A column of numbers without gaps, float64 [rows]; what is missing or no number is named
        by its row.
        """
        with explaining(self.table.column(name), DataError):
            found = cells.numbers(self.array(name))
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
        header: bool | None = None,
    ) -> None:
        self.missing = frozenset(word.strip().lower() for word in missing)
        if hasattr(source, "records"):
            self.source: Source = source
        elif isinstance(source, str | Path):
            self.source = _file(Path(source), encoding, delimiter, header)
        else:
            self.source = Frame(source)
        self.label = self.source.label
        self.names = [
            str(name).strip() or f"column {place}"
            for place, name in enumerate(self.source.names, start=1)
        ]
        check_columns(self.label, len(self.names))
        self._own = dict(zip(self.names, self.source.names, strict=True))
        self._parts: dict[str, tuple[str, tuple[str | int, ...]]] = {}
        if schema := getattr(self.source, "schema", None):
            self._flatten(schema)
        self.index = [name for name in getattr(self.source, "index", []) if name in self.names]
        self._places: dict[str, int] = {}
        for place, name in enumerate(self.names, start=1):
            if (earlier := self._places.setdefault(name, place)) != place:
                both = f"columns {earlier} and {place}"
                raise DataError(
                    f"{self.label}: more than one column is called {name!r}: {both}; rename one of them"
                )

    def _flatten(self, schema: Any) -> None:
        """Take structs apart into a column for each field, lists of floats into one for each number."""
        flat: list[str] = []
        for name in self.names:
            kind = schema.field(self._own[name]).type
            found = list(self._leaves(name, kind, ()))
            flat += [part for part, _ in found]
            self._parts |= {part: (name, path) for part, path in found if path}
        self.names = flat

    def _leaves(
        self, root: str, kind: Any, path: tuple[str | int, ...]
    ) -> Iterator[tuple[str, tuple[str | int, ...]]]:
        """The columns that a column is taken apart into: name and path of each."""
        if pa.types.is_struct(kind) and len(path) < _DEEPEST:
            for field in kind:
                yield from self._leaves(root, field.type, (*path, field.name))
        elif _is_vector(kind):
            width, name = self._width(root, kind, path), ".".join([root, *map(str, path)])
            yield from ((f"{name}[{place}]", (*path, place)) for place in range(width))
        else:
            yield ".".join([root, *map(str, path)]), path

    def _width(self, root: str, kind: Any, path: tuple[str | int, ...]) -> int:
        """Numbers in each list of a column: as its type or its first rows say."""
        if pa.types.is_fixed_size_list(kind):
            return min(int(kind.list_size), _MOST_PARTS)
        for record, _ in self.source.records([self._own[root]]):
            lists = _part(record.column(self._own[root]), path)
            if longest := pc.max(pc.list_value_length(lists)).as_py():
                return min(int(longest), _MOST_PARTS)
        return 0

    def column(self, name: str) -> str:
        """A column by its name and its place as people count, behind the table's own name."""
        return f"{self.label}: column {name} ({self._places[name]} of {len(self.names)})"

    def require(self, names: Iterable[str]) -> None:
        """Raise `DataError` with the nearest names unless all the columns exist."""
        for name in names:
            if name not in self._places:
                raise DataError(f"{self.label}: no column {name!r}{nearest(name, self.names)}")

    def matching(self, patterns: Iterable[str]) -> list[str]:
        """The columns named, separated by commas, or matched by a pattern such as `x_*`; in the
        table's order.
        """
        chosen: set[str] = set()
        for entry in patterns:
            parts = (
                [entry] if entry in self._places else [part.strip() for part in entry.split(",")]
            )
            for pattern in (part for part in parts if part):
                found = {
                    name
                    for name in self.names
                    if pattern in (name, self._parts.get(name, ("",))[0])
                    or fnmatchcase(name, pattern)
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
            clear_errors(self.label),
            progress.task(what, source.size, unit=source.unit) as advance,
        ):
            places = {name: self._parts.get(name, (name, ())) for name in chosen}
            roots = list(dict.fromkeys(self._own[root] for root, _ in places.values()))
            for record, amount in source.records(roots):
                advance(amount)
                if record.num_rows:
                    columns = {
                        name: _part(record.column(self._own[root]), path)
                        for name, (root, path) in places.items()
                    }
                    yield TableBatch(self, first, columns)
                first += record.num_rows


def _is_vector(kind: Any) -> bool:
    """Whether cells are lists of floats, such as embeddings."""
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(one(kind) for one in lists) and pa.types.is_floating(kind.value_type)


def _part(array: Any, path: tuple[str | int, ...]) -> Any:
    """A field of structs, or a place of lists; nothing where a list is too short."""
    for step in path:
        if isinstance(step, str):
            array = pc.struct_field(array, step)
        else:
            lists = array.cast(pa.list_(array.type.value_type))
            lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
            places = pa.array(lists.offsets.to_numpy()[:-1] + step, mask=lengths <= step)
            array = lists.values.take(places).cast(pa.float64())
    return array


def _file(path: Path, encoding: str | None, delimiter: str | None, header: bool | None) -> Source:
    """The source for a file, by the end of its name; `DataError` says what can be read instead."""
    kind = _ALIASES.get(path.suffix.lower(), "csv" if delimiter else None)
    convert = f"pandas.read_excel('{path.name}').to_csv('{path.stem}.csv', index=False)"
    sheet = f'a spreadsheet; save it as CSV there, or: python -c "import pandas; {convert}"'
    refuse(
        (path.is_dir(), f"{path}: is a folder, not a .csv, .tsv or .parquet file"),
        (not path.is_file(), f"{path}: no such file"),
        (path.suffix.lower() in _EXCEL, f"{path}: {sheet}"),
        (kind is None, f"{path}: {_KINDS}"),
        error=DataError,
    )
    return Parquet(path) if kind == "parquet" else Csv(path, encoding, delimiter, header)


class Csv:
    """Rows of a text file; all cells are text."""

    unit, first = "B", 2  # the header is row 1, as spreadsheets and the reader have it

    def __init__(
        self,
        path: Path,
        encoding: str | None = None,
        delimiter: str | None = None,
        header: bool | None = None,
    ) -> None:
        self.path, self.label, self.file = path, str(path), path.name
        self.size: float | None = path.stat().st_size
        refuse_packed(path)
        self.dialect = find_dialect(path, encoding, delimiter)
        self._check_width()
        self.kind = self.dialect.describe()
        if encoding is not None and (wrong := _misfit(path, self.dialect.encoding)):
            raise DataError(f"{path}: not {self.dialect.encoding} {wrong}")
        self._named: list[str] | None = None  # where the file itself has no names
        with clear_errors(self.label), self._open(None, str(path)) as reader:
            self.names: list[str] = reader.schema.names
        like_data = [name for name in self.names if cells.is_data(name)]
        if header is None and like_data:
            shown = ", ".join(self.names[:4])[:60]
            raise ConfigError(
                f"header: the first row of {path} looks like data ({shown}); --header no if it"
                " is, --header yes if these are names"
            )
        if header is False:
            self.first = 1
            self._named = self.names = [f"column {i + 1}" for i in range(len(self.names))]

    def _check_width(self) -> None:
        """Refuse a first row that holds more names than can be read, before a reader makes them."""
        with open(self.path, "rb") as file:
            head = file.readline(_CSV_BLOCK)
        check_columns(self.label, head.count(self.dialect.delimiter.encode()) + 1)

    def _open(self, names: Sequence[str] | None, source: Any) -> Any:
        """A streaming reader of these columns as text; of all columns, for their names."""
        types = None if names is None else {name: pa.string() for name in names}
        convert = pa.csv.ConvertOptions(
            column_types=types, include_columns=list(names) if names else None
        )
        parse = pa.csv.ParseOptions(delimiter=self.dialect.delimiter, newlines_in_values=True)
        encoding = "utf-8" if self.dialect.encoding == "utf-8-sig" else self.dialect.encoding
        read = pa.csv.ReadOptions(
            block_size=_CSV_BLOCK, use_threads=False, encoding=encoding, column_names=self._named
        )
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

    kind, unit, first = "Parquet", "rows", 1

    def __init__(self, path: Path) -> None:
        self.path, self.label, self.file = path, str(path), path.name
        self._check_footer()
        with clear_errors(self.label):
            self._metadata = pa.parquet.read_metadata(path)
            check_columns(self.label, self._metadata.num_columns)
            self.schema = self._metadata.schema.to_arrow_schema()
        self.size: float | None = self._metadata.num_rows
        self.names: list[str] = self.schema.names
        known = (self.schema.pandas_metadata or {}).get("index_columns", [])
        self.index = [name for name in known if isinstance(name, str)]

    def _check_footer(self) -> None:
        """Refuse a description of the columns that would take much memory to read."""
        with open(self.path, "rb") as file:
            file.seek(max(file.seek(0, 2) - 8, 0))
            tail = file.read(8)
        size = int.from_bytes(tail[:4], "little")
        if tail.endswith(b"PAR1") and size > _LARGEST_FOOTER:
            raise DataError(f"{self.label}: its footer has {size:,} bytes; not a table of data")

    def records(self, names: Sequence[str]) -> Iterator[tuple[Any, float]]:
        """Record batches of the columns, and the number of rows of each."""
        rows, repeated = self._rows_at_a_time(names)
        own = any(pa.types.is_dictionary(self.schema.field(name).type) for name in names)
        with pa.parquet.ParquetFile(self.path, read_dictionary=repeated) as file:
            pieces: list[Any] = []  # every row group has another dictionary, and ends a piece
            for piece in file.iter_batches(batch_size=rows, columns=list(names), use_threads=False):
                pieces.append(piece)
                if own or sum(one.num_rows for one in pieces) >= rows:
                    yield from _decoded(pieces)
                    pieces = []
            yield from _decoded(pieces)

    def _rows_at_a_time(self, names: Sequence[str]) -> tuple[int, list[str]]:
        """The number of rows that fit into memory, and the columns of texts that are stored once.

        `DataError` for what unpacks without measure.
        """
        widest, repeated, chosen = 1.0, set(), set(names)
        for number in range(self._metadata.num_row_groups):
            group = self._metadata.row_group(number)
            chunks = [group.column(place) for place in range(group.num_columns)]
            chunks = [
                one
                for one in chunks
                if {one.path_in_schema, one.path_in_schema.partition(".")[0]} & chosen
            ]
            for chunk in chunks:
                where = f"{self.label}: column {chunk.path_in_schema}, row group {number + 1},"
                sizes = chunk.total_uncompressed_size, chunk.total_compressed_size
                check_unpacked(where, *sizes, _SMALLER, always=_BATCH_BYTES)
                if chunk.has_dictionary_page and chunk.path_in_schema in chosen:
                    repeated.add(chunk.path_in_schema)
            # A value that is stored once for a thousand rows still takes its place in each.
            size = sum(max(one.total_uncompressed_size, 8 * one.num_values) for one in chunks)
            widest = max(widest, size / max(group.num_rows, 1))
        if widest > _BATCH_BYTES:
            raise DataError(f"{self.label}: a row has more than {_BATCH_BYTES >> 20} MB")
        texts = [name for name in repeated if _is_text(self.schema.field(name).type)]
        return int(min(_ROWS, _BATCH_BYTES / widest)), texts


def _decoded(pieces: Sequence[Any]) -> Iterator[tuple[Any, float]]:
    """Pieces of a batch as one, with texts in place of references to them.

    A text that is stored once may stand in every row: where that takes much memory, rows come in
    smaller batches.
    """
    cuts = [np.cumsum(sum(map(_bytes, piece.columns), np.zeros(len(piece)))) for piece in pieces]
    if sum(sizes[-1] for sizes in cuts) <= _TEXT_BYTES:
        tables = [pa.Table.from_batches([_texts(piece)]) for piece in pieces]
        parts = pa.concat_tables(tables).combine_chunks().to_batches() if tables else []
    else:
        parts = (
            _texts(piece.slice(start, stop - start))
            for piece, sizes in zip(pieces, cuts, strict=True)
            for start, stop in pairwise(
                [0, *(np.flatnonzero(np.diff(sizes // _TEXT_BYTES)) + 1).tolist(), len(sizes)]
            )
        )
    for part in parts:
        yield part, part.num_rows


def _bytes(array: Any) -> np.ndarray | float:
    """Bytes that the cells of an array of references take as text: float64 [n]."""
    if not pa.types.is_dictionary(array.type) or not _is_text(array.type.value_type):
        return 0.0
    lengths = pc.fill_null(pc.binary_length(array.dictionary).take(array.indices), 0)
    return np.asarray(lengths.to_numpy(zero_copy_only=False), np.float64)


def _is_text(kind: Any) -> bool:
    """Whether an Arrow type is text, of either size."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _texts(record: Any) -> Any:
    """A record batch with texts in place of references to them."""
    columns = {
        name: array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
        for name, array in zip(record.schema.names, record.columns, strict=True)
    }
    return pa.record_batch(columns)


class Frame:
    """Rows of a pandas or polars frame, an Arrow table, or a data set of Hugging Face's `datasets`."""

    unit, first = "rows", 1

    def __init__(self, frame: Any) -> None:
        self.label = self.file = "the frame"
        self.kind = f"{type(frame).__module__.partition('.')[0]} {type(frame).__name__}"
        self.size: float | None = len(frame) if hasattr(frame, "__len__") else None
        self._frame = frame
        if isinstance(frame, Mapping):
            splits = ", ".join(str(name) for name in list(frame)[:5])
            raise ConfigError(f"the frame: holds several ({splits}); give one of them")
        if not (hasattr(frame, "__arrow_c_stream__") or hasattr(frame, "with_format")):
            kind = type(frame).__name__
            raise ConfigError(
                f"the frame: a {kind} is neither a file's name nor a frame of pandas, polars or Arrow"
            )
        with clear_errors(self.label):
            columns = getattr(frame, "column_names", None)
            if not columns and not hasattr(frame, "__arrow_c_stream__"):
                raise ConfigError("the frame: does not know its columns; load it in full")
            known: Any = self._reader().schema if hasattr(frame, "__arrow_c_stream__") else None
            names = [str(name) for name in columns or known.names]
            self.names = [name for name in names if not name.startswith(_INDEX)]
            self.schema = known if known is not None and set(names) <= set(known.names) else None

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


@contextmanager
def clear_errors(label: str) -> Iterator[None]:
    """Turns whatever the file reader says into one line that names the file."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        said = one_line(error)
        if "straddl" in said:
            said = f"a row is longer than {_CSV_BLOCK:,} bytes; is a quote left open?"
        raise DataError(f"{label}: cannot be read: {said}") from None


def check_columns(label: str, number: int) -> None:
    """Refuse more columns than can be read."""
    if number > _MOST_COLUMNS:
        raise DataError(f"{label}: {number:,} columns; {_MOST_COLUMNS:,} can be read")


def exactly(name: str) -> str:
    """A column's name as a pattern that matches it alone."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def one_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True)
class Dialect:
    """The encoding, by Python's name, and the delimiter of a CSV file."""

    encoding: str
    delimiter: str

    def describe(self) -> str:
        """In words."""
        name = "utf-8" if self.encoding == "utf-8-sig" else self.encoding
        return f"{name}, separated by {_DELIMITERS.get(self.delimiter, repr(self.delimiter))}"


def find_dialect(path: Path, encoding: str | None = None, delimiter: str | None = None) -> Dialect:
    """The dialect of a file; what is given is taken.

    The encoding is that of the byte order mark, or the first of UTF-8, UTF-16 without a mark and
    Latin 1 that fits every byte of the file. The delimiter is the one of comma, semicolon, tab and
    bar that cuts the first 200 lines into the most columns, the same number in nearly each.
    """
    if encoding is None:
        encoding = _encoding(path)
    else:
        try:
            encoding = codecs.lookup(encoding).name
        except LookupError:
            raise ConfigError(f"encoding: unknown encoding {encoding!r}") from None
    if delimiter is not None:
        delimiter = {"tab": "\t", "\\t": "\t"}.get(delimiter, delimiter)
        if len(delimiter) != 1 or delimiter in '"\r\n':
            raise ConfigError(f"delimiter: must be one character, or tab, got {delimiter!r}")
        return Dialect(encoding, delimiter)
    with open(path, "rb") as file:
        sample = file.read(_SAMPLE)
    text = codecs.getincrementaldecoder(encoding)("replace").decode(sample)
    return Dialect(encoding, _delimiter(text, "\t" if path.suffix.lower() == ".tsv" else ","))


def _encoding(path: Path) -> str:
    """By its mark, or the first of UTF-8, UTF-16 without a mark and Windows' or ISO's Latin-1 that
    all bytes fit.
    """
    with open(path, "rb") as file:
        head = file.read(_SAMPLE)
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name
    odd, even = head[1::2].count(0), head[0::2].count(0)
    if max(odd, even) > 0.3 * len(head) / 2:
        return "utf-16-le" if odd > even else "utf-16-be"
    return next((one for one in ("utf-8", "cp1252") if _misfit(path, one) is None), "latin-1")


def _misfit(path: Path, encoding: str) -> str | None:
    """Where the bytes of a file are not text of an encoding, and why; None if they are."""
    decoder = codecs.getincrementaldecoder(encoding)()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            try:
                decoder.decode(block, final=len(block) < _BLOCK)
            except UnicodeError as error:
                return f"near byte {file.tell() - len(block):,}: {type(error).__name__}"
    return None


def _delimiter(text: str, usual: str) -> str:
    """The one that cuts the first lines into the most columns, the same number in each."""
    whole = text[: text.rfind("\n") + 1] or text
    best, columns = usual, 1
    for candidate in (usual, *(one for one in _DELIMITERS if one != usual)):
        try:
            rows = list(
                islice(csv.reader(whole.splitlines(keepends=True), delimiter=candidate), _LINES)
            )
        except csv.Error:
            continue
        widths = [len(row) for row in rows if row]
        if not widths:
            continue
        found = mode(widths)
        if found > columns and len(rows[0]) == found and widths.count(found) >= 0.9 * len(widths):
            best, columns = candidate, found
    return best


def split_names(found: list[str], separator: str) -> list[str]:
    """The names in some cells; `WHOLE` as a separator takes each cell for one name."""
    if separator == WHOLE:
        return found
    return [name for cell in found for name in split_labels(cell, separator)]
