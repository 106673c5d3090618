"""The numbers of a run's rounds by name, read from its metrics as they are appended: nothing is read twice.

Only numbers are kept, so that a run of any length takes a few bytes a round.
"""

import math
import os
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.core.files import object_in, open_regular

Columns = Mapping[str, np.ndarray]  # values by name, one a round; NaN where a round has none
_PLAIN = ("running_reward", "propensity", "epsilon")
_BLOCK = 1 << 20
_LONGEST_LINE = 64 << 20
_LARGEST = 1e100  # a mean of larger numbers would overflow
_MOST_NAMES = 64  # of held-out metrics
_REMEMBERED = 256  # bytes before the offset, by which a file that was replaced is known


@dataclass
class MetricsFile:
    """A run's `metrics.jsonl`, followed."""

    path: Path
    problem: str | None = None  # why the file cannot be shown, until it is another file
    rounds: int = 0
    _offset: int = 0
    _stamp: tuple[int, ...] = ()
    _before: bytes = b""
    _values: dict[str, array] = field(default_factory=dict)  # type: ignore[type-arg] # arrays are not generic before 3.12
    _columns: tuple[int, Columns] = (-1, {})

    def follow(self, most: int | None = None) -> int:
        """Read what was appended, at most about so many bytes; how many were read."""
        try:
            with open_regular(self.path) as file:
                found = os.fstat(file.fileno())
                stamp = (found.st_ino, found.st_size, found.st_mtime_ns)
                if stamp == self._stamp and (self.problem is not None or self._offset == found.st_size):
                    return 0
                file.seek(max(0, self._offset - len(self._before)))
                replaced = self._stamp[:1] not in ((), stamp[:1]) or found.st_size < self._offset
                if self.problem is not None or replaced or file.read(len(self._before)) != self._before:
                    self.__init__(self.path)  # type: ignore[misc] # another file, or cut back to an older checkpoint
                    file.seek(0)
                self._stamp = stamp
                return self._read(file, most)
        except FileNotFoundError:
            self.__init__(self.path)  # type: ignore[misc]
        except OSError as error:
            self.problem = f"{self.path.name} cannot be read: {error.strerror}"
        return 0

    @property
    def columns(self) -> Columns:
        if self._columns[0] != self.rounds:
            values = {
                name: np.array(self._values.get(name, self._missing()), float) for name in (*_PLAIN, "worst_decile")
            }
            values["worst_decile"] = _running_mean(values["worst_decile"])
            held_out = {name: np.array(kept, float) for name, kept in self._values.items() if name not in values}
            self._columns = self.rounds, {**values, **held_out}
        return self._columns[1]

    def _read(self, file: Any, most: int | None) -> int:
        taken, rest = 0, b""
        while block := file.read(_BLOCK):
            taken += len(block)
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                try:
                    self._take(line)
                except (ValueError, OverflowError) as error:
                    self.problem = f"line {self.rounds + 1} of {self.path.name} is damaged: {error}"
                    self._values = {}
                    return taken
                self._offset += len(line) + 1
                self._before = (line + b"\n")[-_REMEMBERED:]
            if len(rest) > _LONGEST_LINE:
                self.problem = f"{self.path.name} has a line of more than {_LONGEST_LINE >> 20} MB"
                return taken
            if most is not None and taken >= most:
                break
        return taken

    def _take(self, line: bytes) -> None:
        values = object_in(line)
        if type(values.get("round")) is not int or values["round"] != self.rounds + 1:
            raise ValueError("it is not of this round")
        spread = values.get("client_reward") or {}
        if not isinstance(spread, Mapping):
            raise ValueError("client_reward is not an object")
        numbers = {name: _number(name, values.get(name)) for name in _PLAIN}
        numbers["worst_decile"] = _number("worst_decile", spread.get("worst_decile"))
        numbers |= {name: _number(name, value) for name, value in values.items() if name.startswith("test_")}
        for name in numbers.keys() - self._values.keys():
            if len(self._values) > _MOST_NAMES:
                raise ValueError("it has too many metrics")
            self._values[name] = self._missing()
        for name, column in self._values.items():
            column.append(numbers.get(name, np.nan))
        self.rounds += 1

    def _missing(self) -> "array[float]":
        return array("d", [np.nan]) * self.rounds


def _number(name: str, value: Any) -> float:
    if value is None:
        return math.nan
    if type(value) not in (int, float) or (math.isfinite(value) and abs(value) > _LARGEST):
        raise ValueError(f"{name:.40} is not a number that a run measures")
    return float(value) if math.isfinite(value) else math.nan


def _running_mean(values: np.ndarray) -> np.ndarray:
    known = np.isfinite(values)
    averages: np.ndarray = np.cumsum(np.where(known, values, 0)) / np.maximum(np.cumsum(known), 1)
    return averages
