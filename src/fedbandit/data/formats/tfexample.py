"""Reading `tf.train.Example` messages from their wire format, strictly and without TensorFlow.

An Example is a map from feature names to one list of bytes, floats or whole numbers. Knows nothing of what they mean.
"""

from collections.abc import Collection, Iterator

import numpy as np

Feature = list[bytes] | np.ndarray
"""A list of byte strings, float32 [n] or int64 [n]; an unset feature is an empty list."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3


class NotAnExample(ValueError):
    """The bytes are not a serialized `tf.train.Example`; says where they stop making sense."""


def parse_example(data: bytes, wanted: Collection[str] | None = None) -> dict[str, Feature]:
    """The features of one serialized Example by name, all or only those wanted; raises `NotAnExample`."""
    features: dict[str, Feature] = {}
    for number, wire, start, end in _fields(data, 0, len(data)):
        if number == 1 and wire == _BYTES:
            for inner, inner_wire, first, last in _fields(data, start, end):
                if inner == 1 and inner_wire == _BYTES:
                    name, ranges = _map_entry(data, first, last)
                    if wanted is None or name in wanted:
                        features[name] = _feature(data, ranges)
    return features


def _map_entry(data: bytes, start: int, end: int) -> tuple[str, list[tuple[int, int]]]:
    """A feature's name and where its value stands; protobuf allows it in several pieces."""
    key, ranges = b"", []
    for number, wire, first, last in _fields(data, start, end):
        if number == 1 and wire == _BYTES:
            key = data[first:last]
        elif number == 2 and wire == _BYTES:
            ranges.append((first, last))
    try:
        return key.decode(), ranges
    except UnicodeDecodeError:
        raise NotAnExample(f"a feature name near byte {start} is not UTF-8") from None


def _feature(data: bytes, ranges: list[tuple[int, int]]) -> Feature:
    kind = 0
    parts: list[tuple[int, int]] = []
    for start, end in ranges:
        for number, wire, first, last in _fields(data, start, end):
            if wire == _BYTES and number in (_BYTES_LIST, _FLOAT_LIST, _INT64_LIST):
                if number != kind:  # only one kind is set; a later one replaces an earlier one
                    kind, parts = number, []
                parts.append((first, last))
    if kind == _BYTES_LIST:
        return [value for first, last in parts for value in _bytes_list(data, first, last)]
    if kind == _FLOAT_LIST:
        return _joined([_float_list(data, first, last) for first, last in parts], np.float32)
    if kind == _INT64_LIST:
        return _joined([_int64_list(data, first, last) for first, last in parts], np.int64)
    return []


def _joined(arrays: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, dtype), *arrays])


def _bytes_list(data: bytes, start: int, end: int) -> list[bytes]:
    fields = _fields(data, start, end)
    return [data[first:last] for number, wire, first, last in fields if number == 1 and wire == _BYTES]


def _float_list(data: bytes, start: int, end: int) -> np.ndarray:
    arrays = []
    for number, wire, first, last in _fields(data, start, end):
        if number == 1 and wire in (_BYTES, _FIXED32):  # packed, or one by one
            if (last - first) % 4:
                raise NotAnExample(f"the packed floats at byte {first} are cut off")
            arrays.append(np.frombuffer(data, "<f4", (last - first) // 4, first))
    return _joined(arrays, np.float32)


def _int64_list(data: bytes, start: int, end: int) -> np.ndarray:
    values: list[int] = []
    for number, wire, first, last in _fields(data, start, end):
        if number == 1 and wire in (_BYTES, _VARINT):
            position = first
            while position < last:
                value, position = _varint(data, position, last)
                values.append(value)
    return np.array(values, np.uint64).astype(np.int64)  # negative numbers travel as two's complement


def _fields(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message in `data[start:end]`: number, wire type, and where the value begins and ends."""
    position = start
    while position < end:
        tag = data[position]
        if tag < 0x80:  # nearly all tags and lengths are one byte: worth a short cut
            position += 1
        else:
            tag, position = _varint(data, position, end)
        number, wire = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            raise NotAnExample(f"field number {number} at byte {position}")
        if wire == _BYTES:
            if position < end and data[position] < 0x80:
                length = data[position]
                position += 1
            else:
                length, position = _varint(data, position, end)
        elif wire == _VARINT:
            length = _varint(data, position, end)[1] - position
        elif wire == _FIXED32:
            length = 4
        elif wire == _FIXED64:
            length = 8
        else:
            raise NotAnExample(f"wire type {wire} at byte {position}")
        if length > end - position:
            raise NotAnExample(f"cut off at byte {position}: {length} bytes announced, {end - position} left")
        yield number, wire, position, position + length
        position += length


def _varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= end:
            raise NotAnExample(f"cut off within a number at byte {position}")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, position
    raise NotAnExample(f"a number longer than ten bytes at byte {position}")
