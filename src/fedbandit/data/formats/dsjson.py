"""Decisions as Vowpal Wabbit's services log them: DSJSON, one JSON object a line, read as a table.

A row has a column for each feature of the context (`User.age`), and four that say what was done.
Lines are checked one by one: they are a stranger's.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from fedbandit.core.errors import DataError
from fedbandit.core.parts import nearest
from fedbandit.data.encoder import LARGEST

ACTION, REWARD, PROPENSITY, AVAILABLE = (
    "the action",
    "the reward",
    "the propensity",
    "the available",
)
_OWN = (ACTION, REWARD, PROPENSITY, AVAILABLE)
_LONGEST = 16 << 20  # bytes of a line
_ROWS, _CELLS = 4096, 1_000_000  # at a time
_MOST_FEATURES = 10_000
_DEEPEST = 5


class DsJson:
    """A source of rows: a file of decisions in Vowpal Wabbit's DSJSON, one JSON object a line.

    Features of the shared context become columns, by their path. Rewards are costs with the other
    sign. Lines without a cost, and those marked not to be learned from, are skipped and counted.
    `action_name` is the feature of an action that names it; without it the tag, id or name does.
    """

    unit, first = "B", 1

    def __init__(self, path: Path, action_name: str | None = None) -> None:
        self.path, self.label, self.file = path, str(path), path.name
        self._action_name = action_name
        self.skipped = 0
        if not path.is_file():
            raise DataError(
                f"{path}: {'is a folder, not a file' if path.is_dir() else 'no such file'}"
            )
        self._texts: dict[str, bool] = {}  # feature -> whether it holds anything but numbers
        for event, _ in self._events():
            for name, value in event["features"].items():
                self._texts[name] = self._texts.get(name, False) or not isinstance(value, float)
            if len(self._texts) > _MOST_FEATURES:
                raise DataError(f"{path}: more than {_MOST_FEATURES:,} features of contexts")
        if not self._texts:
            raise DataError(
                f"{path}: no line holds a decision with its cost, its probability and a context"
            )
        self.names = [*self._texts, *_OWN]

    def size(self) -> float:
        """The bytes of the file."""
        return self.path.stat().st_size

    def describe(self) -> str:
        """The format, and how many lines are left out."""
        left = (
            f"; {self.skipped:,} lines without a decision to learn from are left out"
            if self.skipped
            else ""
        )
        return f"DSJSON{left}"

    def records(self, names: Sequence[str]) -> Iterator[tuple[Any, float]]:
        """Record batches with these columns, and the bytes of their lines."""
        rows: list[dict[str, Any]] = []
        read, most = 0, max(1, min(_ROWS, _CELLS // len(self.names)))
        for event, length in self._events():
            rows.append(event)
            read += length
            if len(rows) >= most:
                yield self._record(rows, names), read
                rows, read = [], 0
        if rows:
            yield self._record(rows, names), read

    def _record(self, rows: list[dict[str, Any]], names: Sequence[str]) -> Any:
        columns: dict[str, Any] = {}
        for name in names:
            if name in _OWN:
                kind = (
                    pa.list_(pa.string())
                    if name == AVAILABLE
                    else pa.string()
                    if name == ACTION
                    else pa.float64()
                )
                columns[name] = pa.array([row[name] for row in rows], kind)
            elif self._texts[name]:
                columns[name] = pa.array(
                    [_as_text(row["features"].get(name)) for row in rows], pa.string()
                )
            else:  # a number that is not said is 0, as it is for Vowpal Wabbit
                columns[name] = pa.array(
                    [row["features"].get(name, 0.0) for row in rows], pa.float64()
                )
        return pa.record_batch(columns)

    def _events(self) -> Iterator[tuple[dict[str, Any], int]]:
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
                try:
                    found = json.loads(line)
                except (ValueError, RecursionError) as error:
                    said = str(error).partition("\n")[0]
                    raise DataError(f"{where}: not JSON: {said}") from None
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
            raise DataError(
                f"{where}: _label_probability must be above 0 and at most 1, found {probability:g}"
            )
        names = self._actions(found, context, where)
        chosen = found.get("_label_Action")
        if type(chosen) is not int or not 1 <= chosen <= len(names):
            raise DataError(
                f"{where}: _label_Action is not one of the {len(names)} actions, counted from 1"
            )
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
        several = context.get("_multi")
        if several is None:
            ranked = found.get("a")
            if (
                not isinstance(ranked, list)
                or not ranked
                or not all(type(one) is int for one in ranked)
            ):
                raise DataError(f"{where}: names no actions (neither '_multi' nor 'a')")
            return [str(number) for number in range(1, max(ranked) + 1)]
        if (
            not isinstance(several, list)
            or not several
            or not all(isinstance(one, dict) for one in several)
        ):
            raise DataError(f"{where}: _multi is not a list of actions")
        names = [self._name(one, where) for one in several]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(
                f"{where}: two actions are called {twice[:60]!r}; --action-name says which feature names them"
            )
        return names

    def _name(self, action: Mapping[str, Any], where: str) -> str:
        features = _flat({name: value for name, value in action.items() if name != "_tag"}, where)
        if self._action_name is not None:
            ending = f".{self._action_name}"
            for name, value in features.items():
                if name == self._action_name or name.endswith(ending):
                    return _as_text(value) or ""
            raise DataError(
                f"{where}: an action has no {self._action_name!r}{nearest(self._action_name, list(features))}"
            )
        if isinstance(action.get("_tag"), str) and action["_tag"]:
            return str(action["_tag"])
        for known in ("id", "name"):
            for name, value in features.items():
                if name.rpartition(".")[2].lower() == known:
                    return _as_text(value) or ""
        if len(features) == 1:
            return _as_text(next(iter(features.values()))) or ""
        return " ".join(f"{name}={_as_text(value)}" for name, value in sorted(features.items()))


def _number(found: Mapping[str, Any], name: str, where: str) -> float:
    value = found.get(name)
    if type(value) not in (int, float) or not abs(value) <= LARGEST:  # type: ignore[arg-type]
        raise DataError(f"{where}: {name} is missing, or not a finite number")
    return float(value)  # type: ignore[arg-type]


def _as_text(value: Any) -> str | None:
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
        if isinstance(value, bool):
            found[name] = str(value).lower()
        elif isinstance(value, int | float):
            if not abs(value) <= LARGEST:  # NaN is not
                raise DataError(f"{where}: {name[:60]} is not a finite number")
            found[name] = float(value)
        elif isinstance(value, str):
            found[name] = value
        elif isinstance(value, dict):
            found |= _flat(value, where, f"{name}.", depth - 1)
        elif isinstance(value, list) and all(isinstance(one, str) for one in value):
            found[name] = " ".join(value)
        elif isinstance(value, list):
            found |= _flat(
                {str(place): one for place, one in enumerate(value)}, where, f"{name}.", depth - 1
            )
        elif value is not None:
            raise DataError(f"{where}: {name[:60]} holds a {type(value).__name__}")
    return found
