"""Source files made to hurt: shapes that overflow, archives that unpack without end, endless tables and elements."""

import io
import lzma
import sqlite3
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from published import emnist_rows, write_counts, write_sqlite
from test_files import ARRAYS, handwriting, save

from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.progress import SILENT
from fedbandit.data import importers as limits
from fedbandit.data.importers import published, stackexchange
from fedbandit.data.importers.arrays import ArrayOptions, import_arrays
from fedbandit.data.importers.images import import_emnist
from fedbandit.data.importers.stackexchange import import_stackexchange, read_tag_counts


def npy(descr, shape, data=b""):
    """A `.npy` file whose header says what it likes."""
    text = (
        f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117)
        + b"\n"
    )
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def archive(path, **files):
    """A `.npz` of arrays, some of them given as raw bytes."""
    with zipfile.ZipFile(path, "w") as made:
        for name, content in {**handwriting(6), **files}.items():
            if not isinstance(content, bytes):
                buffer = io.BytesIO()
                np.save(buffer, content)
                content = buffer.getvalue()
            made.writestr(f"{name}.npy", content)
    return path


HEADERS = {
    "a product that overflows": ("images", npy("|u1", "(6, 4294967296, 4294967296)")),
    "a side that overflows": ("images", npy("|u1", f"(6, {2**70})")),
    "more rows than bytes": ("writers", npy("<i8", f"({2**40},)", bytes(64))),
    "rows of nothing": ("images", npy("|u1", f"({2**62}, 0)")),
    "a negative side": ("labels", npy("<i8", "(-6,)", bytes(48))),
    "strings of no length": ("writers", npy("|S0", "(6,)")),
    "text of no length": ("labels", npy("<U0", "(6,)")),
    "very long strings": ("writers", npy("|S1000000", "(6,)", bytes(6_000_000))),
    "a structure": ("images", npy([("a", "<f4"), ("b", "<f4")], "(6,)", bytes(48))),
    "times": ("labels", npy("<M8[s]", "(6,)", bytes(48))),
    "a dtype that is none": ("labels", npy("<q9", "(6,)", bytes(48))),
    "a shape that is none": ("labels", npy("<i8", "'six'", bytes(48))),
    "no header": ("labels", b"\x93NUMPY\x01\x00\xff\xff"),
    "another version": ("labels", b"\x93NUMPY\x09\x00" + bytes(100)),
    "more than the shape says": ("labels", npy("<i8", "(6,)", bytes(80))),
}


@pytest.mark.parametrize("what", HEADERS)
def test_arrays_whose_header_lies_are_one_line(tmp_path, what):
    name, content = HEADERS[what]
    path = archive(tmp_path / "a.npz", **{name: content})
    with pytest.raises(DataError) as refused:
        import_arrays(path, tmp_path / "out", ArrayOptions(**ARRAYS))
    assert str(refused.value).startswith(f"{path}: {name}")
    assert "\n" not in str(refused.value)
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]


@pytest.mark.parametrize("label", [2**62, 2**63 - 1, limits.MOST_ACTIONS])
def test_a_label_that_would_be_a_quintillion_actions(tmp_path, label):
    path = save(
        tmp_path / "a.npz", **{**handwriting(6), "labels": np.array([0, 1, label, 3, 4, 5])}
    )
    with pytest.raises(
        DataError, match=rf"labels, row 2: label {label} is larger than any data set has actions"
    ):
        import_arrays(path, tmp_path / "out", ArrayOptions(**ARRAYS))


def test_a_quintillion_actions_cannot_be_asked_for():
    with pytest.raises(ConfigError, match="actions: must be at most"):
        ArrayOptions(**ARRAYS, actions=2**62)


def test_an_archive_that_unpacks_without_measure_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "ALWAYS_UNPACKED", 1 << 20)
    rows = 4000
    arrays = {"labels": np.arange(rows) % 3, "writers": np.arange(rows)}
    path = save(tmp_path / "a.npz", images=np.zeros((rows, 28, 28), np.uint8), **arrays)
    with pytest.raises(DataError, match=r"a\.npz: images unpacks to 3\.1 MB, .* times its size"):
        import_arrays(path, tmp_path / "out", ArrayOptions(**ARRAYS))
    path = save(tmp_path / "b.npz", False, images=np.zeros((rows, 28, 28), np.uint8), **arrays)
    import_arrays(path, tmp_path / "out", ArrayOptions(**ARRAYS))  # what the line advises


@pytest.mark.parametrize("kind", [lzma.FORMAT_ALONE, lzma.FORMAT_XZ])
def test_a_packed_file_that_unpacks_without_measure_is_refused(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(limits, "ALWAYS_UNPACKED", 1 << 20)
    path = tmp_path / "emnist_all.sqlite.lzma"
    path.write_bytes(lzma.compress(bytes(30 << 20), format=kind))
    with pytest.raises(DataError, match=r"lzma: unpacks to more than .* MB, .* times its size"):
        import_emnist(path, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_packed_file_that_asks_for_all_memory_is_refused(tmp_path):
    path = tmp_path / "emnist_all.sqlite.lzma"
    packed = bytearray(lzma.compress(b"x" * 1000, format=lzma.FORMAT_ALONE))
    packed[1:5] = (0xFFFFFFFF).to_bytes(4, "little")  # the size of the dictionary
    path.write_bytes(packed)
    with (
        pytest.raises(DataError, match=r"lzma: damaged: "),
        published.open_published(path, tmp_path / "out", SILENT),
    ):
        pass


def database(tmp_path, *statements, **more):
    path = write_sqlite(tmp_path / "emnist_all.sqlite", emnist_rows(), **more)
    connection = sqlite3.connect(path)
    with connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()
    return path


DATABASES = {
    "counts as text": (
        ["UPDATE client_metadata SET num_examples = 'many' WHERE rowid = 1"],
        "client_metadata: client .* has 'many' examples",
    ),
    "counts missing": (["UPDATE client_metadata SET num_examples = NULL"], "has None examples"),
    "counts as floats": (["UPDATE client_metadata SET num_examples = 2.5"], "has 2.5 examples"),
    "negative counts": (["UPDATE client_metadata SET num_examples = -1"], "has -1 examples"),
    "huge counts": (
        ["UPDATE client_metadata SET num_examples = 9223372036854775807"],
        "has 9223372036854775807 ex",
    ),
    "clients as blobs": (
        ["UPDATE client_metadata SET client_id = x'ff00'"],
        "client_metadata: a client's id is not text",
    ),
    "clients of examples as blobs": (
        ["UPDATE examples SET client_id = x'ff00'"],
        "row 1: the client's id is not text",
    ),
    "clients of examples missing": (
        ["UPDATE examples SET client_id = NULL"],
        "row 1: the client's id is not text",
    ),
    "examples as text": (
        ["UPDATE examples SET serialized_example_proto = 'x'"],
        "row 1: not a tf.train.Example",
    ),
    "more examples than promised": (["INSERT INTO examples SELECT * FROM examples"], "promises"),
    "an endless view": (
        [
            "DROP TABLE examples",
            "CREATE VIEW examples AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
            "SELECT i AS rowid, 'all_train' AS split_name, 'c' AS client_id, x'' AS serialized_example_proto FROM n",
        ],
        "examples is not a plain table",
    ),
    "endless metadata": (
        [
            "DROP TABLE client_metadata",
            "CREATE VIEW client_metadata AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
            "SELECT 'c' || i AS client_id, 'all_train' AS split_name, 1 AS num_examples FROM n",
        ],
        "client_metadata is not a plain table",
    ),
    "text that is not text": (
        ["UPDATE client_metadata SET client_id = CAST(x'ff' AS TEXT)"],
        "damaged|not text",
    ),
}


@pytest.mark.parametrize("what", DATABASES)
def test_databases_that_are_wrong_are_one_line(tmp_path, what):
    statements, match = DATABASES[what]
    path = database(tmp_path, *statements)
    with pytest.raises(DataError, match=match) as refused:
        import_emnist(path, tmp_path / "out")
    assert "\n" not in str(refused.value)


def test_published_counts_are_not_negative(tmp_path):
    _, tags = write_counts(tmp_path, {"a": 1}, {"x": -3, "y": True})
    with pytest.raises(DataError, match="tags and their counts"):
        read_tag_counts(tags, 2)


POST = '<row Id="1" PostTypeId="1" OwnerUserId="{}" Title="sort a list" Body="b" Tags="|python|" />'


def dump(path, inside):
    path.write_text(f"<posts>{inside}</posts>")
    return path


@pytest.mark.parametrize(
    ("inside", "match"),
    [
        ("<x/>" * 200_000 + POST, "other elements than posts"),
        ("<x>" * 50 + "</x>" * 50, "nested"),
        ("<x>" + "<y/>" * 200_000 + "</x>", "other elements than posts"),
        (f'<row Id="{"1" * 3_000_000}" />', "one element is larger than"),
        ("text " * 600_000, "one element is larger than"),
    ],
)
def test_foreign_elements_come_to_an_end(tmp_path, monkeypatch, inside, match):
    monkeypatch.setattr(stackexchange, "_LARGEST_ELEMENT", 2_000_000)
    with pytest.raises(DataError, match=match):
        import_stackexchange(dump(tmp_path / "Posts.xml", inside), tmp_path / "out")


def test_elements_inside_posts_are_passed_over(tmp_path):
    inside = "".join(POST.format(user).replace("/>", "><x>y</x></row>") for user in range(20))
    assert import_stackexchange(dump(tmp_path / "Posts.xml", inside), tmp_path / "out").is_dir()


def test_posts_take_no_memory_once_they_are_read(tmp_path):
    """A tree of these 800,000 elements would take hundreds of megabytes."""
    path = tmp_path / "Posts.xml"
    with open(path, "w") as file:
        file.write("<posts>")
        for _ in range(200):
            file.write((POST.format("").replace("/>", ">" + "<x/>" * 3 + "</row>") + "<y/>") * 1000)
        file.write("</posts>")
    code = (
        "import sys, resource; from pathlib import Path\n"
        "from fedbandit.core.progress import SILENT\n"
        "from fedbandit.data.importers.stackexchange import read_questions\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "posts = sum(1 for _ in read_questions(Path(sys.argv[1]), SILENT, ''))\n"
        "print(posts, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, timeout=120, check=True
    )
    posts, kilobytes = map(int, done.stdout.split())
    assert posts == 200_000
    assert kilobytes < 50_000
