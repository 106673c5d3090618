"""Labels as action numbers: which labels become actions, and the case map of the 62 handwriting classes."""

import string
from collections.abc import Iterable, Sequence
from typing import AnyStr, Generic

from fedbandit.data.ragged import Ragged

EMNIST_ACTIONS = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
EMNIST_LOWER_CASE = {10 + letter: 36 + letter for letter in range(26)}  # 'A' -> 'a', ...


class LabelEncoder(Generic[AnyStr]):
    """Turns label names into action numbers; names that are no action are dropped, repeats count once."""

    def __init__(self, actions: Sequence[AnyStr]) -> None:
        self.actions: list[AnyStr] = list(actions)
        self._index: dict[AnyStr, int] = {name: i for i, name in enumerate(self.actions)}

    def encode(self, rows: Iterable[Iterable[AnyStr]]) -> Ragged:
        """One row of ascending action numbers for every row of names."""
        find = self._index
        return Ragged.from_rows([sorted({find[name] for name in row if name in find}) for row in rows])


def case_map(actions: Sequence[str]) -> dict[int, int]:
    """Upper-case letter -> lower-case letter, where the actions are the 62 characters; otherwise empty."""
    return dict(EMNIST_LOWER_CASE) if tuple(actions) == EMNIST_ACTIONS else {}


def in_natural_order(names: Iterable[str]) -> list[str]:
    """Names sorted: as numbers where all are whole numbers, as EMNIST orders characters, else alphabetically."""
    names = list(names)
    if all(name.isascii() and name.isdigit() for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    if set(names) == set(EMNIST_ACTIONS):
        return list(EMNIST_ACTIONS)
    return sorted(names)


def split_labels(cell: str, separator: str) -> list[str]:
    """The labels in one cell of a table; spaces around them and empty ones are dropped."""
    return [name for part in cell.split(separator) if (name := part.strip())]
