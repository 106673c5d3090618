"""Logs in the layouts of others: Vowpal Wabbit's DSJSON, and the Open Bandit Dataset; read as
tables of decisions.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.progress import SILENT, ProgressReporter
from fedbandit.data.formats import dsjson
from fedbandit.data.formats.columns import Csv, Table
from fedbandit.data.importers.contexts import ColumnOptions
from fedbandit.data.importers.logged import LoggedOptions, import_logged, preview_logged

_OPEN_BANDIT = ("item_id", "click", "propensity_score")
_CLIENT = "client"


def import_dsjson(
    path: Path | str,
    out: Path | str,
    options: LoggedOptions,
    progress: ProgressReporter = SILENT,
    say: Callable[[str], None] = lambda text: None,
    action_name: str | None = None,
) -> Path:
    """Import a file of DSJSON; the roles of `options` are those of `dsjson_options`."""
    return import_logged(_Decisions(Path(path), action_name), out, options, progress, say)


def preview_dsjson(
    path: Path | str,
    options: LoggedOptions,
    progress: ProgressReporter = SILENT,
    action_name: str | None = None,
) -> str:
    """A preview of `import_dsjson` in words; nothing is written."""
    return preview_logged(_Decisions(Path(path), action_name), options, progress)


def dsjson_options(
    client: str, columns: ColumnOptions, test_fraction: float = 0.1
) -> LoggedOptions:
    """The options of a log in DSJSON: `client` is the feature that says whose decision it was.

    Features are named by their path in the JSON, such as `User.id`. The event's id says nothing and
    is left out unless it is the client.
    """
    roles: dict[str, Any] = {
        "client": client, "action": dsjson.ACTION, "reward": dsjson.REWARD, "propensity": dsjson.PROPENSITY,
        "available": dsjson.AVAILABLE,
    }  # fmt: skip
    given = dict(vars(columns))
    if client != "EventId" and not columns.text and not columns.features and columns.like is None:
        given["treat"] = ["EventId=ignore", *columns.treat]
    return LoggedOptions(**given, **roles, test_fraction=test_fraction)


class _Decisions(dsjson.DsJson):
    """DSJSON whose events may come without an id, which contexts do not need."""

    def __init__(self, path: Path, action_name: str | None = None) -> None:
        super().__init__(path, action_name)
        if "EventId" not in self.names:
            self._texts["EventId"] = True
            self.names = [*self._texts, *self.names[-4:]]


def import_open_bandit(
    path: Path | str,
    out: Path | str,
    options: LoggedOptions,
    progress: ProgressReporter = SILENT,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Import the file of one campaign in the layout of the Open Bandit Dataset, or its folder."""
    return import_logged(OpenBandit(Path(path)), out, options, progress, say)


def preview_open_bandit(
    path: Path | str, options: LoggedOptions, progress: ProgressReporter = SILENT
) -> str:
    """A preview of `import_open_bandit` in words; nothing is written."""
    return preview_logged(OpenBandit(Path(path)), options, progress)


def open_bandit_options(
    path: Path | str, columns: ColumnOptions, client: str | None = None, test_fraction: float = 0.1
) -> LoggedOptions:
    """The options of a log in Open Bandit's layout: contexts are the user features and the
    position.

    Without a client column, users with the same features are one client: the published files know
    no more of them.
    """
    table = Table(OpenBandit(Path(path)))
    given = dict(vars(columns))
    if not columns.text and not columns.features and columns.like is None:
        skipped = [
            name
            for name in table.names
            if not name.startswith("user_feature") and name != "position"
        ]
        owner = client or _CLIENT
        roles = (*_OPEN_BANDIT, owner)
        given["treat"] = [
            *(f"{_plain(name)}=ignore" for name in skipped if name not in roles),
            *columns.treat,
        ]
        if "position" in table.names:
            given["treat"] = ["position=category", *given["treat"]]
    own: dict[str, Any] = {
        "action": "item_id",
        "reward": "click",
        "propensity": "propensity_score",
        "client": client or _CLIENT,
    }
    return LoggedOptions(**given, **own, test_fraction=test_fraction)


def _plain(name: str) -> str:
    """A column's name as a pattern that matches it alone."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


class OpenBandit:
    """A source of rows: a campaign's file of the Open Bandit Dataset with a column for the client.

    The published files name no users; those with the same features are one client. Items have the
    names of `item_context.csv` where that lies beside it.
    """

    unit, first = "B", 2

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            files = [one for one in sorted(path.glob("*.csv")) if one.name != "item_context.csv"]
            if len(files) != 1:
                raise DataError(
                    f"{path}: {len(files)} files of decisions where one is expected; name the file"
                )
            path = files[0]
        if not path.is_file():
            raise DataError(f"{path}: no such file")
        self._csv = Csv(path)
        self.label, self.file = self._csv.label, self._csv.file
        missing = [name for name in _OPEN_BANDIT if name not in self._csv.names]
        if missing:
            raise DataError(
                f"{path}: no column {missing[0]!r}: not in the layout of the Open Bandit Dataset"
            )
        self._users = [name for name in self._csv.names if name.startswith("user_feature")]
        self._own_client = _CLIENT in self._csv.names
        if not self._own_client and not self._users:
            raise ConfigError(
                f"{path}: neither a column client nor user features say whose decisions they are"
            )
        self.names = [*self._csv.names, *([] if self._own_client else [_CLIENT])]
        self._items = _items(path.with_name("item_context.csv"))

    def size(self) -> float:
        """The bytes of the file, for progress."""
        return self._csv.size()

    def describe(self) -> str:
        """The layout and how the file is written, in words."""
        return f"Open Bandit's layout; {self._csv.describe()}"

    def records(self, names: Sequence[str]) -> Iterator[tuple[Any, float]]:
        """Record batches with these columns, made ones among them, and the bytes of each."""
        made = not self._own_client and _CLIENT in names
        read = [name for name in names if name != _CLIENT or not made]
        for record, amount in self._csv.records(
            list(dict.fromkeys([*read, *(self._users if made else [])]))
        ):
            columns = {name: record.column(name) for name in read}
            if made:
                features = [record.column(name).to_pylist() for name in self._users]
                columns[_CLIENT] = pa.array(
                    [" ".join(part[:8] for part in row) for row in zip(*features, strict=True)]
                )
            if self._items and "item_id" in columns:
                items = columns["item_id"].to_pylist()
                columns["item_id"] = pa.array(
                    [self._items.get(item, item) for item in items], pa.string()
                )
            yield pa.record_batch(columns), amount


def _items(path: Path) -> dict[str, str]:
    """The names of items by their numbers, where the file says them."""
    if not path.is_file():
        return {}
    source = Csv(path)
    if not {"item_id", "item_name"} <= set(source.names):
        return {}
    found: dict[str, str] = {}
    for record, _ in source.records(["item_id", "item_name"]):
        found |= dict(
            zip(
                record.column("item_id").to_pylist(),
                record.column("item_name").to_pylist(),
                strict=True,
            )
        )
    return found
