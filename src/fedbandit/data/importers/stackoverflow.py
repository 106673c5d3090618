"""Stack Overflow by user, from the published `stackoverflow.sqlite(.lzma)` with its word and tag
counts.

One example is one sentence: the words of title and sentence, and the post's tags. The `heldout`
split is left out.
"""

import json
import sqlite3
import tarfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedbandit.core.errors import DataError
from fedbandit.core.files import write_bytes
from fedbandit.core.progress import SILENT, ProgressReporter
from fedbandit.data import cache_folder
from fedbandit.data.formats.binary import Feature, NotAnExample, parse_example
from fedbandit.data.formats.fetching import download, unpacked
from fedbandit.data.importers.common import Dropped, check_counts
from fedbandit.data.text import BagOfWords, LabelEncoder
from fedbandit.data.writer import DatasetWriter, check_target

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
    try:
        with tarfile.open(archive, "r:bz2") as tar:
            member = next(
                (m for m in tar.getmembers() if m.isfile() and Path(m.name).name == name), None
            )
            source = tar.extractfile(member) if member is not None else None
            if source is None:
                raise DataError(f"{archive}: holds no file {name}")
            write_bytes(target, source.read())
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"{archive}: cannot be unpacked: {error}") from None
    archive.unlink()
    return target


_TABLES = {
    "examples": {"split_name", "client_id", "serialized_example_proto"},
    "client_metadata": {"client_id", "split_name", "num_examples"},
}


_REPORT_EVERY = 1024  # rows


_MOST_EXAMPLES = 1 << 40  # of one client


Row = tuple[str, str, int, Mapping[str, Feature]]


"""Split, client, row number in the table, features."""


class PublishedSqlite:
    """A published SQLite file, checked when opened; a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_header(path)
        self._database = sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True)
        try:
            self._check_tables()
        except BaseException:
            self._database.close()
            raise

    def __enter__(self) -> "PublishedSqlite":
        return self

    def __exit__(self, *error: object) -> None:
        self._database.close()

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
        splits: Mapping[str, int],
        wanted: Collection[str],
        progress: ProgressReporter,
        what: str,
    ) -> Iterator[Row]:
        """The wanted features of every example; `splits` maps splits to their promised number of
        examples.
        """
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
                try:
                    features = parse_example(proto, wanted)
                except (NotAnExample, TypeError) as error:
                    where = f"{self.path}: client {client}, row {row}"
                    raise DataError(f"{where}: not a tf.train.Example: {error}") from None
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
        for split, promised in splits.items():
            if found[split] != promised:
                counts = f"{found[split]:,} examples, client_metadata promises {promised:,}"
                raise DataError(f"{self.path}: incomplete: split {split} holds {counts}")

    def _check_tables(self) -> None:
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
        most = (
            self.path.stat().st_size
        )  # a row takes more than a byte: more of them come from pages that run in a circle
        try:
            for count, row in enumerate(self._database.execute(query, values)):
                if count >= most:
                    raise DataError(f"{self.path}: damaged: more rows than the file has bytes")
                yield row
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise DataError(f"{self.path}: damaged: {error}") from None


def _check_header(path: Path) -> None:
    """SQLite notices a cut-off file only when it reads the missing page; the header shows it at
    once.
    """
    try:
        with open(path, "rb") as file:
            header = file.read(100)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    if not header.startswith(b"SQLite format 3\0") or len(header) < 100:
        raise DataError(f"{path}: not a SQLite database")
    page = int.from_bytes(header[16:18], "big")
    size = (65536 if page == 1 else page) * int.from_bytes(header[28:32], "big")
    trusted = header[24:28] == header[92:96]  # otherwise an old writer left the page count stale
    if trusted and path.stat().st_size < size:
        raise DataError(f"{path}: truncated: {path.stat().st_size:,} of {size:,} bytes")


def the_only(features: Mapping[str, Feature], name: str, where: str) -> bytes:
    """The single byte string of a feature."""
    values = features.get(name)
    if not isinstance(values, list) or len(values) != 1:
        raise DataError(f"{where}: feature {name!r} is missing or is not one string")
    return values[0]


_SPLITS = ("train", "test")


_FEATURES = frozenset({"tokens", "title", "tags"})


_BATCH = 8192  # sentences written at a time


Sentence = tuple[str, str, list[bytes], list[bytes]]


"""Split, client, words, tags."""


@dataclass(frozen=True, kw_only=True)
class StackOverflowOptions:
    """The names are those of the command line's options; the defaults are the paper's."""

    vocabulary: int = 10_000
    actions: int = 50
    drop_unlabelled: bool = False

    def __post_init__(self) -> None:
        check_counts(actions=self.actions, vocabulary=self.vocabulary)


def import_stackoverflow(
    path: Path | str,
    out: Path | str,
    words: Path | str,
    tags: Path | str,
    options: StackOverflowOptions | None = None,
    progress: ProgressReporter = SILENT,
) -> Path:
    """Import the published SQLite file, packed or not; keeps its training and test split."""
    path, out, options = Path(path), check_target(out), options or StackOverflowOptions()
    vocabulary = read_word_counts(Path(words), options.vocabulary)
    counts = read_tag_counts(Path(tags), options.actions)
    bag = BagOfWords([word.encode() for word in vocabulary])
    encoder = LabelEncoder([tag.encode() for tag in counts])
    with (
        unpacked(path, out, progress) as database,
        PublishedSqlite(database) as published,
        DatasetWriter(
            out,
            name=out.name,
            kind="sparse",
            shape=(len(vocabulary),),
            actions=counts,
            multilabel=True,
            vocabulary=vocabulary,
            source={"importer": "stackoverflow", "file": path.name},
            published_counts=counts.values(),
        ) as writer,
    ):
        promised = {split: published.clients(split) for split in _SPLITS}
        dropped = Dropped(client for clients in promised.values() for client in clients)
        totals = {split: sum(clients.values()) for split, clients in promised.items()}
        sentences = _sentences(published, totals, progress)
        while batch := list(islice(sentences, _BATCH)):
            for split in _SPLITS:
                chosen = [sentence for sentence in batch if sentence[0] == split]
                labels = encoder.encode([tags for _, _, _, tags in chosen])
                clients = [client for _, client, _, _ in chosen]
                keep = dropped.choose(clients, labels, options.drop_unlabelled)
                features = bag.encode([chosen[row][2] for row in keep])
                writer.add_many(
                    [clients[row] for row in keep], features, labels.take(keep), split=split
                )
        writer.source |= dropped.report()
        return writer.finish()


def _sentences(
    published: PublishedSqlite, totals: dict[str, int], progress: ProgressReporter
) -> Iterator[Sentence]:
    for split, client, row, features in published.rows(
        totals, _FEATURES, progress, "Writing sentences"
    ):
        where = f"{published.path}: client {client}, row {row}"
        words = (
            the_only(features, "title", where).split() + the_only(features, "tokens", where).split()
        )
        yield split, client, words, the_only(features, "tags", where).split(b"|")


def read_word_counts(path: Path, limit: int) -> list[str]:
    """The first `limit` words of a published word count: lines `word count`, most frequent first."""
    words: list[str] = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                fields = line.split()
                if len(fields) != 2 or not fields[1].isdigit():
                    raise DataError(f"{path}, line {number}: expected a word and its count")
                words.append(fields[0])
                if len(words) == limit:
                    break
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if not words:
        raise DataError(f"{path}: holds no words")
    if len(set(words)) < len(words):
        raise DataError(f"{path}: a word occurs twice")
    return words


def read_tag_counts(path: Path, limit: int) -> dict[str, int]:
    """The `limit` most frequent tags with their counts, most frequent first; ties keep the file's
    order.
    """
    try:
        counts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if (
        not isinstance(counts, dict)
        or not counts
        or not all(type(n) is int and n >= 0 for n in counts.values())
    ):
        raise DataError(f"{path}: expected a JSON object of tags and their counts")
    return {tag: counts[tag] for tag in sorted(counts, key=lambda tag: -counts[tag])[:limit]}
