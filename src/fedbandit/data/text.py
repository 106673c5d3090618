"""Words to numbers and labels to actions: what importers and devices share."""

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import AnyStr, Generic

import numpy as np

from fedbandit.core.ragged import Ragged

# Letters and digits, joined by single dots, hyphens and apostrophes; a tail of + or # keeps "c++" and "c#" whole.
_WORD = re.compile(r"\w+(?:['.-]\w+)*[+#]*")
_MOST_DISTINCT = (
    1_000_000  # words counted exactly at a time; beyond it the rarest are forgotten to bound memory
)


def tokenise(text: str) -> list[str]:
    """The lower-case words of a raw text, in order.

    Examples:
        >>> tokenise("How do I call C++ from node.js?")
        ['how', 'do', 'i', 'call', 'c++', 'from', 'node.js']
    """
    return _WORD.findall(text.lower())


class FrequencyCounter:
    """Counts words or labels in bounded memory and names the most frequent; ties go to the
    alphabetically first.

    Beyond `most_distinct` different items the rarest are forgotten, so that a file of a billion
    words takes no more memory than one of a million.

    Examples:
        >>> counter = FrequencyCounter()
        >>> counter.add(["tea", "cup", "tea"])
        >>> counter.add({"cup": 2, "jug": 1})
        >>> counter.top(2), counter.distinct
        (['cup', 'tea'], 3)
    """

    def __init__(self, most_distinct: int = _MOST_DISTINCT) -> None:
        self._counts: Counter[str] = Counter()
        self._most_distinct = most_distinct
        self._floor = 0

    @property
    def distinct(self) -> int:
        """The number of different items that it holds; once some were forgotten, one more than it
        can hold.
        """
        return len(self._counts) if self._floor == 0 else self._most_distinct + 1

    def add(self, items: Iterable[str] | Mapping[str, int]) -> None:
        """Count every item once for each time it occurs, or as often as a mapping says."""
        self._counts.update(items)
        while len(self._counts) > self._most_distinct:
            self._floor += 1
            self._counts = Counter({item: n for item, n in self._counts.items() if n > self._floor})

    def top(self, limit: int | None = None) -> list[str]:
        """The `limit` most frequent items, most frequent first."""
        ranked = sorted(self._counts.items(), key=lambda pair: (-pair[1], pair[0]))
        return [item for item, _ in ranked[:limit]]


class BagOfWords(Generic[AnyStr]):
    """Turns tokenised sentences into sparse rows over a fixed vocabulary; unknown words are
    dropped.

    Importers and devices call the same code, so that a device's context has the bits of the
    import's.

    Examples:
        >>> bags = BagOfWords(["the", "cat", "sat"]).encode([["the", "cat", "the"], ["dog"]])
        >>> bags.offsets.tolist(), bags.ids.tolist()  # "dog" is unknown: an empty row
        ([0, 2, 2], [0, 1])
        >>> bags.values  # 2 and 1, over the root of 5
        array([0.8944272, 0.4472136], dtype=float32)
    """

    def __init__(self, words: Sequence[AnyStr]) -> None:
        self.words: list[AnyStr] = list(words)
        self._index: dict[AnyStr, int] = {word: i for i, word in enumerate(self.words)}

    def encode(self, sentences: Iterable[Sequence[AnyStr]]) -> Ragged:
        """Rows of (word, count / L2 norm of the counts), words ascending; no known word gives an
        empty row.
        """
        unknown = len(self._index)
        find = self._index.get
        lengths, ids = [0], []
        for sentence in sentences:
            ids += [find(word, unknown) for word in sentence]
            lengths.append(len(sentence))
        return count_words(np.cumsum(lengths), np.array(ids, np.int32), unknown)


def count_words(offsets: np.ndarray, ids: np.ndarray, unknown: int) -> Ragged:
    """Rows of (word, count / L2 norm of the counts) of words below `unknown`, ascending.

    Row i has the words ids[offsets[i]:offsets[i + 1]].
    """
    row = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    known, base = ids < unknown, max(unknown, 1)
    found, counts = np.unique(row[known] * base + ids[known], return_counts=True)
    row = found // base
    squares = np.bincount(row, counts.astype(np.float64) ** 2, minlength=len(offsets) - 1)
    lengths = np.bincount(row, minlength=len(offsets) - 1)
    return Ragged(
        np.concatenate([[0], np.cumsum(lengths)]),
        (found % base).astype(np.int32),
        (counts / np.sqrt(squares[row])).astype(np.float32),
    )


EMNIST_ACTIONS = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
EMNIST_LOWER_CASE = {10 + letter: 36 + letter for letter in range(26)}  # 'A' -> 'a', ...


class LabelEncoder(Generic[AnyStr]):
    """Turns label names into action numbers; names that are no action are dropped, repeats count
    once.

    Examples:
        >>> rows = LabelEncoder(["a", "b", "c"]).encode([["c", "a", "c"], ["x"], ["b"]])
        >>> rows.offsets.tolist(), rows.ids.tolist()
        ([0, 2, 2, 3], [0, 2, 1])
    """

    def __init__(self, actions: Sequence[AnyStr]) -> None:
        self.actions: list[AnyStr] = list(actions)
        self._index: dict[AnyStr, int] = {name: i for i, name in enumerate(self.actions)}

    def encode(self, rows: Iterable[Iterable[AnyStr]]) -> Ragged:
        """One row of ascending action numbers for every row of names."""
        find = self._index
        return Ragged.from_rows(
            [sorted({find[name] for name in row if name in find}) for row in rows]
        )


def case_map(actions: Sequence[str]) -> dict[int, int]:
    """Upper-case letter -> lower-case letter, where the actions are the 62 characters; otherwise
    empty.
    """
    return dict(EMNIST_LOWER_CASE) if tuple(actions) == EMNIST_ACTIONS else {}


def in_natural_order(names: Iterable[str]) -> list[str]:
    """Names sorted: as numbers where all are whole numbers, as EMNIST orders characters, else by
    letters.

    Examples:
        >>> in_natural_order(["10", "9", "1"]), in_natural_order(["b", "a"])
        (['1', '9', '10'], ['a', 'b'])
    """
    names = list(names)
    if all(name.isascii() and name.isdigit() for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    if set(names) == set(EMNIST_ACTIONS):
        return list(EMNIST_ACTIONS)
    return sorted(names)


def split_labels(cell: str, separator: str) -> list[str]:
    """The labels in one cell of a table; spaces around them and empty ones are dropped.

    Examples:
        >>> split_labels("java | c++ |", "|")
        ['java', 'c++']
    """
    return [name for part in cell.split(separator) if (name := part.strip())]
