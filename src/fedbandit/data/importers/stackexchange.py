"""Any Stack Exchange site from the `Posts.xml` of its public dump: questions with an owner, by
user.

Read twice as a stream: once to count words and tags, once to write. Clients are held out whole.
"""

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO
from xml.etree import ElementTree

from fedbandit.core.errors import DataError
from fedbandit.core.progress import SILENT, Advance, ProgressReporter
from fedbandit.data.importers.common import Dropped, HoldOut, add_rows, check_counts
from fedbandit.data.text import BagOfWords, FrequencyCounter, LabelEncoder, tokenise
from fedbandit.data.writer import DatasetWriter, check_target

_QUESTION = "1"  # PostTypeId
_BATCH = 4096
_CHUNK = 1 << 16  # bytes parsed at a time
_DEEPEST = 16  # a dump has posts in a root and nothing else
_FOREIGN = 100_000  # elements that are no posts, and ten more for every post
_LARGEST_ELEMENT = 1 << 26  # bytes; posts have 30,000 characters
_MARKUP = re.compile(r"<[^>]*>")
_TAG = re.compile(r"[^<>|]+")  # dumps write tags as <a><b>, newer ones as |a|b|


@dataclass(frozen=True, kw_only=True)
class StackExchangeOptions:
    """The names are those of the command line's options."""

    vocabulary: int = 10_000
    actions: int = 50
    drop_unlabelled: bool = False
    test_fraction: float = 0.1

    def __post_init__(self) -> None:
        check_counts(actions=self.actions, vocabulary=self.vocabulary)
        HoldOut(self.test_fraction, by_client=True)


@dataclass(frozen=True)
class Question:
    owner: str  # empty for deleted and anonymous users
    words: list[str]
    tags: list[str]


def import_stackexchange(
    path: Path | str,
    out: Path | str,
    options: StackExchangeOptions | None = None,
    progress: ProgressReporter = SILENT,
) -> Path:
    """Import `Posts.xml`, or the folder that holds it; vocabulary and actions are its most frequent
    words and tags.
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
    bag, encoder = BagOfWords(vocabulary), LabelEncoder(actions)
    hold_out, dropped = HoldOut(options.test_fraction, by_client=True), Dropped()
    with DatasetWriter(
        out,
        name=Path(out).name,
        kind="sparse",
        shape=(len(vocabulary),),
        actions=actions,
        multilabel=True,
        vocabulary=vocabulary,
        source={"importer": "stackexchange", "file": path.name},
    ) as writer:
        questions = read_questions(path, progress, "Writing questions")
        while batch := list(islice(questions, _BATCH)):
            labels = encoder.encode([question.tags for question in batch])
            keep = dropped.choose(
                [question.owner for question in batch], labels, options.drop_unlabelled
            )
            kept = [batch[row] for row in keep]
            clients = [question.owner for question in kept]
            features = bag.encode([question.words for question in kept])
            add_rows(writer, clients, features, labels.take(keep), hold_out.is_test(clients))
        writer.source |= dropped.report()
        return writer.finish()


def read_questions(path: Path, progress: ProgressReporter, what: str) -> Iterator[Question]:
    """Stream the questions of a dump; only one question is in memory."""
    rows = 0
    with open(path, "rb") as file, progress.task(what, path.stat().st_size, unit="B") as advance:
        try:
            for element in _elements(path, file, advance):
                rows += 1
                if element.get("PostTypeId") == _QUESTION:
                    yield _question(element)
        except ElementTree.ParseError as error:
            raise DataError(f"{path}: damaged after {rows:,} posts: {error}") from None
    if not rows:
        raise DataError(f"{path}: holds no posts; expected the Posts.xml of a Stack Exchange dump")


def _elements(path: Path, file: BinaryIO, advance: Advance) -> Iterator[dict[str, str]]:
    """The attributes of every post; other elements are passed over, as long as they are few and
    small.
    """
    parser: Any = ElementTree.XMLPullParser(
        ("start", "end")
    )  # its stubs know no elements for these two events
    inside: list[ElementTree.Element] = []  # the elements that are open
    posts = others = silent = 0
    while chunk := file.read(_CHUNK):
        parser.feed(chunk)
        silent += len(chunk)
        for event, element in parser.read_events():
            silent = 0
            if event == "start":
                inside.append(element)
                if len(inside) > _DEEPEST:
                    raise DataError(
                        f"{path}: elements are nested deeper than {_DEEPEST}; not the Posts.xml of a dump"
                    )
                continue
            inside.pop()
            if element.tag == "row":
                posts += 1
                yield element.attrib
            else:
                others += 1
            if others > _FOREIGN + 10 * posts:
                raise DataError(f"{path}: holds other elements than posts: {others:,} to {posts:,}")
            if inside:
                del inside[-1][:]  # what is complete is not kept
        if silent > _LARGEST_ELEMENT:
            raise DataError(
                f"{path}: one element is larger than {_LARGEST_ELEMENT:,} bytes; not the Posts.xml of a dump"
            )
        advance(len(chunk))
    parser.close()


def _question(post: dict[str, str]) -> Question:
    text = html.unescape(_MARKUP.sub(" ", post.get("Body", "")))
    words = tokenise(f"{post.get('Title', '')} {text}")
    return Question(post.get("OwnerUserId", ""), words, _TAG.findall(post.get("Tags", "")))
