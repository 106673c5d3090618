"""The wire-format reader against the real protobuf library."""

import contextlib

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from published import Example, encode

from fedbandit.data.importers.published import parse_example

FLOAT = st.floats(width=32, allow_nan=False)
INT64 = st.integers(-(2**63), 2**63 - 1)
VALUES = st.one_of(
    st.lists(st.binary(max_size=200), max_size=5),
    st.lists(FLOAT, max_size=300),
    st.lists(INT64, max_size=20),
)


def by_protobuf(data: bytes) -> dict:
    found = {}
    for name, feature in Example.FromString(data).features.feature.items():
        kind = feature.WhichOneof("kind")
        found[name] = list(getattr(feature, kind).value) if kind else []
    return found


def as_lists(features: dict) -> dict:
    return {name: list(value) for name, value in features.items()}


@given(st.dictionaries(st.text(max_size=20), VALUES, max_size=6))
def test_reads_what_protobuf_writes(features):
    data = encode(**features)
    assert as_lists(parse_example(data)) == features
    assert as_lists(parse_example(data)) == by_protobuf(data)


@given(st.dictionaries(st.text(max_size=5), VALUES, min_size=1, max_size=3), st.data())
def test_a_truncated_message_is_refused_or_read_as_protobuf_reads_it(features, data):
    whole = encode(**features)
    part = whole[: data.draw(st.integers(0, len(whole) - 1))]
    try:
        expected = by_protobuf(part)
    except DecodeError:
        with pytest.raises(DecodeError):
            parse_example(part)
    else:
        assert as_lists(parse_example(part)) == expected


@given(st.binary(max_size=100))
def test_garbage_never_escapes_as_another_error(data):
    with contextlib.suppress(DecodeError):
        parse_example(data)


@given(st.lists(VALUES, min_size=2, max_size=4))
def test_repeated_messages_merge_as_protobuf_merges_them(values):
    data = b"".join(encode(name=value, **{f"x{i}": value}) for i, value in enumerate(values))
    assert as_lists(parse_example(data)) == by_protobuf(data)


def test_unpacked_numbers_are_read():
    floats = b"\x0d\x00\x00\x80\x3f\x0d\x00\x00\x00\x40"  # field 1, 32 bits, twice
    feature = b"\x12" + bytes([len(floats)]) + floats
    entry = b"\x0a\x01x\x12" + bytes([len(feature)]) + feature
    features = b"\x0a" + bytes([len(entry)]) + entry
    data = b"\x0a" + bytes([len(features)]) + features
    assert by_protobuf(data) == {"x": [1.0, 2.0]}
    np.testing.assert_array_equal(parse_example(data)["x"], [1.0, 2.0])


def test_only_what_is_wanted_is_returned():
    data = encode(tokens=[b"a"], score=[3], title=[b"b"])
    assert parse_example(data, {"tokens", "title"}) == {"tokens": [b"a"], "title": [b"b"]}


def test_types_are_those_of_the_lists():
    parsed = parse_example(encode(pixels=[0.5, 1.0], label=[-7], name=[b"a"]))
    assert parsed["pixels"].dtype == np.float32
    assert parsed["label"].dtype == np.int64
    assert parsed["label"][0] == -7
    assert parsed["name"] == [b"a"]


@pytest.mark.parametrize(
    "data", [b"\x0b", b"\xff" * 12, b"\x0a\x05ab", b"\x00\x01", b"\x0a\x04\x0a\x02\x0a\x09"]
)
def test_garbage_is_refused(data):
    with pytest.raises(DecodeError):
        parse_example(data)
