"""Logs of other tools, read as tables: Vowpal Wabbit's DSJSON, and the Open Bandit Dataset's layout.

A line of DSJSON is one JSON object; its row has a column for each feature of the context
(`User.age`), and four that say what was done. Lines are checked one by one: they are a stranger's.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from fedbandit.core.errors import ConfigError, DataError, explaining
from fedbandit.core.parts import nearest
from fedbandit.data.encoder import LARGEST
from fedbandit.data.importers import MOST_ACTIONS, JsonGuard
from fedbandit.data.importers.columns import Csv, Table, exactly
from fedbandit.data.importers.contexts import ColumnOptions
from fedbandit.data.importers.items import ItemOptions
from fedbandit.data.importers.tables import LoggedOptions

ACTION, REWARD, PROPENSITY = "the action", "the reward", "the propensity"
AVAILABLE, _ITEM = "the available", "the item"
_OWN = {
    ACTION: pa.string(),
    REWARD: pa.float64(),
    PROPENSITY: pa.float64(),
    AVAILABLE: pa.list_(pa.string()),
}
_MARK = "fedbandit"  # in events that `data export` has written
_LONGEST = 16 << 20  # bytes of a line
_LONG = 1 << 16  # bytes of a line that are looked at before they are parsed
_ROWS, _CELLS, _BYTES = 4096, 1_000_000, 64 << 20  # at a time
_MOST_FEATURES = 10_000
_DEEPEST = 5
_OPEN_BANDIT = ("item_id", "click", "propensity_score")
_CLIENT = "client"


def dsjson_options(
    client: str,
    columns: ColumnOptions,
    test_fraction: float = 0.1,
    source: "DsJson | None" = None,
) -> LoggedOptions:
    """The options of a log in DSJSON: `client` is the feature that says whose decision it was.

    Features are named by their path in the JSON, such as `User.id`. The event's id says nothing and
    is left out unless it is the client. Where `source` has actions with features, they are items
    of a catalogue. A file that `data export` wrote holds features as models see them, and they are
    taken as they are.
    """
    encoded = source is not None and source.encoded
    treat = _all_as("raw", source.names, {client, *_OWN}) if source and encoded else []
    treat += [] if client == "EventId" else ["EventId=ignore"]
    items = None
    if source is not None and source.items is not None:
        raw = _all_as("raw", source.items.column_names, {_ITEM}) if encoded else []
        items = ItemOptions(
            table=source.items, column=_ITEM, candidates=AVAILABLE, columns=_of_items(columns, raw)
        )
    return LoggedOptions(
        **_found(columns, treat),
        client=client,
        action=ACTION,
        reward=REWARD,
        propensity=PROPENSITY,
        available=None if items else AVAILABLE,
        items=items,
        test_fraction=test_fraction,
    )


def open_bandit_options(
    path: Path | str,
    columns: ColumnOptions,
    client: str | None = None,
    test_fraction: float = 0.1,
    item_features: bool = False,
) -> LoggedOptions:
    """The options of a log in Open Bandit's layout: contexts are the user features and the
    position.

    Without a client column, users with the same features are one client: the published files know
    no more of them. With `item_features` actions are the items of `item_context.csv` with their
    features, and all of them are candidates of every decision.
    """
    source, client = OpenBandit(Path(path), item_features), client or _CLIENT
    names = Table(source).names
    used = {name for name in names if name.startswith("user_feature") or name == "position"}
    treat = ["position=category"] if "position" in used else []
    treat += _all_as("ignore", names, {*used, *_OPEN_BANDIT, client})
    items = None
    if item_features:
        names = Table(source.item_file).names
        used = {name for name in names if name.startswith("item_feature")}
        reading = _of_items(columns, _all_as("ignore", names, {*used, "item_id"}))
        items = ItemOptions(
            table=source.item_file, column="item_id", negatives="all", columns=reading
        )
    return LoggedOptions(
        **_found(columns, treat),
        client=client,
        action="item_id",
        reward="click",
        propensity="propensity_score",
        items=items,
        test_fraction=test_fraction,
    )


def _all_as(kind: str, names: Sequence[str], others: Collection[str]) -> list[str]:
    """Overrides that make columns one kind, but for the others."""
    return [f"{exactly(name)}={kind}" for name in names if name not in others]


def _found(columns: ColumnOptions, treat: list[str]) -> dict[str, Any]:
    """The options with a layout's own overrides, unless they name the columns themselves."""
    if columns.text or columns.features or columns.like is not None:
        return dict(vars(columns))
    return {**vars(columns), "treat": [*treat, *columns.treat]}


def _of_items(columns: ColumnOptions, treat: list[str]) -> ColumnOptions:
    """The same options for the table of items, with overrides of its own."""
    return replace(columns, treat=treat, features=(), text=())


class DsJson:
    """A source of rows: a file of decisions in Vowpal Wabbit's DSJSON, one JSON object a line.

    Features of the shared context become columns, by their path. Rewards are costs with the other
    sign. Lines without a cost, and those marked not to be learned from, are skipped and counted.
    `action_name` is the feature of an action that names it; without it the tag, id or name does.
    Actions with further features are `items`, a table with a row for each; an action whose features
    differ between decisions is an item for each. `fixed` takes them by their names alone.
    """

    unit, first = "B", 1

    def __init__(self, path: Path, action_name: str | None = None, fixed: bool = False) -> None:
        self.path, self.label, self.file = path, str(path), path.name
        self._action_name = action_name
        self._items: dict[tuple[str, tuple[Any, ...]], str] | None = None if fixed else {}
        self.encoded = False  # whether features are as a data set has them
        self._versions: Counter[str] = Counter()
        self.skipped = 0
        if not path.is_file():
            raise DataError(
                f"{path}: {'is a folder, not a file' if path.is_dir() else 'no such file'}"
            )
        self.size: float | None = path.stat().st_size
        self._texts: dict[str, bool] = {}  # feature -> whether it holds anything but numbers
        for event, _ in self._events():
            _note_texts(self._texts, event["features"])
            if len(self._texts) > _MOST_FEATURES:
                raise DataError(f"{path}: more than {_MOST_FEATURES:,} features of contexts")
        if not self._texts:
            raise DataError(
                f"{path}: no line holds a decision with its cost, its probability and a context"
            )
        left = f"; {self.skipped:,} lines without a decision to learn from are left out"
        self.kind = f"DSJSON{left if self.skipped else ''}"
        self._texts.setdefault("EventId", True)  # contexts can do without
        self.names = [*self._texts, *_OWN]
        self.items: Any = None
        if self._items and any(features for _, features in self._items):
            self.items = _item_table(self._items)
        else:  # names alone: fixed actions, each of which is listed once
            self._items = None
            for _ in self._events():
                pass

    def records(self, names: Sequence[str]) -> Iterator[tuple[Any, float]]:
        """Record batches with these columns, and the bytes of their lines."""
        rows: list[dict[str, Any]] = []
        read, most = 0, max(1, min(_ROWS, _CELLS // len(self.names)))
        for event, length in self._events():
            rows.append(event)
            read += length
            if len(rows) >= most or read >= _BYTES:
                yield self._record(rows, names), read
                rows, read = [], 0
        if rows:
            yield self._record(rows, names), read

    def _record(self, rows: list[dict[str, Any]], names: Sequence[str]) -> Any:
        """Rows as a record batch: what was done, and features by their path."""
        features = [row["features"] for row in rows]
        return pa.record_batch(
            {
                name: pa.array([row[name] for row in rows], _OWN[name])
                if name in _OWN
                else _column(features, name, self._texts[name])
                for name in names
            }
        )

    def _events(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Every decision of the file that can be learned from, and the bytes of its line."""
        self.skipped = 0
        with open(self.path, "rb") as file:
            number = 0
            while line := file.readline(_LONGEST):
                number += 1
                if len(line) >= _LONGEST:
                    raise DataError(
                        f"{self.path}, line {number}: is longer than {_LONGEST:,} bytes"
                    )
                if not line.strip():
                    continue
                where = f"{self.path}, line {number}"
                if len(line) > _LONG:
                    JsonGuard(where).check(line)
                with explaining(f"{where}: not JSON", ValueError, RecursionError):
                    found = json.loads(line)
                event = self._event(found, where)
                if event is None:
                    self.skipped += 1
                else:
                    yield event, len(line)

    def _event(self, found: Any, where: str) -> dict[str, Any] | None:
        """A line as a row; None if it holds no decision, or one that is not to be learned from."""
        if not isinstance(found, dict):
            raise DataError(f"{where}: a {type(found).__name__} where an event is expected")
        if "_outcomes" in found:
            raise DataError(
                f"{where}: holds several decisions at once (slots), which cannot be read"
            )
        if "_label_cost" not in found or found.get("_skipLearn") is True:
            return None
        context = found.get("c")
        if not isinstance(context, dict):
            raise DataError(f"{where}: has no context ('c')")
        cost, probability = (
            _number(found, name, where) for name in ("_label_cost", "_label_probability")
        )
        if not 0 < probability <= 1:
            must = "must be above 0 and at most 1"
            raise DataError(f"{where}: _label_probability {must}, found {probability:g}")
        names = self._actions(found, context, where)
        chosen = found.get("_label_Action")
        if type(chosen) is not int or not 1 <= chosen <= len(names):
            raise DataError(
                f"{where}: _label_Action is not one of the {len(names)} actions, counted from 1"
            )
        self.encoded = _MARK in found
        shared = {name: value for name, value in context.items() if name != "_multi"}
        features = _flat(shared, where)
        for name in ("Timestamp", "EventId"):
            if isinstance(found.get(name), str):
                features[name] = found[name]
        own = {
            ACTION: names[chosen - 1],
            REWARD: 0.0 - cost,
            PROPENSITY: probability,
            AVAILABLE: names,
        }
        return {"features": features, **own}

    def _actions(
        self, found: Mapping[str, Any], context: Mapping[str, Any], where: str
    ) -> list[str]:
        """The names of the actions that could be taken, in the order of their numbers."""
        several, ranked = context.get("_multi"), found.get("a")
        if several is None:
            if not _list_of(ranked, lambda one: type(one) is int):
                raise DataError(f"{where}: names no actions (neither '_multi' nor 'a')")
            return [str(number) for number in range(1, max(ranked) + 1)]  # type: ignore[arg-type]
        if not _list_of(several, lambda one: isinstance(one, dict)):
            raise DataError(f"{where}: _multi is not a list of actions")
        if self._items is not None:
            return [self._item(one, where) for one in several]
        names = [self._name(one, where)[0] for one in several]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(
                f"{where}: two actions are called {twice[:60]!r}; --action-name says which feature names them"
            )
        return names

    def _item(self, action: Mapping[str, Any], where: str) -> str:
        """Name of an action among the items; one with other features is another item."""
        assert self._items is not None
        name, naming, features = self._name(action, where)
        others = tuple(sorted((key, value) for key, value in features.items() if key != naming))
        if naming is None and others:
            name = ""
        if (name, others) not in self._items:
            if len(self._items) >= MOST_ACTIONS:
                raise DataError(f"{where}: more than {MOST_ACTIONS:,} different actions")
            self._versions[name] += 1
            number = self._versions[name]
            called = f"{name} ({number})" if number > 1 else name
            self._items[name, others] = called if name else f"item {number}"
        return self._items[name, others]

    def _name(
        self, action: Mapping[str, Any], where: str
    ) -> tuple[str, str | None, dict[str, Any]]:
        """The name of an action, the feature that says it (None: all, "": its tag), and features."""
        features = _flat({name: value for name, value in action.items() if name != "_tag"}, where)
        if self._action_name is not None:
            ending = f".{self._action_name}"
            for name, value in features.items():
                if name == self._action_name or name.endswith(ending):
                    return _as_text(value) or "", name, features
            near = nearest(self._action_name, list(features))
            raise DataError(f"{where}: an action has no {self._action_name!r}{near}")
        if isinstance(action.get("_tag"), str) and action["_tag"]:
            return str(action["_tag"]), "", features
        lasts = {name.rpartition(".")[2].lower(): name for name in reversed(features)}
        naming = lasts.get("id", lasts.get("name"))
        if naming is None and len(features) == 1:
            naming = next(iter(features))
        if naming is not None:
            return _as_text(features[naming]) or "", naming, features
        said = " ".join(f"{name}={_as_text(value)}" for name, value in sorted(features.items()))
        return said, None, features


def _item_table(items: Mapping[tuple[str, tuple[Any, ...]], str]) -> Any:
    """A row for each item, with a column for each feature."""
    rows = [dict(features) for _, features in items]
    texts: dict[str, bool] = {}
    for row in rows:
        _note_texts(texts, row)
    columns = {name: _column(rows, name, is_text) for name, is_text in sorted(texts.items())}
    return pa.table({_ITEM: pa.array(list(items.values()), pa.string()), **columns})


def _note_texts(texts: dict[str, bool], features: Mapping[str, Any]) -> None:
    """Remember for each feature whether it ever holds anything but numbers."""
    for name, value in features.items():
        texts[name] = texts.get(name, False) or not isinstance(value, float)


def _column(rows: Sequence[Mapping[str, Any]], name: str, is_text: bool) -> Any:
    """A feature as an Arrow array; a number that is not said is 0, as it is for Vowpal Wabbit."""
    if is_text:
        return pa.array([_as_text(row.get(name)) for row in rows], pa.string())
    return pa.array([row.get(name, 0.0) for row in rows], pa.float64())


def _list_of(found: Any, good: Callable[[Any], bool]) -> bool:
    """Whether a value of JSON is a list, not empty, of good entries only."""
    return isinstance(found, list) and bool(found) and all(map(good, found))


def _number(found: Mapping[str, Any], name: str, where: str) -> float:
    """A finite number of an event; `DataError` names the field."""
    value = found.get(name)
    if type(value) not in (int, float) or not abs(value) <= LARGEST:  # type: ignore[arg-type]
        raise DataError(f"{where}: {name} is missing, or not a finite number")
    return float(value)  # type: ignore[arg-type]


def _as_text(value: Any) -> str | None:
    """A value as text: 3.0 as `3`, other numbers with all their digits."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    return None if value is None else str(value)


def _flat(
    nested: Mapping[str, Any], where: str, before: str = "", depth: int = _DEEPEST
) -> dict[str, Any]:
    """Features by their path: numbers as floats, truths and texts as texts; a list of texts is one
    text.
    """
    if not depth:
        raise DataError(f"{where}: features are nested more than {_DEEPEST} deep")
    found: dict[str, Any] = {}
    for key, value in nested.items():
        name = f"{before}{key}"
        if isinstance(value, list):
            texts = all(isinstance(one, str) for one in value)
            value = " ".join(value) if texts else {str(i): one for i, one in enumerate(value)}
        if isinstance(value, dict):
            found |= _flat(value, where, f"{name}.", depth - 1)
        elif isinstance(value, bool | str):
            found[name] = value if isinstance(value, str) else str(value).lower()
        elif isinstance(value, int | float):
            if not abs(value) <= LARGEST:  # NaN is not
                raise DataError(f"{where}: {name[:60]} is not a finite number")
            found[name] = float(value)
        elif value is not None:
            raise DataError(f"{where}: {name[:60]} holds a {type(value).__name__}")
    return found


class OpenBandit:
    """A source of rows: a campaign's file of the Open Bandit Dataset with a column for the client.

    The published files name no users; those with the same features are one client. Items have the
    names of `item_context.csv` where that lies beside it.
    """

    unit, first = "B", 2

    def __init__(self, path: Path, item_features: bool = False) -> None:
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
        self.label, self.file, self.size = self._csv.label, self._csv.file, self._csv.size
        self.kind = f"Open Bandit's layout; {self._csv.kind}"
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
        self.item_file = path.with_name("item_context.csv")
        if item_features and not self.item_file.is_file():
            raise DataError(f"{self.item_file}: no such file; it has the features of the items")
        self._items = {} if item_features else _items(self.item_file)

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
        items, names = (record.column(name).to_pylist() for name in ("item_id", "item_name"))
        found |= dict(zip(items, names, strict=True))
    return found
