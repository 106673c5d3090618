"""Published federated data sets: downloaded with a checksum, unpacked, and read row by row.

The large ones are SQLite files of serialized `tf.train.Example` messages, packed by LZMA. What is
in them is decided by their importers.
"""

import base64
import hashlib
import http.client
import lzma
import os
import sqlite3
import tarfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from email.message import Message
from functools import cache
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

from fedbandit.core.errors import DataError, explaining
from fedbandit.core.files import write_bytes
from fedbandit.core.progress import SILENT, ProgressReporter
from fedbandit.data.importers import check_unpacked
from fedbandit.data.validation import cache_folder

_CHUNK = 1 << 18
_TIMEOUT = 30.0  # seconds without a byte


def download(
    url: str, target: Path, *, sha256: str | None = None, progress: ProgressReporter = SILENT
) -> Path:
    """Fetch `url` to `target`, and return it; an interrupted download is resumed.

    Bytes go to a hidden file beside the target, `.NAME.download`, which stays if the line breaks:
    the next call asks the server for the rest only, and starts again where the server cannot send a
    part. The file is checked against `sha256` and whatever checksum the server publishes before it
    gets its name; one that does not match is thrown away.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.download")
    checksums = {} if sha256 is None else {"sha256": sha256}
    checksums |= _transfer(url, partial, progress)
    for algorithm, expected in checksums.items():
        with open(partial, "rb") as file:
            found = hashlib.file_digest(file, algorithm).hexdigest()
        if found != expected:
            partial.unlink()
            raise DataError(
                f"{url}: the {algorithm} checksum does not match; the download was thrown away, try again"
            )
    os.replace(partial, target)
    return target


def _transfer(url: str, partial: Path, progress: ProgressReporter) -> dict[str, str]:
    """Bring `partial` to full length; returns the checksums that the server publishes for the file."""
    have = partial.stat().st_size if partial.exists() else 0
    request = Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urlopen(request, timeout=_TIMEOUT)
    except HTTPError as error:
        with error:
            if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and have:
                if (
                    _total(error.headers) == have
                ):  # all bytes had arrived before the last attempt ended
                    return _published_checksums(error.headers)
                partial.unlink()
                return _transfer(url, partial, progress)
        raise DataError(f"{url}: the server answered {error.code} {error.reason}") from None
    except (URLError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise DataError(
            f"{url}: cannot reach {urlsplit(url).hostname} ({reason}); fetch the file elsewhere and give its path"
        ) from None
    with response:
        resumed = response.status == http.client.PARTIAL_CONTENT
        start = have if resumed else 0
        _receive(response, partial, start, _total(response.headers), url, progress)
        return _published_checksums(response.headers)


def _receive(
    response: Any,
    partial: Path,
    start: int,
    total: int | None,
    url: str,
    progress: ProgressReporter,
) -> None:
    """Write what a server sends behind the first `start` bytes of a file."""
    done, broken = start, False
    with (
        open(partial, "r+b" if start else "wb") as file,
        progress.task(
            f"Downloading {urlsplit(url).path.rsplit('/', 1)[-1]}", total, unit="B", done=start
        ) as advance,
    ):
        file.seek(start)
        try:
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                done += len(chunk)
                advance(len(chunk))
        except (http.client.HTTPException, TimeoutError, ConnectionError):
            broken = True  # what arrived is kept
    if broken or (total is not None and done != total):
        of_all = "" if total is None else f" of {total:,}"
        raise DataError(
            f"{url}: broke off after {done:,}{of_all} bytes; run the same command again to resume"
        )


def _total(headers: Message) -> int | None:
    """The length of the whole file, where the server says it.

    An answer with a part of the file, or with none, has it in `Content-Range: bytes 5-9/10` or
    `bytes */10`; an answer with all of it in `Content-Length: 10`.
    """
    length = headers.get("Content-Range", headers.get("Content-Length", ""))
    text = length.rpartition("/")[2]
    return int(text) if text.isdigit() else None


def _published_checksums(headers: Message) -> dict[str, str]:
    """Google Cloud Storage publishes `x-goog-hash: crc32c=...,md5=...` (base64) with the files it
    serves.
    """
    for header in headers.get_all("x-goog-hash") or []:
        for part in header.split(","):
            name, _, value = part.strip().partition("=")
            if name == "md5":
                return {"md5": base64.b64decode(value).hex()}
    return {}


_UNPACKED_CHUNK = 1 << 20
_UNPACKING_MEMORY = 1 << 27  # bytes; a file names the dictionary it wants, published ones want 8 MB


def _unpack(path: Path, copy: Path, progress: ProgressReporter) -> None:
    """Unpack an LZMA file, a megabyte at a time.

    `DataError` for a file that is cut, damaged or followed by something else, for one that wants
    more than 128 MB to be unpacked in, and for a bomb: what unpacks to more than 200 times its size.
    """
    decompressor, size = lzma.LZMADecompressor(memlimit=_UNPACKING_MEMORY), path.stat().st_size
    with (
        open(path, "rb") as packed,
        open(copy, "wb") as target,
        progress.task(f"Unpacking {path.name}", size, unit="B") as advance,
    ):
        while not decompressor.eof:
            chunk = packed.read(_UNPACKED_CHUNK) if decompressor.needs_input else b""
            if decompressor.needs_input and not chunk:
                raise DataError(f"{path}: truncated: the compressed data ends too early")
            advance(len(chunk))
            with explaining(f"{path}: damaged", lzma.LZMAError):
                target.write(decompressor.decompress(chunk, max_length=_UNPACKED_CHUNK))
            advice = "unpack it yourself if it is right"
            check_unpacked(f"{path}:", target.tell(), size, advice, at_least=True)
        if decompressor.unused_data or packed.read(1):
            raise DataError(f"{path}: damaged: something follows the compressed data")


BASE_URL = "https://storage.googleapis.com/tff-datasets-public/"


_SHA256 = {  # as published by the data sets' loaders; the large files carry the server's own checksum
    "stackoverflow.word_count.tar.bz2": "1dc00256d6e527c54b9756d968118378ae14e6692c0b3b6cad470cdd3f0c519c",
    "stackoverflow.tag_count.tar.bz2": "6fe281cec490d9384a290d560072438e7e2b377bbb823876ce7bd6f82696772d",
}


def _downloads() -> Path:
    """Where downloads go when the user names no place."""
    return cache_folder() / "downloads"


def find_database(path: Path | None, name: str, progress: ProgressReporter) -> Path:
    """The SQLite file `name`, packed or not: the path itself, or found in that folder, or
    downloaded into it.

    Without a path the folder is the one for downloads in the cache, so that a second import finds
    what the first has fetched.
    """
    if path is not None and path.is_file():
        return path
    folder = _downloads() if path is None else path
    if path is not None and not path.is_dir():
        raise DataError(f"{path}: no such file or folder")
    for candidate in (folder / name, folder / f"{name}.lzma"):
        if candidate.is_file():
            return candidate
    return download(f"{BASE_URL}{name}.lzma", folder / f"{name}.lzma", progress=progress)


def find_counts(given: Path | None, name: str, database: Path, progress: ProgressReporter) -> Path:
    """A file of counts: the one given, or found beside the database or in the cache, or downloaded
    into the cache.
    """
    if given is not None:
        if not given.is_file():
            raise DataError(f"{given}: no such file")
        return given
    short = name.removeprefix("stackoverflow.")
    for candidate in (database.parent / name, database.parent / short, _downloads() / name):
        if candidate.is_file():
            return candidate
    archive = _downloads() / f"{name}.tar.bz2"
    download(
        f"{BASE_URL}{archive.name}", archive, sha256=_SHA256.get(archive.name), progress=progress
    )
    return _extract(archive, name)


def _extract(archive: Path, name: str) -> Path:
    """Take one file out of an archive, by its own name only: paths in archives are not trusted."""
    target = archive.with_name(name)
    broken = explaining(f"{archive}: cannot be unpacked", tarfile.TarError, EOFError, OSError)
    with broken, tarfile.open(archive, "r:bz2") as tar:
        member = next(
            (m for m in tar.getmembers() if m.isfile() and Path(m.name).name == name), None
        )
        source = tar.extractfile(member) if member is not None else None
        if source is None:
            raise DataError(f"{archive}: holds no file {name}")
        write_bytes(target, source.read())
    archive.unlink()
    return target


_TABLES = {
    "examples": {"split_name", "client_id", "serialized_example_proto"},
    "client_metadata": {"client_id", "split_name", "num_examples"},
}
_REPORT_EVERY = 1024  # rows
_LARGEST_CELL = 1 << 24  # bytes; an image has 4,000
_MOST_EXAMPLES = 1 << 40  # of one client
Feature = list[bytes] | np.ndarray
"""A list of byte strings, float32 [n] or int64 [n]; an unset feature is an empty list."""
Row = tuple[str, str, int, Mapping[str, Feature]]
"""Split, client, row number in the table, features."""
_DTYPES = {"float_list": np.float32, "int64_list": np.int64}


_SCHEMA = """
name: "fedbandit/example.proto" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type {
  name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: ".BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 type: TYPE_MESSAGE type_name: ".FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: ".Int64List" oneof_index: 0 }
}
message_type {
  name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".Features.FeatureEntry" }
  nested_type {
    name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".Feature" }
  }
}
message_type { name: "Example" field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".Features" } }
"""


@cache
def _example_class() -> Any:
    """The message class `tf.train.Example`, from its schema: no TensorFlow is needed."""
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_SCHEMA, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Example"))


def parse_example(data: bytes, wanted: Collection[str] | None = None) -> dict[str, Feature]:
    """The features of one serialized Example by name, all or only those wanted: byte strings as a
    list, numbers as an array.

    Bytes that are none raise protobuf's `DecodeError`.
    """
    stored = _example_class().FromString(data).features.feature
    found: dict[str, Feature] = {}
    for name in stored if wanted is None else [name for name in wanted if name in stored]:
        kind = stored[name].WhichOneof("kind")
        values = list(getattr(stored[name], kind).value) if kind else []
        found[name] = np.array(values, _DTYPES[kind]) if kind in _DTYPES else values
    return found


@contextmanager
def open_published(
    path: Path, copy: Path, progress: ProgressReporter
) -> Iterator["PublishedSqlite"]:
    """A published SQLite file, checked when opened; a packed one is unpacked to `copy` meanwhile."""
    packed = path.suffix in (".lzma", ".xz")
    file = copy if packed else path
    try:
        if packed:
            _unpack(path, copy, progress)
        _check_header(path, file)
        address = f"file:{quote(str(file))}?mode=ro&immutable=1"
        with closing(sqlite3.connect(address, uri=True)) as database:
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LARGEST_CELL)
            published = PublishedSqlite(path, database, file.stat().st_size)
            published.check_tables()
            yield published
    finally:
        if packed:
            copy.unlink(missing_ok=True)


@dataclass(frozen=True)
class PublishedSqlite:
    """The tables of a published SQLite file; `open_published` makes it.

    `examples` has a row for each example: its split, its client, and a serialized
    `tf.train.Example`. `client_metadata` promises how many there are of each client in each split.
    `rows` holds the file to its promises, so that one that was cut is never imported in part.
    """

    path: Path  # as the user has named it
    _database: sqlite3.Connection
    _size: int  # bytes

    def clients(self, split: str) -> dict[str, int]:
        """The number of examples that the metadata promises for each client of a split."""
        query = "SELECT client_id, num_examples FROM client_metadata WHERE split_name = ?"
        promised: dict[str, int] = {}
        for client, count in self._execute(query, (split,)):
            if not isinstance(client, str):
                raise DataError(
                    f"{self.path}: client_metadata: a client's id is not text: {client!r:.40}"
                )
            if type(count) is not int or not 0 <= count <= _MOST_EXAMPLES:
                raise DataError(
                    f"{self.path}: client_metadata: client {client} has {count!r:.40} examples"
                )
            promised[client] = count
        if not promised:
            found = [
                name for (name,) in self._execute("SELECT DISTINCT split_name FROM client_metadata")
            ]
            raise DataError(
                f"{self.path}: no split {split!r}; it has {', '.join(map(str, found)) or 'none'}"
            )
        return promised

    def rows(
        self,
        promised: Mapping[str, Mapping[str, int]],
        wanted: Collection[str],
        progress: ProgressReporter,
        what: str,
    ) -> Iterator[Row]:
        """The wanted features of every example of some splits; `promised` has the number of
        examples of every client by split, as `clients` returns it.
        """
        splits = {split: sum(clients.values()) for split, clients in promised.items()}
        # NOT INDEXED: one sequential scan; following an index would jump through a file of many gigabytes.
        query = (
            "SELECT rowid, split_name, client_id, serialized_example_proto FROM examples NOT INDEXED "
            f"WHERE split_name IN ({', '.join('?' * len(splits))})"
        )
        found = dict.fromkeys(splits, 0)
        with progress.task(what, sum(splits.values())) as advance:
            for count, (row, split, client, proto) in enumerate(
                self._execute(query, tuple(splits)), start=1
            ):
                if not isinstance(client, str):
                    raise DataError(
                        f"{self.path}: examples, row {row}: the client's id is not text: {client!r:.40}"
                    )
                where = f"{self.path}: client {client}, row {row}: not a tf.train.Example"
                with explaining(where, DecodeError, TypeError):
                    features = parse_example(proto, wanted)
                found[split] += 1
                if found[split] > splits[split]:
                    raise DataError(
                        f"{self.path}: split {split} holds more examples than client_metadata promises: "
                        f"{splits[split]:,}"
                    )
                yield split, client, row, features
                if count % _REPORT_EVERY == 0:
                    advance(_REPORT_EVERY)
            advance(sum(found.values()) % _REPORT_EVERY)
        for split, number in splits.items():
            if found[split] != number:
                counts = f"{found[split]:,} examples, client_metadata promises {number:,}"
                raise DataError(f"{self.path}: incomplete: split {split} holds {counts}")

    def check_tables(self) -> None:
        """Refuse a database without the published tables and their columns.

        Views and virtual tables of these names are refused too: they compute their rows, and a stranger
        has written how.
        """
        for table, needed in _TABLES.items():
            made = list(
                self._execute("SELECT type, sql FROM sqlite_master WHERE name = ?", (table,))
            )
            # A view or a virtual table computes its rows, and may do so without end.
            if made and not all(
                kind == "table" and str(sql).upper().startswith("CREATE TABLE")
                for kind, sql in made
            ):
                raise DataError(
                    f"{self.path}: {table} is not a plain table; not a published federated data set"
                )
            columns = {column[1] for column in self._execute(f"PRAGMA table_info({table})")}
            if not columns:
                raise DataError(
                    f"{self.path}: no table {table!r}; not a published federated data set"
                )
            if missing := sorted(needed - columns):
                raise DataError(f"{self.path}: table {table} has no column {missing[0]}")

    def _execute(self, query: str, values: tuple[str, ...] = ()) -> Iterator[tuple[Any, ...]]:
        """The rows of a query; more rows than the file has bytes are pages in a circle."""
        with explaining(f"{self.path}: damaged", sqlite3.Error, UnicodeDecodeError):
            for count, row in enumerate(self._database.execute(query, values)):
                if count >= self._size:
                    raise DataError(f"{self.path}: damaged: more rows than the file has bytes")
                yield row


def _check_header(path: Path, file: Path) -> None:
    """SQLite notices a cut-off file only when it reads the missing page; the header shows it at
    once.
    """
    with explaining(str(path), OSError), open(file, "rb") as opened:
        header = opened.read(100)
    if not header.startswith(b"SQLite format 3\0") or len(header) < 100:
        raise DataError(f"{path}: not a SQLite database")
    page = int.from_bytes(header[16:18], "big")
    size = (65536 if page == 1 else page) * int.from_bytes(header[28:32], "big")
    trusted = header[24:28] == header[92:96]  # otherwise an old writer left the page count stale
    if trusted and file.stat().st_size < size:
        raise DataError(f"{path}: truncated: {file.stat().st_size:,} of {size:,} bytes")
