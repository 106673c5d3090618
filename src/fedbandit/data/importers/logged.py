"""Logged bandit feedback a user has: client, context, action, reward, propensity, and which actions
were available.

Rewards must be finite and propensities in (0, 1]: off-policy evaluation divides by them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.progress import SILENT, ProgressReporter
from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import Log
from fedbandit.data.formats.columns import Table, TableBatch
from fedbandit.data.importers.common import (
    Dropped,
    HoldOut,
    add_rows,
    check_counts,
    check_separator,
    take_log,
)
from fedbandit.data.importers.contexts import ColumnOptions, ContextPlan, Survey, summary
from fedbandit.data.importers.profile import ColumnOverride, ColumnReading, Profile
from fedbandit.data.text import in_natural_order, split_labels
from fedbandit.data.writer import DatasetWriter, check_target

_MANY = 20  # clients from which whole clients are held out; of fewer, a part of each


@dataclass(frozen=True, kw_only=True)
class LoggedOptions(ColumnOptions):
    """Which columns of a log mean what; the names are those of the command line's options.

    `available` lists the actions that could be taken at each row, in a list or in a cell with a
    separator; an empty cell means all.
    """

    client: str
    action: str
    reward: str
    propensity: str
    available: str | None = None
    separator: str = "|"
    actions: int | None = None  # whole-number actions 0..N-1; None: the names that occur
    test_fraction: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(actions=self.actions)
        check_separator("separator", self.separator)
        HoldOut(self.test_fraction, by_client=True)
        if self.like is not None and self.actions is not None:
            raise ConfigError("like: the other data set names the actions; leave out actions")

    @property
    def roles(self) -> list[str]:
        """The columns that are no part of a context."""
        own = [self.client, self.action, self.reward, self.propensity]
        return [*own, *([self.available] if self.available else [])]


def import_logged(
    source: Any,
    out: Path | str,
    options: LoggedOptions,
    progress: ProgressReporter = SILENT,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Import a CSV or Parquet file or a frame of logged decisions, and return the folder of the
    data set.

    From 20 clients on whole clients are held out; of fewer, a part of each one's rows. An action
    that is not known, a reward that is not finite or a propensity outside (0, 1] is refused with
    its row.
    """
    check_target(out)
    found = _Found.of(source, options, progress)
    say(found.summary(options))
    table, plan = found.table, found.plan
    encode = plan.encoding()
    hold_out, dropped = HoldOut(options.test_fraction, by_client=found.clients >= _MANY), Dropped()
    with DatasetWriter(
        out,
        name=Path(out).name,
        actions=found.actions,
        logged=True,
        source={"importer": "logged", "file": table.source.file, "columns": plan.names},
        **plan.header(),
    ) as writer:
        for batch in table.batches(
            [*plan.names, *options.roles], progress=progress, what="Writing decisions"
        ):
            clients = batch.names(options.client)
            no_labels = Ragged(np.zeros(len(batch) + 1, np.int64), np.empty(0, np.int32))
            keep = dropped.choose(clients, no_labels, drop_unlabelled=False)
            log = take_log(found.log(batch, options), keep)
            owners = [clients[row] for row in keep.tolist()]
            add_rows(
                writer,
                owners,
                encode(batch, keep),
                no_labels.take(keep),
                hold_out.is_test(owners),
                log,
            )
        writer.source |= dropped.report()
        return writer.finish()


def preview_logged(source: Any, options: LoggedOptions, progress: ProgressReporter = SILENT) -> str:
    """A preview of `import_logged` in words; nothing is written."""
    return _Found.of(source, options, progress).summary(options)


@dataclass(frozen=True)
class _Found:
    """All that the first passes have found."""

    table: Table
    plan: ContextPlan
    actions: list[str]
    codes: dict[str, int]
    reward: ColumnReading
    propensity: ColumnReading
    clients: int
    rows: int
    like: str = ""

    @classmethod
    def of(cls, source: Any, options: LoggedOptions, progress: ProgressReporter) -> "_Found":
        table = options.table(source)
        table.require(options.roles)
        survey = Survey(table, options, options.roles)
        profiles = [
            Profile(name, ColumnOverride("raw")) for name in (options.reward, options.propensity)
        ]
        names: set[str] = set()
        clients: set[str] = set()
        rows = 0
        for batch in table.batches(
            [*options.roles, *survey.names], progress=progress, what="Looking at the columns"
        ):
            clients.update(batch.names(options.client))
            rows += len(batch)
            names.update(batch.names(options.action))
            if options.available:
                names.update(name for row in _sets(batch, options) for name in row)
            for profile in profiles:
                profile.add(batch)
            survey.add(batch)
        plan = survey.decide(progress)
        names.discard("")
        if not names:
            raise DataError(f"{table.column(options.action)}: names no action")
        actions = in_natural_order(names)
        if options.actions is not None:
            actions = [str(code) for code in range(options.actions)]
        like = survey.like
        if like is not None:
            actions = list(like.header.actions)
        reward, propensity = (_reading(profile, table) for profile in profiles)
        codes = {name: code for code, name in enumerate(actions)}
        known = "" if like is None else like.header.name
        return cls(
            table, plan, actions, codes, reward, propensity, len(clients - {""}), rows, known
        )

    def summary(self, options: LoggedOptions) -> str:
        """The columns and what becomes of each, as text."""
        roles = [
            (options.client, f"the client: {self.clients:,} of them"),
            (options.action, f"the action that was taken: {len(self.actions):,} of them"),
            (options.reward, "its reward"),
            (options.propensity, "its probability"),
        ]
        if options.available:
            roles.append((options.available, "the actions that could be taken"))
        return summary(self.table, roles, self.plan, [f"rows: {self.rows:,}"])

    def log(self, batch: TableBatch, options: LoggedOptions) -> Log:
        """The feedback of a batch."""
        actions = np.empty(len(batch), np.int32)
        for row, name in enumerate(batch.names(options.action)):
            actions[row] = self._code(name, batch, options.action, row)
        rewards = _numbers(batch, self.reward)
        propensities = _numbers(batch, self.propensity)
        bad = np.flatnonzero(~((propensities.astype(np.float32) > 0) & (propensities <= 1)))
        if len(bad):
            where = batch.place(options.propensity, int(bad[0]))
            raise DataError(
                f"{where}: a propensity must be above 0 and at most 1, found {propensities[bad[0]]}"
            )
        available = self._available(batch, options, actions)
        return Log(actions, rewards.astype(np.float32), propensities.astype(np.float32), available)

    def _available(
        self, batch: TableBatch, options: LoggedOptions, actions: np.ndarray
    ) -> Ragged | None:
        """The sets of available actions; an empty cell means that every action was."""
        if not options.available:
            return None
        everything = list(range(len(self.codes)))
        column, sets = options.available, []
        for row, names in enumerate(_sets(batch, options)):
            chosen = sorted({self._code(name, batch, column, row) for name in names}) or everything
            if int(actions[row]) not in chosen:
                raise DataError(
                    f"{batch.place(column, row)}: the action that was taken is not among the available ones"
                )
            sets.append(chosen)
        return Ragged.from_rows(sets)

    def _code(self, name: str, batch: TableBatch, column: str, row: int) -> int:
        if name not in self.codes:
            of = f" among those of {self.like}" if self.like else ""
            raise DataError(
                f"{batch.place(column, row)}: {f'no action called {name!r}{of}' if name else 'the action is missing'}"
            )
        return self.codes[name]


def _sets(batch: TableBatch, options: LoggedOptions) -> list[list[str]]:
    """The names in the column of available actions: a list, or a cell with a separator."""
    assert options.available is not None
    array = batch.array(options.available)
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        return [
            [str(one).strip() for one in found or [] if one is not None]
            for found in array.to_pylist()
        ]
    return [split_labels(cell, options.separator) for cell in batch.names(options.available)]


def _reading(profile: Profile, table: Table) -> ColumnReading:
    """Numbers, or what is true and false."""
    try:
        return profile.decide(categories=2, scale="none")
    except DataError:
        flags = profile.decide_flags()
        if flags is None:
            raise DataError(f"{table.column(profile.name)}: holds no numbers") from None
        return flags


def _numbers(batch: TableBatch, reading: ColumnReading) -> np.ndarray:
    """A column without gaps: float64 [rows]."""
    found = reading.cells(batch)
    assert isinstance(found, np.ndarray)
    batch.check_finite(reading.name, found)
    return found
