"""Logged bandit feedback a user has: client, context, action, reward, propensity, and which actions were available.

Rewards must be finite and propensities in (0, 1]: off-policy evaluation divides by them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.core.progress import SILENT, Progress
from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import Log
from fedbandit.data.formats.columns import Table, TableBatch
from fedbandit.data.importers.common import Dropped, HoldOut, add_rows, check_table_options, take_log
from fedbandit.data.text import BagOfWords, FrequencyCounter, in_natural_order, split_labels, tokenise
from fedbandit.data.writer import DatasetWriter, check_target


@dataclass(frozen=True, kw_only=True)
class LoggedOptions:
    """Which columns mean what; the names are those of the command line's options."""

    client: str
    action: str
    reward: str
    propensity: str
    text: Sequence[str] = ()
    features: Sequence[str] = ()
    available: str | None = None
    separator: str = "|"
    vocabulary: int = 10_000
    actions: int | None = None  # whole-number actions 0..N-1; None: the names that occur
    test_fraction: float = 0.1

    def __post_init__(self) -> None:
        check_table_options(
            text=self.text,
            features=self.features,
            vocabulary=self.vocabulary,
            actions=self.actions,
            test_fraction=self.test_fraction,
            separator=self.separator,
        )


def import_logged(path: Path | str, out: Path | str, options: LoggedOptions, progress: Progress = SILENT) -> Path:
    """Import a CSV or Parquet file of logged decisions; clients are held out whole."""
    check_target(out)
    table = Table(path)
    features = table.matching(options.features)
    texts = [*options.text, options.client, options.action, *([options.available] if options.available else [])]
    numbers = [*features, options.reward, options.propensity]
    table.require([*texts, *numbers])
    words, actions = _count(table, options, texts, progress)
    bag, codes = BagOfWords(words), {name: code for code, name in enumerate(actions)}
    hold_out, dropped = HoldOut(options.test_fraction, by_client=True), Dropped()
    with DatasetWriter(
        out,
        name=Path(out).name,
        kind="dense" if features else "sparse",
        shape=(len(features) if features else len(words),),
        actions=actions,
        logged=True,
        vocabulary=None if features else words,
        source={"importer": "logged", "file": table.path.name, "columns": features or list(options.text)},
    ) as writer:
        for batch in table.batches(texts, numbers, progress=progress, what="Writing decisions"):
            log = _log(batch, options, codes)
            clients = batch.texts(options.client)
            no_labels = Ragged(np.zeros(len(batch) + 1, np.int64), np.empty(0, np.int32))
            keep = dropped.choose(clients, no_labels, drop_unlabelled=False)
            owners = [clients[row] for row in keep]
            if features:
                contexts: np.ndarray | Ragged = batch.numbers(features)[keep]
            else:
                sentences = batch.joined(options.text)
                contexts = bag.encode([tokenise(sentences[row]) for row in keep])
            add_rows(writer, owners, contexts, no_labels.take(keep), hold_out.is_test(owners), take_log(log, keep))
        writer.source |= dropped.report()
        return writer.finish()


def _count(table: Table, options: LoggedOptions, texts: list[str], progress: Progress) -> tuple[list[str], list[str]]:
    """The first pass: the most frequent words, and the names of all actions."""
    words = FrequencyCounter()
    names: set[str] = set()
    for batch in table.batches(texts, progress=progress, what="Counting words and actions"):
        for text in batch.joined(options.text):
            words.add(tokenise(text))
        names.update(name.strip() for name in batch.texts(options.action))
        if options.available:
            for cell in batch.texts(options.available):
                names.update(split_labels(cell, options.separator))
    if options.actions is not None:
        return words.top(options.vocabulary), [str(code) for code in range(options.actions)]
    names.discard("")
    if not names:
        raise DataError(f"{table.path}: column {options.action} names no action")
    return words.top(options.vocabulary), in_natural_order(names)


def _log(batch: TableBatch, options: LoggedOptions, codes: dict[str, int]) -> Log:
    actions = np.empty(len(batch), np.int32)
    for row, cell in enumerate(batch.texts(options.action)):
        actions[row] = _code(cell.strip(), codes, batch.place(options.action, row))
    propensities = batch.exact(options.propensity)
    bad = np.flatnonzero(~((propensities.astype(np.float32) > 0) & (propensities <= 1)))
    if len(bad):
        where = batch.place(options.propensity, int(bad[0]))
        raise DataError(f"{where}: a propensity must be above 0 and at most 1, found {propensities[bad[0]]}")
    rewards = batch.exact(options.reward).astype(np.float32)
    return Log(actions, rewards, propensities.astype(np.float32), _available(batch, options, codes, actions))


def _available(batch: TableBatch, options: LoggedOptions, codes: dict[str, int], actions: np.ndarray) -> Ragged | None:
    """The sets of available actions; an empty cell means that every action was."""
    if not options.available:
        return None
    everything = list(range(len(codes)))
    sets = []
    for row, cell in enumerate(batch.texts(options.available)):
        where = batch.place(options.available, row)
        chosen = sorted({_code(name, codes, where) for name in split_labels(cell, options.separator)}) or everything
        if int(actions[row]) not in chosen:
            raise DataError(f"{where}: the action that was taken is not among the available ones")
        sets.append(chosen)
    return Ragged.from_rows(sets)


def _code(name: str, codes: dict[str, int], where: str) -> int:
    if name not in codes:
        raise DataError(f"{where}: {f'no action called {name!r}' if name else 'the action is missing'}")
    return codes[name]
