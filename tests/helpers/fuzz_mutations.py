"""Ways to spoil a file: bits, cuts and insertions in its bytes, one field of what it says, or what is no file at all.

Drawn from a seed.
"""

import io
import json
import os
import random
import socket
import sqlite3
import tomllib
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedbandit.core.files import pack, unpack

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 2**31, -(2**31), 2**62, 2**63, -(2**63) - 1, 2**70, 10**400),
    *(0.5, -0.5, 1e-320, 1e39, 1e308, float("inf"), float("-inf"), float("nan")),
    *(
        "",
        "x",
        "1",
        "\x00",
        "ü\u2028",
        "../..",
        "a:b",
        "x" * 5000,
        [],
        {},
        [[]],
        [0],
        {"a": 1},
        [None] * 50,
    ),
)
MOST_OF_A_FILE = 1 << 20  # bytes that an insertion may add


def _deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def odd_value(rng: random.Random) -> Any:
    """What no program would write there."""
    return _deep(200) if rng.random() < 0.03 else rng.choice(ODD)


def spoiled_bytes(data: bytes, rng: random.Random) -> bytes:
    """Some bits, a cut, an insertion, a repetition, or other bytes in place of some."""
    way = rng.randrange(8)
    if not data or way == 0:
        return rng.choice((b"", b"\0", rng.randbytes(rng.randrange(1, 300)), b"{}", b"[" * 5000))
    changed = bytearray(data)
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.choice((1, 2, 4, 8, 64, 1024)))
    if way <= 2:
        for _ in range(rng.choice((1, 1, 2, 20))):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif way == 3:
        del changed[start:]
    elif way == 4:
        changed[start:start] = rng.choice(
            (rng.randbytes(end - start), b"\0" * (end - start), data[start:end])
        )
    elif way == 5:
        del changed[start:end]
    elif way == 6:
        changed[start:end] = rng.choice((b"\0", b"\xff", b"9", b"-", b"\n")) * (end - start)
    else:
        changed += changed[start:][:MOST_OF_A_FILE]
    return bytes(changed)


def spoiled_value(value: Any, rng: random.Random) -> Any:
    """A tree of plain values with one of them changed, removed, added or exchanged for another."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        way = rng.random()
        if way < 0.08:
            return {k: v for k, v in value.items() if k != key}
        if way < 0.12:
            return {**value, rng.choice(("x", "", "name", key + "_")): odd_value(rng)}
        return {**value, key: spoiled_value(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        way = rng.random()
        if way < 0.15:
            return value[:place] + value[place + 1 :]
        if way < 0.25:
            return [*value, value[place]]
        return [*value[:place], spoiled_value(value[place], rng), *value[place + 1 :]]
    if type(value) in (int, float) and rng.random() < 0.4:
        return rng.choice((value + 1, value - 1, -value, value * 1000, float(value), str(value)))
    return odd_value(rng)


def spoiled_json(data: bytes, rng: random.Random) -> bytes:
    return json.dumps(spoiled_value(json.loads(data), rng)).encode("utf-8", "surrogatepass")


def spoiled_lines(data: bytes, rng: random.Random) -> bytes:
    """One line of JSON lines spoiled, dropped, doubled, or exchanged with another."""
    lines = data.splitlines(keepends=True)
    place, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    way = rng.randrange(6)
    if way == 0:
        del lines[place]
    elif way == 1:
        lines.insert(place, lines[other])
    elif way == 2:
        lines[place], lines[other] = lines[other], lines[place]
    else:
        lines[place] = spoiled_json(lines[place], rng) + b"\n"
    return b"".join(lines)


def spoiled_toml(data: bytes, rng: random.Random) -> bytes:
    for _ in range(20 if rng.random() < 0.95 else 0):
        try:
            return tomli_w.dumps(spoiled_value(tomllib.loads(data.decode()), rng)).encode(
                "utf-8", "surrogatepass"
            )
        except (TypeError, ValueError, AttributeError):  # what TOML cannot say
            continue
    return (
        data
        + b"\n"
        + rng.choice((b"a." * 3000 + b"b = 1", b"x = " + b"[" * 3000, b"[[[", b"x = 1e999"))
    )


def spoiled_array(array: np.ndarray, rng: random.Random) -> np.ndarray:
    """Another number, type, shape or order in an array."""
    way = rng.randrange(7)
    if way <= 2 and array.size and array.dtype.kind in "iuf":
        array = array.copy()
        flat = array.reshape(-1)
        odd = rng.choice(
            (0, 1, -1, 2, 50, 127, 2**31 - 1, -(2**31), 2**62, 0.5, np.nan, np.inf, 3e38)
        )
        with np.errstate(all="ignore"):
            flat[rng.randrange(array.size)] = np.array(odd).astype(array.dtype)
        return array
    if way == 3:
        return array.astype(
            rng.choice(("int32", "int64", "float32", "float64", ">i4", "uint8", "S3")), copy=True
        )
    if way == 4:
        return array[: rng.randrange(len(array) + 1)] if array.ndim else array
    if way == 5:
        return rng.choice(
            (array[None], array.reshape(-1), np.append(array.reshape(-1), array.reshape(-1)[:1]))
        )
    return array[::-1].copy() if array.ndim else array


def to_npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def spoiled_npy(data: bytes, rng: random.Random, header: bool = True) -> bytes:
    if header and rng.random() < 0.3:  # the header, which says what it likes
        head, body = data[:128], data[128:]
        old = rng.choice((b"'<", b"False", b"(", b",", b"4", b"8", b"1"))
        return (
            head.replace(old, rng.choice((b"'>", b"True ", b"(-", b"(9999999999,", b"2", b"0")), 1)
            + body
        )
    try:
        return to_npy(spoiled_array(np.load(io.BytesIO(data)), rng))
    except (ValueError, TypeError, OverflowError):
        return spoiled_bytes(data, rng) if header else data


def spoiled_zip(data: bytes, rng: random.Random) -> bytes:
    """One array of a `.npz` spoiled, missing, or there twice."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(sorted(members))
    if rng.random() < 0.1:
        del members[name]
    else:
        members[name] = spoiled_npy(members[name], rng)
    file = io.BytesIO()
    with zipfile.ZipFile(
        file, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    ) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return file.getvalue()


def spoiled_tensors(data: bytes, rng: random.Random) -> bytes:
    """The header's own fields of a safetensors file: places, shapes, types, texts."""
    length = int.from_bytes(data[:8], "little")
    text = spoiled_json(data[8 : 8 + length], rng)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def signed_anew(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file with a right checksum that says something else, as a hostile writer would make it."""
    arrays, texts = unpack(data)
    if rng.random() < 0.4:
        name = rng.choice(sorted(arrays))
        try:
            arrays[name] = np.asarray(spoiled_array(arrays[name], rng))
            return pack(arrays, texts)
        except Exception:  # types that safetensors does not know
            return data
    name = rng.choice(sorted(texts))
    # Marks, such as the id of a run, are plain text.
    change = spoiled_json if texts[name].startswith("{") else spoiled_bytes
    texts[name] = change(texts[name].encode(), rng).decode("utf-8", "replace")
    return pack(arrays, texts)


def spoiled_sqlite(data: bytes, rng: random.Random) -> bytes:
    """One cell of a database, or one row, or a table that is gone."""
    in_wal_mode = data[18:20]  # which a database in memory cannot have
    with sqlite3.connect(":memory:") as database:
        database.deserialize(data[:18] + b"\1\1" + data[20:])
        names = [
            row[0]
            for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        tables = sorted(name for name in names if not name.startswith("sqlite_"))
        table = rng.choice(tables)
        columns = [row[1] for row in database.execute(f'PRAGMA table_info("{table}")')]
        column = rng.choice(columns)
        if rng.random() < 0.05:
            database.execute(f'DROP TABLE "{table}"')
        elif rowids(database, table):
            rows = database.execute(f'SELECT rowid, "{column}" FROM "{table}"').fetchall()
            row, value = rng.choice(rows)
            cell = _cell(value, rng)
            _change(
                database,
                f'UPDATE OR IGNORE "{table}" SET "{column}" = ? WHERE rowid = ?',
                (cell, row),
            )
        else:
            _change(database, f'UPDATE OR IGNORE "{table}" SET "{column}" = ?', (_cell(None, rng),))
        database.commit()
        changed = database.serialize()
        return changed[:18] + in_wal_mode + changed[20:]


def rowids(database: sqlite3.Connection, table: str) -> bool:
    """Whether it has rows with numbers."""
    try:
        return database.execute(f'SELECT rowid FROM "{table}" LIMIT 1').fetchone() is not None
    except sqlite3.OperationalError:
        return False


def _change(database: sqlite3.Connection, statement: str, values: tuple[Any, ...]) -> None:
    with suppress(sqlite3.IntegrityError):  # what the schema itself refuses
        database.execute(statement, values)


def _cell(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bytes) and rng.random() < 0.7:
        return spoiled_bytes(value, rng)
    if isinstance(value, str) and rng.random() < 0.5:
        return spoiled_bytes(value.encode(), rng).decode("utf-8", "replace")
    return rng.choice(
        (
            None,
            0,
            -1,
            1,
            10**9,
            2**62,
            -(2**63),
            0.5,
            1e300,
            float("inf"),
            "",
            "x",
            b"",
            b"\xff",
            b"\0" * 100,
        )
    )


def spoiled_table(data: bytes, rng: random.Random) -> bytes:
    """One cell of a CSV file."""
    lines = data.decode().split("\n")
    row = rng.randrange(len(lines))
    cells = lines[row].split(",")
    odd = (
        "",
        " ",
        '"',
        "NaN",
        "inf",
        "1e400",
        "-1",
        "9" * 400,
        "x" * 10_000,
        "\x00",
        "a|b|c|d",
        "ü",
        '"a\nb"',
        "\r",
        ",",
    )
    cells[rng.randrange(len(cells))] = rng.choice(odd)
    lines[row] = ",".join(cells)
    return "\n".join(lines).encode()


Spoil = Callable[[bytes, random.Random], bytes]
BY_SUFFIX: dict[str, Spoil] = {
    ".json": spoiled_json,
    ".jsonl": spoiled_lines,
    ".toml": spoiled_toml,
    ".npy": spoiled_npy,
    ".npz": spoiled_zip,
    ".safetensors": spoiled_tensors,
    ".sqlite": spoiled_sqlite,
    ".csv": spoiled_table,
}


def spoiled(name: str, data: bytes, rng: random.Random, fields_only: bool = False) -> bytes:
    """A file as something has damaged it: its bytes, or one field of what they say."""
    suffix = name[name.rindex(".") :] if "." in name else ""
    by_field = BY_SUFFIX.get(suffix)
    if fields_only and suffix == ".npy":
        by_field = partial(spoiled_npy, header=False)
    for _ in range(20):
        use_field = by_field is not None and (fields_only or rng.random() < 0.5)
        if use_field and by_field is not None:
            changed = by_field(data, rng)
        elif (
            suffix == ".npy" and rng.random() < 0.5
        ):  # not its header, which is most of a small file
            changed = data[:128] + spoiled_bytes(data[128:], rng)
        else:
            changed = spoiled_bytes(data, rng)
        if changed != data:
            return changed
    return spoiled_bytes(data, rng) if not fields_only else data


@dataclass(frozen=True)
class Special:
    """Something in the place of a file that is none, or one without an end."""

    name: str
    make: Callable[[Path], None]


def _link_to_a_pipe(path: Path) -> None:
    os.mkfifo(path.with_name(f"{path.name}-pipe"))
    path.symlink_to(f"{path.name}-pipe")


def _terabyte(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.open(path.parent, os.O_RDONLY)  # the path itself may be too long for a socket
        try:
            made.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


SPECIAL = (
    Special("pipe", os.mkfifo),
    Special("link to a pipe", _link_to_a_pipe),
    Special("link to /dev/zero", lambda path: path.symlink_to("/dev/zero")),
    Special("link to /dev/full", lambda path: path.symlink_to("/dev/full")),
    Special("link to /dev/null", lambda path: path.symlink_to("/dev/null")),
    Special("link to nothing", lambda path: path.symlink_to("nowhere")),
    Special("link to itself", lambda path: path.symlink_to(path.name)),
    Special("folder", Path.mkdir),
    Special("terabyte of nothing", _terabyte),
    Special("socket", _socket),
)
