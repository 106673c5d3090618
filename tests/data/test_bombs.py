"""Small files that would take all memory: each is refused in one line, or read, in little memory."""

import gzip
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pytest
from published import emnist_rows, write_counts, write_sqlite
from pyarrow import parquet

MOST = 300  # megabytes above what the imports of Python take

PROGRAM = """
import resource, sys
from fedbandit.cli.data import app
import fedbandit.data.importers.arrays, fedbandit.data.importers.images
import fedbandit.data.importers.logs, fedbandit.data.importers.stackexchange
from fedbandit.core.errors import FedbanditError

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    app(["import", *sys.argv[1:]], standalone_mode=False)
    print("imported")
except FedbanditError as error:
    print(f"refused: {error}")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def imported(*words):
    """What an import says in the end, and the megabytes that it took."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *_, said, megabytes = done.stdout.splitlines()
    return said, int(megabytes)


def refused(match, *words):
    said, megabytes = imported(*words)
    assert said.startswith("refused: "), said
    assert match in said
    assert megabytes < MOST


def table(path):
    return "table", path, "-o", path.with_name("out"), "--client", "user", "--labels", "tag"


def dsjson(path, context):
    event = '"_label_cost": 0, "_label_probability": 1, "_label_Action": 1, "a": [1], "c": '
    path.write_text("{" + event + context + "}\n")
    return "dsjson", path, "-o", path.with_name("out"), "--client", "User.id"


@pytest.mark.parametrize(
    ("context", "match"),
    [
        ("[" * 100_000, "nested deeper than 200"),
        ('{"a": ' * 2_000_000, "nested deeper than 200"),
        ('{"a": [' + "{}," * 5_000_000 + "{}]}", "one value has more than 100 MB in memory"),
        ('{"a": ' * 900 + "1" + "}" * 900, "nested more than 5 deep"),
        ('{"a": "' + "x" * (17 << 20) + '"}', "is longer than 16,777,216 bytes"),
    ],
)
def test_decisions_in_json(tmp_path, context, match):
    refused(match, *dsjson(tmp_path / "log.dsjson", context))


def test_a_folder_of_leaf(tmp_path):
    """Brackets alone, in the place of the lists of users and in that of a user's images."""
    (tmp_path / "train").mkdir()
    path = tmp_path / "train" / "all_data_0.json"
    asked = ("leaf", tmp_path, "-o", tmp_path / "out")
    path.write_text("[" * 50_000_000)
    refused("all_data_0.json: not JSON of data: nested deeper than 200", *asked)
    users = '{"users": ["f0"], "num_samples": [1], "user_data": {"f0": {"x": '
    path.write_text(users + "[" * 50_000_000)
    refused("all_data_0.json: not JSON of data: nested deeper than 200", *asked)
    path.write_text(users + "[" + "[]," * 20_000_000)
    refused("all_data_0.json: one value has more than 100 MB in memory", *asked)


def test_counts_of_tags(tmp_path):
    """The word and tag counts are small files; a huge line or a deep value is none of them."""
    path = write_sqlite(tmp_path / "stackoverflow.sqlite", emnist_rows())
    words, tags = write_counts(tmp_path, {"a": 1}, {"x": 3})
    asked = ("stackoverflow", path, "-o", tmp_path / "out", "--words", words, "--tags", tags)
    tags.write_text("[" * 200_000)
    refused("nested deeper than 200", *asked)
    with open(words, "w") as file:
        for _ in range(60):
            file.write("x😀" * 800_000)
    refused("expected a word and its count", *asked)


LAUGHS = (
    '<!DOCTYPE posts [<!ENTITY a "aaaaaaaaaa">'
    + "".join(
        f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    + ']><posts><row Id="1" PostTypeId="1" Title="&i;" /></posts>'
)


@pytest.mark.parametrize(
    ("xml", "match"),
    [
        (LAUGHS, "declares the entity 'a'; not the Posts.xml of a dump"),
        ("<posts>" + "<x>" * 1_000_000, "elements are nested deeper than 16"),
        (f'<posts><row Title="{"x" * (40 << 20)}😀" /></posts>', "one element is larger than"),
    ],
    ids=["entities", "depth", "one post"],
)
def test_posts_in_xml(tmp_path, xml, match):
    (tmp_path / "Posts.xml").write_text(xml, encoding="utf-8")
    refused(match, "stackexchange", tmp_path, "-o", tmp_path / "out")


@pytest.mark.parametrize("megabytes", [20, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("quote", ['"', ""])
def test_a_cell_of_a_table(tmp_path, megabytes, quote):
    """A cell, quoted or not: a line of that length looks the same."""
    path = tmp_path / "t.csv"
    with open(path, "w") as file:
        file.write(f"user,tag,text\nu,a,{quote}")
        for _ in range(megabytes):
            file.write("x " * 500_000)
        file.write(f"{quote}\n")
    refused("a row is longer than 1,048,576 bytes; is a quote left open?", *table(path))


def test_columns_of_a_text(tmp_path):
    (tmp_path / "a.csv").write_text("user,tag" + ",x" * 500_000 + "\n")
    refused("500,002 columns; 100,000 can be read", *table(tmp_path / "a.csv"))
    (tmp_path / "b.csv").write_text("user,tag" + ",x" * 10_000_000 + "\n")
    refused("columns; 100,000 can be read", *table(tmp_path / "b.csv"))


def test_a_packed_text(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(gzip.compress(b"user,tag\n" + b"u,a\n" * 1_000_000))
    refused("t.csv: is packed by gzip; unpack it first", *table(path))


def test_a_text_that_is_stored_once_for_many_rows(tmp_path):
    """Each of these rows is a megabyte in memory; the file is not much larger than one of them."""
    path, rows = tmp_path / "t.parquet", 400
    texts = pa.array([("w" * 999 + " ") * 1_000])
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), texts)
    people = pa.array([f"u{row % 7}" for row in range(rows)])
    tags = pa.array([f"t{row % 3}" for row in range(rows)])
    columns = {"user": people, "tag": tags, "text": column}
    parquet.write_table(pa.table(columns), path, store_schema=False)
    said, megabytes = imported(*table(path), "--text", "text")
    assert said == "imported"
    assert path.stat().st_size < 2 << 20
    assert megabytes < MOST


def test_a_row_group_that_unpacks_without_measure(tmp_path):
    path = tmp_path / "t.parquet"
    columns = {"user": ["u"], "tag": ["a"], "text": [" " * (130 << 20)]}
    parquet.write_table(pa.table(columns), path, compression="zstd", use_dictionary=False)
    refused("column text, row group 1, unpacks to", *table(path))


def test_a_row_that_is_a_list_without_end(tmp_path):
    path = tmp_path / "t.parquet"
    lists = pa.ListArray.from_arrays([0, 17_000_000], np.zeros(17_000_000, np.float32))
    parquet.write_table(pa.table({"user": ["u"], "tag": ["a"], "x": lists}), path)
    refused("a row has more than 128 MB", *table(path))


def test_many_columns_of_one_number(tmp_path):
    """A column takes 200 bytes in the file; as numbers of all rows they would take 400 MB."""
    path, rows = tmp_path / "t.parquet", 16_384
    number = pa.array(np.zeros(rows))
    columns = {f"x{i}": number for i in range(3_000)}
    people = {"user": ["u", "v"] * (rows // 2), "tag": ["a", "b"] * (rows // 2)}
    parquet.write_table(pa.table({**people, **columns}), path)
    said, megabytes = imported(*table(path))
    assert said.startswith("refused: ")  # all of them are always the same
    assert megabytes < MOST


def test_labels_that_unpack_without_measure(tmp_path):
    path, rows = tmp_path / "a.npz", 10_000_000
    zeros = {"labels": np.zeros(rows, np.int64), "clients": np.zeros(rows, np.int64)}
    np.savez_compressed(path, x=np.zeros((rows, 1), np.uint8), **zeros)
    asked = ("--features", "x", "--labels", "labels", "--clients", "clients")
    refused("unpacks to 80.0 MB", "arrays", path, "-o", tmp_path / "out", *asked)


def test_an_example_of_a_database(tmp_path):
    path = write_sqlite(tmp_path / "emnist_all.sqlite", emnist_rows())
    with sqlite3.connect(path) as database:
        database.execute(
            "UPDATE examples SET serialized_example_proto = zeroblob(400000000) WHERE rowid = 1"
        )
    refused("damaged: string or blob too big", "emnist", path, "-o", tmp_path / "out")


def slow_table(folder):
    with open(folder / "t.csv", "w") as file:
        file.write("user,tag,text\n")
        file.writelines(f"u{i % 9},t{i % 5},some words {i}\n" for i in range(3_000_000))
    return table(folder / "t.csv")


def slow_log(folder):
    event = {"_label_cost": 0, "_label_probability": 1, "_label_Action": 1, "a": [1, 2]}
    line = json.dumps({**event, "c": {"User": {"id": "u", "age": 3}}}) + "\n"
    with open(folder / "log.dsjson", "w") as file:
        file.writelines([line] * 1_000_000)
    path = folder / "log.dsjson"
    return "dsjson", path, "-o", folder / "out", "--client", "User.id"


def slow_posts(folder):
    post = '<row PostTypeId="1" OwnerUserId="1" Title="sort a list" Body="b" Tags="|python|" />\n'
    (folder / "Posts.xml").write_text(f"<posts>{post * 1_000_000}</posts>")
    return "stackexchange", folder, "-o", folder / "out"


@pytest.mark.slow
@pytest.mark.parametrize("make", [slow_table, slow_log, slow_posts])
def test_an_import_ends_when_it_is_told_to(tmp_path, make):
    """Five seconds are promised on a machine that is not busy; here it has to end at all."""
    words = [str(word) for word in make(tmp_path)]
    command = [sys.executable, "-m", "fedbandit", "data", "import", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(8)
    assert process.poll() is None, "the import ended before it was told to"
    os.kill(process.pid, signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "interrupted; nothing was written" in said
    assert not (tmp_path / "out").exists()
