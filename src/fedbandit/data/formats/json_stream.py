"""Walking through a JSON file that is too large to load: objects and arrays entry by entry, values when complete."""

import json
from collections.abc import Iterator
from typing import Any, TextIO

_CHUNK = 1 << 20
_SPACE = " \t\r\n"
_AFTER_NUMBER = f"{_SPACE},]}}"
_LONGEST_TAIL = 4  # of a number cut off in its exponent: the decoder then stops before "e" or "."


class JsonWalker:
    """Reads forward only; every method raises `ValueError` where the text is not the JSON it expects."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._text, self._at, self._ended = file, "", 0, False
        self._decode = json.JSONDecoder().raw_decode

    def members(self) -> Iterator[str]:
        """The keys of the object that begins here; the caller takes each value before asking for the next key."""
        self._take("{")
        if self._peek() == "}":
            self._take("}")
            return
        while True:
            key = self.value()
            if not isinstance(key, str):
                raise ValueError("a key is not a string")
            self._take(":")
            yield key
            if self._take(",}") == "}":
                return

    def entries(self) -> Iterator[Any]:
        """The entries of the array that begins here, each a complete value."""
        self._take("[")
        if self._peek() == "]":
            self._take("]")
            return
        while True:
            yield self.value()
            if self._take(",]") == "]":
                return

    def value(self) -> Any:
        """The complete value that begins here."""
        self._peek()
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except json.JSONDecodeError:
                if self._ended:
                    raise ValueError("cut off or damaged") from None
                self._read_more()
                continue
            if not self._ended and self._may_go_on(value, end):
                self._read_more()
                continue
            self._at = end
            return value

    def skip(self) -> None:
        """Pass over the value that begins here without keeping it."""
        start = self._peek()
        if start == "{":
            for _ in self.members():
                self.skip()
        elif start == "[":
            for _ in self.entries():
                pass
        else:
            self.value()

    def _peek(self) -> str:
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                raise ValueError("ends too early")
            self._read_more()

    def _take(self, choices: str) -> str:
        found = self._peek()
        if found not in choices:
            raise ValueError(f"expected {' or '.join(choices)}, found {found!r}")
        self._at += 1
        return found

    def _may_go_on(self, value: Any, end: int) -> bool:
        """At the end of what has been read, "12" or "12." may be the beginning of "12.5"."""
        near_end = len(self._text) - end < _LONGEST_TAIL
        return near_end and isinstance(value, int | float) and self._text[end : end + 1] not in tuple(_AFTER_NUMBER)

    def _read_more(self) -> None:
        # Doubling keeps the cost of retrying a long value linear in its length.
        chunk = self._file.read(max(_CHUNK, len(self._text) - self._at))
        self._ended = not chunk
        self._text, self._at = self._text[self._at :] + chunk, 0
