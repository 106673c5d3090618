"""Questions with tags, by user: any Stack Exchange site from the `Posts.xml` of its public dump, and
Stack Overflow from the published `stackoverflow.sqlite(.lzma)` with its word and tag counts.

A dump is streamed twice: once to count words and tags, once to write; clients are held out whole.
An example of the published file is one sentence: the words of title and sentence, and the post's
tags; its `heldout` split is left out.
"""

import html
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, AnyStr, Generic, NamedTuple
from xml.parsers import expat

import numpy as np

from fedbandit.core.errors import DataError, explaining, refuse
from fedbandit.core.progress import SILENT, ProgressReporter
from fedbandit.core.ragged import Ragged
from fedbandit.data.importers import (
    Dropped,
    HoldOut,
    JsonGuard,
    Rows,
    check_counts,
    unlabelled,
    write_rows,
)
from fedbandit.data.importers.published import Feature, open_published
from fedbandit.data.text import BagOfWords, FrequencyCounter, LabelEncoder, tokenise
from fedbandit.data.writer import DatasetWriter, check_target

_QUESTION = "1"  # PostTypeId
_BATCH = 4096  # questions encoded at a time
_CHUNK = 1 << 16  # bytes parsed at a time
_DEEPEST = 16  # a dump has posts in a root and nothing else
_FOREIGN = 100_000  # elements that are no posts, and ten more for every post
_LARGEST_ELEMENT = 1 << 23  # bytes; posts have 30,000 characters
_LARGEST_COUNTS = 1 << 24  # bytes, for some 500,000 tags
_LONGEST = 1 << 16  # characters of a line of counts
_MARKUP = re.compile(r"<[^>]*>")
_TAG = re.compile(r"[^<>|]+")  # dumps write tags as <a><b>, newer ones as |a|b|


@dataclass(frozen=True, kw_only=True)
class StackOverflowOptions:
    """The names are those of the command line's options; the defaults are the paper's."""

    vocabulary: int = 10_000
    actions: int = 50
    drop_unlabelled: bool = False

    def __post_init__(self) -> None:
        check_counts(actions=self.actions, vocabulary=self.vocabulary)


@dataclass(frozen=True, kw_only=True)
class StackExchangeOptions(StackOverflowOptions):
    """The names are those of the command line's options."""

    test_fraction: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        HoldOut(self.test_fraction, by_client=True)


class Question(NamedTuple, Generic[AnyStr]):
    """A tagged text of one user; words and tags of the published file are bytes."""

    owner: str  # empty for deleted and anonymous users
    words: list[AnyStr]
    tags: list[AnyStr]
    is_test: bool | None = None  # None: the hold-out decides


def import_stackexchange(
    path: Path | str,
    out: Path | str,
    options: StackExchangeOptions | None = None,
    progress: ProgressReporter = SILENT,
) -> Path:
    """Import `Posts.xml`, or the folder that holds it; vocabulary and actions are its most frequent
    words and tags.

    A client is a user, an example a question with the words of its title and body. Questions of
    deleted and anonymous users are dropped and counted, and so are those without any kept tag if
    the options say it. Whole users are held out for testing.
    """
    path, options = Path(path), options or StackExchangeOptions()
    check_target(out)
    path = path / "Posts.xml" if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"{path}: no such file; unpack the dump's archive first")
    words, tags = FrequencyCounter(), FrequencyCounter()
    for question in read_questions(path, progress, "Counting words and tags"):
        if question.owner:
            words.add(question.words)
            tags.add(question.tags)
    actions, vocabulary = tags.top(options.actions), words.top(options.vocabulary)
    if not actions:
        raise DataError(f"{path}: no question with an owner and tags")
    with _writer(out, actions, vocabulary, importer="stackexchange", file=path.name) as writer:
        questions = read_questions(path, progress, "Writing questions")
        batches = _rows(questions, BagOfWords(vocabulary), LabelEncoder(actions), options)
        hold_out = HoldOut(options.test_fraction, by_client=True)
        return write_rows(writer, batches, hold_out, Dropped())


def import_stackoverflow(
    path: Path | str,
    out: Path | str,
    words: Path | str,
    tags: Path | str,
    options: StackOverflowOptions | None = None,
    progress: ProgressReporter = SILENT,
) -> Path:
    """Import Stack Overflow's published SQLite file, packed or not; keeps its training and test
    split.

    `words` and `tags` are the published files of counts: the most frequent of each are vocabulary
    and actions, and the tags' counts go into the header, for rewards by rarity over the whole site
    rather than over the examples at hand.
    """
    path, options = Path(path), options or StackOverflowOptions()
    check_target(out)
    vocabulary = read_word_counts(Path(words), options.vocabulary)
    counts = read_tag_counts(Path(tags), options.actions)
    bag = BagOfWords([word.encode() for word in vocabulary])
    encoder = LabelEncoder([tag.encode() for tag in counts])
    dropped = Dropped()
    with _writer(out, counts, vocabulary, importer="stackoverflow", file=path.name) as writer:
        sentences = _sentences(path, writer.staging / "unpacked", dropped, progress)
        return write_rows(writer, _rows(sentences, bag, encoder, options), dropped=dropped)


def _writer(
    out: Path | str, actions: Collection[str], vocabulary: list[str], **source: str
) -> DatasetWriter:
    """A writer of texts with tags; published counts of the tags go with them."""
    return DatasetWriter(
        out,
        kind="sparse",
        shape=(len(vocabulary),),
        actions=actions,
        multilabel=True,
        vocabulary=vocabulary,
        source=source,
        published_counts=actions.values() if isinstance(actions, Mapping) else None,
    )


def _rows(
    questions: Iterator[Question[AnyStr]],
    bag: BagOfWords[AnyStr],
    encoder: LabelEncoder[AnyStr],
    options: StackOverflowOptions,
) -> Iterator[Rows]:
    """The questions in batches."""
    while batch := list(islice(questions, _BATCH)):
        labels = encoder.encode([question.tags for question in batch])
        is_test = [question.is_test for question in batch]
        yield Rows(
            [question.owner for question in batch],
            partial(_contexts, bag, batch),
            labels,
            unlabelled(labels) if options.drop_unlabelled else {},
            None if is_test[0] is None else np.array(is_test),
        )


def _contexts(
    bag: BagOfWords[AnyStr], questions: Sequence[Question[AnyStr]], rows: np.ndarray
) -> Ragged:
    """The words of some questions as sparse rows."""
    return bag.encode([questions[row].words for row in rows])


def read_questions(path: Path, progress: ProgressReporter, what: str) -> Iterator[Question[str]]:
    """Stream the questions of a dump; only those of one chunk of the file are in memory."""
    posts = _Posts(path)
    with open(path, "rb") as file, progress.task(what, path.stat().st_size, unit="B") as advance:
        while chunk := file.read(_CHUNK):
            yield from posts.feed(chunk)
            advance(len(chunk))
        yield from posts.feed(b"")
    if not posts.seen:
        raise DataError(f"{path}: holds no posts; expected the Posts.xml of a Stack Exchange dump")


class _Posts:
    """Finds the questions in the XML of a dump, chunk by chunk.

    Other elements than posts are passed over, as long as they are few, small and not nested; a file
    that declares entities of its own, which can stand for any amount of text, is refused.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._questions = path, list[Question[str]]()
        self.seen = self._others = self._depth = self._silent = 0
        self._parser = expat.ParserCreate()
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.EntityDeclHandler = self._entity

    def feed(self, chunk: bytes) -> list[Question[str]]:
        """The questions that are complete with the next bytes; none are the end of the file."""
        self._questions, self._silent = [], self._silent + len(chunk)
        with explaining(f"{self._path}: damaged after {self.seen:,} posts", expat.ExpatError):
            self._parser.Parse(chunk, not chunk)
        if self._silent > _LARGEST_ELEMENT:
            raise DataError(
                f"{self._path}: one element is larger than {_LARGEST_ELEMENT:,} bytes; not the Posts.xml of a dump"
            )
        return self._questions

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._silent, self._depth = 0, self._depth + 1
        if self._depth > _DEEPEST:
            raise DataError(
                f"{self._path}: elements are nested deeper than {_DEEPEST}; not the Posts.xml of a dump"
            )
        if name != "row":
            self._others += 1
        else:
            self.seen += 1
            if attributes.get("PostTypeId") == _QUESTION:
                self._questions.append(_question(attributes))
        if self._others > _FOREIGN + 10 * self.seen:
            found = f"{self._others:,} to {self.seen:,}"
            raise DataError(f"{self._path}: holds other elements than posts: {found}")

    def _end(self, name: str) -> None:
        self._silent, self._depth = 0, self._depth - 1

    def _entity(self, name: str, *declared: Any) -> None:
        raise DataError(
            f"{self._path}: declares the entity {name[:40]!r}; not the Posts.xml of a dump"
        )


def _question(post: dict[str, str]) -> Question[str]:
    """A post's words, without markup, and its tags.

    Title and body are one text. The owner is "" where the dump names none.
    """
    text = html.unescape(_MARKUP.sub(" ", post.get("Body", "")))
    words = tokenise(f"{post.get('Title', '')} {text}")
    return Question(post.get("OwnerUserId", ""), words, _TAG.findall(post.get("Tags", "")))


def _sentences(
    path: Path, copy: Path, dropped: Dropped, progress: ProgressReporter
) -> Iterator[Question[bytes]]:
    """The examples of a published file as questions; `dropped` learns which clients it lists."""
    wanted = ("title", "tokens", "tags")
    with open_published(path, copy, progress) as published:
        promised = {split: published.clients(split) for split in ("train", "test")}
        dropped.seen.update(*promised.values())
        rows = published.rows(promised, wanted, progress, "Writing sentences")
        for split, client, row, features in rows:
            where = f"{path}: client {client}, row {row}"
            title, tokens, tags = (_the_only(features, name, where) for name in wanted)
            yield Question(
                client, title.split() + tokens.split(), tags.split(b"|"), split == "test"
            )


def _the_only(features: Mapping[str, Feature], name: str, where: str) -> bytes:
    """The single byte string of a feature."""
    values = features.get(name)
    if not isinstance(values, list) or len(values) != 1:
        raise DataError(f"{where}: feature {name!r} is missing or is not one string")
    return values[0]


def read_word_counts(path: Path, limit: int) -> list[str]:
    """The first `limit` words of a published word count: lines `word count`, most frequent first."""
    words: list[str] = []
    unreadable = explaining(f"{path}: cannot be read", OSError, UnicodeDecodeError)
    with unreadable, open(path, encoding="utf-8") as file:
        lines = iter(lambda: file.readline(_LONGEST), "")
        for number, line in enumerate(islice(lines, limit), start=1):
            fields = line.split()
            if len(fields) != 2 or not fields[1].isdigit():
                raise DataError(f"{path}, line {number}: expected a word and its count")
            words.append(fields[0])
    refuse(
        (not words, f"{path}: holds no words"),
        (len(set(words)) < len(words), f"{path}: a word occurs twice"),
        error=DataError,
    )
    return words


def read_tag_counts(path: Path, limit: int) -> dict[str, int]:
    """The `limit` most frequent tags with their counts, most frequent first; ties keep the file's
    order.
    """
    with explaining(f"{path}: cannot be read", OSError, ValueError, RecursionError):
        with open(path, "rb") as file:
            text = file.read(_LARGEST_COUNTS)
        JsonGuard(str(path)).check(text)
        counts = json.loads(text)
    if (
        not isinstance(counts, dict)
        or not counts
        or not all(type(n) is int and n >= 0 for n in counts.values())
    ):
        raise DataError(f"{path}: expected a JSON object of tags and their counts")
    return {tag: counts[tag] for tag in sorted(counts, key=lambda tag: -counts[tag])[:limit]}
