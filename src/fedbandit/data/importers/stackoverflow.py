"""Stack Overflow by user, from the published `stackoverflow.sqlite(.lzma)` with its word and tag counts.

One example is one sentence: the words of title and sentence, and the post's tags. The `heldout` split is left out.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from fedbandit.core.errors import DataError
from fedbandit.core.progress import SILENT, Progress
from fedbandit.data.formats.fetching import unpacked
from fedbandit.data.importers.common import Dropped, check_counts
from fedbandit.data.importers.published import PublishedSqlite, the_only
from fedbandit.data.text import BagOfWords, LabelEncoder
from fedbandit.data.writer import DatasetWriter, check_target

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
    progress: Progress = SILENT,
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
                writer.add_many([clients[row] for row in keep], features, labels.take(keep), split=split)
        writer.source |= dropped.report()
        return writer.finish()


def _sentences(published: PublishedSqlite, totals: dict[str, int], progress: Progress) -> Iterator[Sentence]:
    for split, client, row, features in published.rows(totals, _FEATURES, progress, "Writing sentences"):
        where = f"{published.path}: client {client}, row {row}"
        words = the_only(features, "title", where).split() + the_only(features, "tokens", where).split()
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
    """The `limit` most frequent tags with their counts, most frequent first; ties keep the file's order."""
    try:
        counts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if not isinstance(counts, dict) or not counts or not all(type(n) is int and n >= 0 for n in counts.values()):
        raise DataError(f"{path}: expected a JSON object of tags and their counts")
    return {tag: counts[tag] for tag in sorted(counts, key=lambda tag: -counts[tag])[:limit]}
