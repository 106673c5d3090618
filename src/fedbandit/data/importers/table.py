"""Any table a user has: a client id, text or feature columns, and labels, from CSV or Parquet.

Read twice: once to count words and labels, once to write. Only counts and one batch are in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.core.progress import SILENT, Progress
from fedbandit.data.formats.columns import Table, TableBatch
from fedbandit.data.importers.common import Dropped, HoldOut, add_rows, check_table_options
from fedbandit.data.text import (
    BagOfWords,
    FrequencyCounter,
    LabelEncoder,
    case_map,
    in_natural_order,
    split_labels,
    tokenise,
)
from fedbandit.data.writer import DatasetWriter, check_target

_SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Which columns mean what; the names are those of the command line's options."""

    client: str
    labels: str
    text: Sequence[str] = ()
    features: Sequence[str] = ()
    split: str | None = None
    label_separator: str = "|"
    vocabulary: int = 10_000
    actions: int | None = None  # None: 50 for text, every label for features
    drop_unlabelled: bool = False
    test_fraction: float = 0.1

    def __post_init__(self) -> None:
        check_table_options(
            text=self.text,
            features=self.features,
            vocabulary=self.vocabulary,
            actions=self.actions,
            test_fraction=self.test_fraction,
            label_separator=self.label_separator,
        )

    @property
    def most_actions(self) -> int | None:
        return self.actions if self.actions is not None or self.features else 50


@dataclass(frozen=True)
class _Counts:
    words: list[str]
    actions: list[str]
    multilabel: bool


def import_table(path: Path | str, out: Path | str, options: TableOptions, progress: Progress = SILENT) -> Path:
    """Import a CSV or Parquet file; vocabulary and actions are its most frequent words and labels."""
    check_target(out)
    table = Table(path)
    features = table.matching(options.features)
    texts = [*options.text, options.client, options.labels, *([options.split] if options.split else [])]
    table.require(texts)
    counts = _count(table, options, texts, progress)
    writer = DatasetWriter(
        out,
        name=Path(out).name,
        kind="dense" if features else "sparse",
        shape=(len(features) if features else len(counts.words),),
        actions=counts.actions,
        multilabel=counts.multilabel,
        lower_case=case_map(counts.actions),
        vocabulary=None if features else counts.words,
        source={"importer": "table", "file": table.path.name, "columns": features or list(options.text)},
    )
    bag, encoder = BagOfWords(counts.words), LabelEncoder(counts.actions)
    hold_out = HoldOut(options.test_fraction, by_client=not features)
    dropped = Dropped()
    with writer:
        for batch in table.batches(texts, features, progress=progress, what="Writing examples"):
            clients = batch.texts(options.client)
            names = [split_labels(cell, options.label_separator) for cell in batch.texts(options.labels)]
            labels = encoder.encode(names)
            keep = dropped.choose(clients, labels, options.drop_unlabelled)
            clients, labels = [clients[row] for row in keep], labels.take(keep)
            if features:
                contexts = batch.numbers(features)[keep]
            else:
                texts_of_rows = batch.joined(options.text)
                contexts = bag.encode([tokenise(texts_of_rows[row]) for row in keep])
            is_test = _test_rows(batch, options.split)[keep] if options.split else hold_out.is_test(clients)
            add_rows(writer, clients, contexts, labels, is_test)
        writer.source |= dropped.report()
        return writer.finish()


def _count(table: Table, options: TableOptions, texts: list[str], progress: Progress) -> _Counts:
    """The first pass. With a split column only training rows count; without one all of them do."""
    words, labels = FrequencyCounter(), FrequencyCounter()
    multilabel = False
    what = "Counting words and labels" if options.text else "Counting labels"
    for batch in table.batches(texts, progress=progress, what=what):
        rows = list(range(len(batch)))
        if options.split:
            rows = np.flatnonzero(~_test_rows(batch, options.split)).tolist()
        cells = batch.texts(options.labels)
        for row in rows:
            names = split_labels(cells[row], options.label_separator)
            multilabel |= len(names) > 1
            labels.add(names)
        if options.text:
            sentences = batch.joined(options.text)
            for row in rows:
                words.add(tokenise(sentences[row]))
    actions = labels.top(options.most_actions)
    if not actions:
        raise DataError(f"{table.path}: column {options.labels} has no labels")
    if options.most_actions is None or not options.text:
        actions = in_natural_order(actions)
    return _Counts(words.top(options.vocabulary), actions, multilabel)


def _test_rows(batch: TableBatch, column: str) -> np.ndarray:
    cells = batch.texts(column)
    unknown = next((row for row, cell in enumerate(cells) if cell.strip().lower() not in _SPLITS), None)
    if unknown is not None:
        raise DataError(f"{batch.place(column, unknown)}: expected train or test, found {cells[unknown]!r}")
    return np.array([_SPLITS[cell.strip().lower()] == "test" for cell in cells])
