"""Dialects of text files: its encoding and its delimiter, found in its bytes.

Standard library only. What an option says is taken and not looked for.
"""

import codecs
import csv
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import mode

from fedbandit.core.errors import ConfigError, DataError

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before utf-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_SAMPLE = 1 << 16  # bytes from which the delimiter is found
_LINES = 200
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Dialect:
    """The encoding, by Python's name, and the delimiter of a CSV file."""

    encoding: str
    delimiter: str

    def describe(self) -> str:
        """In words."""
        name = "utf-8" if self.encoding == "utf-8-sig" else self.encoding
        return f"{name}, separated by {_DELIMITERS.get(self.delimiter, repr(self.delimiter))}"


def find_dialect(path: Path, encoding: str | None = None, delimiter: str | None = None) -> Dialect:
    """The dialect of a file; what is given is taken.

    The encoding is that of the byte order mark, or the first of UTF-8, UTF-16 without a mark and
    Latin 1 that fits every byte of the file. The delimiter is the one of comma, semicolon, tab and
    bar that cuts the first 200 lines into the most columns, the same number in nearly each.
    """
    if encoding is None:
        encoding = _encoding(path)
    else:
        try:
            encoding = codecs.lookup(encoding).name
        except LookupError:
            raise ConfigError(f"encoding: unknown encoding {encoding!r}") from None
    if delimiter is not None:
        delimiter = {"tab": "\t", "\\t": "\t"}.get(delimiter, delimiter)
        if len(delimiter) != 1 or delimiter in '"\r\n':
            raise ConfigError(f"delimiter: must be one character, or tab, got {delimiter!r}")
        return Dialect(encoding, delimiter)
    with open(path, "rb") as file:
        sample = file.read(_SAMPLE)
    text = codecs.getincrementaldecoder(encoding)("replace").decode(sample)
    return Dialect(encoding, _delimiter(text, "\t" if path.suffix.lower() == ".tsv" else ","))


def _encoding(path: Path) -> str:
    """By its mark, or the first of UTF-8, UTF-16 without a mark and Windows' or ISO's Latin-1 that
    all bytes fit.
    """
    with open(path, "rb") as file:
        head = file.read(_SAMPLE)
        for mark, name in _MARKS:
            if head.startswith(mark):
                return name
        odd, even = head[1::2].count(0), head[0::2].count(0)
        if max(odd, even) > 0.3 * len(head) / 2:
            return "utf-16-le" if odd > even else "utf-16-be"
        file.seek(0)
        decoder = codecs.getincrementaldecoder("utf-8")()
        latin = False
        while block := file.read(_BLOCK):
            try:
                decoder.decode(block, final=len(block) < _BLOCK)
            except UnicodeDecodeError:
                latin = True
                break
        if not latin:
            return "utf-8"
        file.seek(0)
        while block := file.read(_BLOCK):
            try:
                block.decode("cp1252")
            except UnicodeDecodeError:
                return "latin-1"
    return "cp1252"


def _delimiter(text: str, usual: str) -> str:
    """The one that cuts the first lines into the most columns, the same number in each."""
    whole = text[: text.rfind("\n") + 1] or text
    best, columns = usual, 1
    for candidate in (usual, *(one for one in _DELIMITERS if one != usual)):
        try:
            rows = list(
                islice(csv.reader(whole.splitlines(keepends=True), delimiter=candidate), _LINES)
            )
        except csv.Error:
            continue
        widths = [len(row) for row in rows if row]
        if not widths:
            continue
        found = mode(widths)
        if found > columns and len(rows[0]) == found and widths.count(found) >= 0.9 * len(widths):
            best, columns = candidate, found
    return best


def check_text(path: Path, encoding: str) -> None:
    """Raise `DataError` where the bytes are not text of a given encoding."""
    decoder = codecs.getincrementaldecoder(encoding)()
    with open(path, "rb") as file:
        position = 0
        while block := file.read(_BLOCK):
            try:
                decoder.decode(block, final=len(block) < _BLOCK)
            except UnicodeError as error:
                raise DataError(
                    f"{path}: not {encoding} near byte {position:,}: {error.__class__.__name__}"
                ) from None
            position += len(block)
