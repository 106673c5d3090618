"""Cells of a table's columns as numbers, dates, flags and names, however they are written.

A column at a time, by Arrow's vectorised functions. What a cell means is decided elsewhere
(`importers/profile.py`). All functions take Arrow arrays as `plain` makes them.
"""

import re
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedbandit.core.errors import DataError
from fedbandit.data.encoder import LARGEST
from fedbandit.data.encoder import MISSING as MISSING

NO_VALUE = MISSING | {
    "-",
    "--",
    "–",
    "—",
    "?",
    "none",
    "nil",
    "missing",
    "unknown",
}  # in a number, date or flag
FLAGS = {
    "true": 1,
    "yes": 1,
    "y": 1,
    "t": 1,
    "1": 1,
    "on": 1,
    "false": 0,
    "no": 0,
    "n": 0,
    "f": 0,
    "0": 0,
    "off": 0,
}

_POINT = r"^[+-]?(?:(?:0|[1-9]\d*)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?$"
_GROUPS = r"^[+-]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?$"
_COMMA = r"^[+-]?(?:0|[1-9]\d*|[1-9]\d{0,2}(?:\.\d{3})+)(?:,\d+)?$"
NUMBERS = {"1234.5": _POINT, "1,234.5": f"{_POINT}|{_GROUPS}", "1.234,5": _COMMA}
"""Ways to write numbers: 08 is none of them, since it is a code."""

_CLOCK = (
    r"(?:[T ]+(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2})(?:[.,]\d+)?)?\s*(?P<half>[AaPp][Mm])?"
    r"\s*(?:Z|UTC|[+-]\d{2}:?\d{2})?)?$"
)
_YEAR, _MONTH, _DAY = r"(?P<year>\d{4})", r"(?P<month>\d{1,2})", r"(?P<day>\d{1,2})"
DATES = {
    "year-month-day": f"^{_YEAR}[-/.]{_MONTH}[-/.]{_DAY}{_CLOCK}",
    "month/day/year": f"^{_MONTH}[-/.]{_DAY}[-/.]{_YEAR}{_CLOCK}",
    "day.month.year": f"^{_DAY}[-/.]{_MONTH}[-/.]{_YEAR}{_CLOCK}",
}

_TYPES = pa.types
_PLAIN: tuple[tuple[Any, bool, tuple[Callable[[Any], bool], ...]], ...] = (
    (pa.string(), True, (_TYPES.is_null, _TYPES.is_large_string, _TYPES.is_string_view)),
    (pa.string(), True, (_TYPES.is_binary, _TYPES.is_large_binary)),  # raises if it is not UTF-8
    (pa.timestamp("us"), False, (_TYPES.is_timestamp,)),
    (pa.timestamp("us"), True, (_TYPES.is_date,)),
    (pa.float64(), False, (_TYPES.is_integer, _TYPES.is_floating, _TYPES.is_decimal)),
)
"""Types that columns become, whether a cell that does not fit is an error, and the types they have."""


def is_data(name: str) -> bool:
    """Whether a cell of a header looks like a number or a date, and so like data.

    Examples:
        >>> is_data("17.5"), is_data("2024-05-31"), is_data("age"), is_data("")
        (True, True, False, False)
    """
    cell = name.strip()
    return any(re.match(way, cell) for way in (_POINT, *DATES.values()))


def plain(array: Any) -> Any:
    """An Arrow array of one of few types: string, float64, bool, timestamp[us] or list; `DataError`
    for bytes.
    """
    kind = array.type
    if pa.types.is_dictionary(kind):
        return plain(array.dictionary_decode())
    if pa.types.is_string(kind) or pa.types.is_boolean(kind) or pa.types.is_nested(kind):
        return array
    if pa.types.is_timestamp(kind) and kind.tz:
        array = pc.local_timestamp(array)
    for target, safe, kinds in _PLAIN:
        if any(is_such(kind) for is_such in kinds):
            return array.cast(target, safe=safe)
    raise DataError(f"holds {kind}, which is neither text, number, date nor flag")


def without(array: Any, words: Collection[str]) -> Any:
    """The array with nothing where a cell is one of these words, or a number that one of them
    names.
    """
    if not words or pa.types.is_nested(array.type):
        return array
    if pa.types.is_string(array.type):
        return pc.if_else(_is_one_of(pc.utf8_trim_whitespace(array), words), None, array)
    if pa.types.is_floating(array.type):
        values = []
        for word in words:
            with suppress(ValueError):
                values.append(float(word))
        return pc.if_else(pc.is_in(array, value_set=pa.array(values, pa.float64())), None, array)
    return array


def names(array: Any) -> list[str]:
    """Cells as names without the space around them; "" where missing."""
    kind = array.type
    if pa.types.is_floating(kind):
        return [_whole(value) for value in array.to_pylist()]
    if pa.types.is_boolean(kind):
        return ["" if value is None else str(value).lower() for value in array.to_pylist()]
    if pa.types.is_timestamp(kind):
        array = array.cast(pa.string())
    trimmed = pc.fill_null(pc.utf8_trim_whitespace(array), "")
    gone = _is_one_of(trimmed, MISSING)
    return list(pc.if_else(gone, "", trimmed).to_pylist())


def _whole(value: float | None) -> str:
    """A whole number by its digits, "" where missing; a fraction is no name."""
    if value is None or value != value:
        return ""
    if not float(value).is_integer() or abs(value) > 2**53:
        raise DataError(f"holds {value}, where text or whole numbers are expected")
    return str(int(value))


def _is_one_of(trimmed: Any, words: Collection[str]) -> Any:
    """Whether trimmed cells are one of some words, in upper or lower case."""
    return pc.is_in(pc.utf8_lower(trimmed), value_set=pa.array(sorted(words), pa.string()))


def present(array: Any, missing: Collection[str]) -> np.ndarray:
    """Whether each cell holds something: bool [n]."""
    if pa.types.is_string(array.type):
        gone = _is_one_of(pc.fill_null(pc.utf8_trim_whitespace(array), ""), missing)
        return ~np.asarray(gone.to_numpy(zero_copy_only=False), bool)
    there = np.asarray(array.is_valid().to_numpy(zero_copy_only=False), bool)
    if pa.types.is_floating(array.type):
        there &= ~np.isnan(array.to_numpy(zero_copy_only=False))
    return there


def numbers(array: Any, written: str = "1234.5") -> np.ndarray:
    """Cells as float64 [n]; NaN where a cell is missing, no number or beyond any measurement.

    `written` is one of `NUMBERS`. Currency signs, percent signs and spaces between thousands are
    left out; `08` is no number but a code.
    """
    if pa.types.is_string(array.type):
        cells = pc.replace_substring_regex(array, r"^[\s$€£¥]+|[\s$€£¥%]+$", "")
        cells = pc.replace_substring_regex(cells, "[ '’\u00a0\u202f](\\d{3})", r"\1")
        fits = pc.fill_null(pc.match_substring_regex(cells, NUMBERS[written]), False)
        if written == "1,234.5":
            cells = pc.replace_substring(cells, ",", "")
        elif written == "1.234,5":
            cells = pc.replace_substring(pc.replace_substring(cells, ".", ""), ",", ".")
        cells = pc.replace_substring_regex(cells, r"^\+", "")
        array = pc.if_else(fits, cells, None).cast(pa.float64())
    elif pa.types.is_timestamp(array.type) or pa.types.is_nested(array.type):
        raise DataError(f"holds {array.type}, not numbers")
    found = np.array(array.cast(pa.float64()).to_numpy(zero_copy_only=False), np.float64)
    found[~(np.abs(found) <= LARGEST)] = np.nan
    return found


def flags(array: Any) -> np.ndarray:
    """Cells as 1 and 0, float64 [n]; NaN where a cell is missing or neither."""
    if pa.types.is_string(array.type):
        cells = pc.fill_null(pc.utf8_lower(pc.utf8_trim_whitespace(array)), "").to_pylist()
        return np.array([FLAGS.get(cell, np.nan) for cell in cells], np.float64)
    found = numbers(array)
    return np.where(np.isin(found, (0, 1)), found, np.nan)


def dates(array: Any, written: str = "year-month-day") -> np.ndarray:
    """Cells in seconds since 1970 by the clock on the wall, float64 [n]; NaN where a cell is no
    date.

    `written` is one of `DATES`: the order of year, month and day. A time of day may follow, and a
    zone, which is not looked at: what counts is the hour at the place.
    """
    if pa.types.is_timestamp(array.type):
        stamps = array.to_numpy(zero_copy_only=False).astype("datetime64[us]")
        seconds = stamps.astype(np.int64) / 1e6
        return np.where(np.isnat(stamps), np.nan, seconds)
    if not pa.types.is_string(array.type):
        raise DataError(f"holds {array.type}, not dates")
    parts = pc.extract_regex(pc.utf8_trim_whitespace(array), DATES[written])

    def part(name: str, otherwise: float) -> np.ndarray:
        """A named part of the pattern as numbers, float64 [n]."""
        cells = pc.struct_field(parts, name)
        filled = pc.if_else(pc.equal(cells, ""), None, cells).cast(pa.float64())
        found = np.array(filled.to_numpy(zero_copy_only=False), np.float64)
        return np.where(np.isnan(found), otherwise, found)

    year, month, day = part("year", np.nan), part("month", np.nan), part("day", np.nan)
    hour, minute, second = part("hour", 0), part("minute", 0), part("second", 0)
    half = np.array(
        pc.fill_null(pc.utf8_lower(pc.struct_field(parts, "half")), "").to_pylist(), "U2"
    )
    hour = np.where(half == "", hour, hour % 12 + 12 * (half == "pm"))
    sound = (
        (year >= 1)
        & (month >= 1)
        & (month <= 12)
        & (day >= 1)
        & (hour < 24)
        & (minute < 60)
        & (second < 61)
    )
    months = np.where(sound, (year - 1970) * 12 + month - 1, 0).astype("datetime64[M]")
    days = months.astype("datetime64[D]") + np.where(sound, day - 1, 0).astype("timedelta64[D]")
    sound &= days.astype("datetime64[M]") == months  # the 31st of June is none
    seconds = days.astype(np.int64) * 86_400.0 + hour * 3600 + minute * 60 + second
    return np.where(sound, seconds, np.nan)
