"""`fedbandit data` as a user meets it: in a process of its own, with mistakes, signals and full disks."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from messy_tables import write_clicks, write_decisions
from published import emnist_rows, pack, sentence, write_counts, write_sqlite

from fedbandit.cli.app import main
from fedbandit.core.errors import DataError
from fedbandit.core.progress import SILENT
from fedbandit.data.dataset import FederatedDataset
from fedbandit.data.importers.images import import_emnist
from fedbandit.data.importers.published import open_published
from fedbandit.data.writer import DatasetWriter

TABLE = "user,title,tags\n" + "".join(
    f"u{i % 20},sort a list {i},python|t{i % 3}\n" for i in range(200)
)


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def here(monkeypatch, capfd):
    """The command line within this process: quicker, for what needs no process of its own."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedbandit", "data", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(ended.value.code, *capfd.readouterr())

    return run


def fedbandit(*arguments, **more):
    command = [sys.executable, "-m", "fedbandit", "data", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **more)


def table_arguments(folder: Path):
    (folder / "t.csv").write_text(TABLE)
    return [
        "import",
        "table",
        folder / "t.csv",
        "--client",
        "user",
        "--text",
        "title",
        "--labels",
        "tags",
    ]


def test_importing_and_looking_at_a_table(tmp_path):
    done = fedbandit(*table_arguments(tmp_path), "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "4 actions" in done.stdout
    assert "Looking at the columns" in done.stderr  # progress, as plain lines when piped
    assert "\x1b" not in done.stderr
    looked = fedbandit("info", tmp_path / "out")
    assert looked.returncode == 0, looked.stderr
    assert "examples per client (min, quartiles, max): 10 / 10 / 10 / 10 / 10" in looked.stdout
    assert "most frequent in train: python" in looked.stdout
    assert "checksums, types, shapes and ranges are right" in looked.stdout
    labels = tmp_path / "out" / "train" / "label_ids.npy"
    labels.write_bytes(labels.read_bytes()[:-4] + b"\1\0\0\1")
    mistake(fedbandit("info", tmp_path / "out"), "label_ids.npy, entry ", "is outside 0..3")


def test_importing_and_looking_at_published_images(tmp_path, here, monkeypatch):
    path = pack(write_sqlite(tmp_path / "emnist_all.sqlite", emnist_rows()))
    assert here("import", "emnist", path, "--out", tmp_path / "out").returncode == 0
    monkeypatch.chdir(tmp_path)
    looked = here("info", "out")
    assert "contact sheet: out-contact-sheet.png" in looked.stdout, looked.stderr
    assert (tmp_path / "out-contact-sheet.png").read_bytes().startswith(b"\x89PNG")
    assert "contact sheet: sheet.png" in here("info", "out", "--picture", "sheet").stdout
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")
    mistake(
        here("info", "out", "--picture", "sheet.foo"), "picture: sheet.foo: no such format", "png"
    )
    assert (
        here("import", "emnist", tmp_path, "--digits", "--out", tmp_path / "digits").returncode == 0
    )


def test_importing_published_sentences_finds_the_counts_beside_them(tmp_path, here):
    rows = [("train", "u", sentence("a b", "c", "x|y")), ("test", "u", sentence("a", "b", "x"))]
    write_sqlite(tmp_path / "stackoverflow.sqlite", rows)
    write_counts(tmp_path, {"a": 2, "b": 1}, {"x": 3, "y": 1})
    done = here("import", "stackoverflow", tmp_path, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "train: 1 examples of 1 clients" in done.stdout
    mistake(
        here("info", tmp_path / "out", "--picture", tmp_path / "sheet.png"),
        "picture: out has no images",
    )


def mistake(done, *parts):
    """Exit code 2 and one line, whatever progress came before it."""
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.endswith((" left", " s", "%"))]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    for part in parts:
        assert part in lines[0]


def test_mistakes_end_in_one_line(tmp_path, here):
    good = [*table_arguments(tmp_path), "--out", tmp_path / "out"]
    mistake(here(*good, "--split", "titel"), "no column 'titel'", "did you mean title")
    mistake(here(*good, "--test-fraction", "2"), "test-fraction")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    mistake(here(*good), "already exists; nothing was overwritten")
    (tmp_path / "e.sqlite").write_text("no")
    mistake(
        here("import", "emnist", tmp_path / "e.sqlite", "--out", tmp_path / "e"),
        "not a SQLite database",
    )
    mistake(here("info", tmp_path), "header.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["e.sqlite", "out", "t.csv"]


def test_generating_a_population(tmp_path, here):
    made = [
        here("generate", "topics", "--clients", 20, "--like", "stackoverflow", "-o", tmp_path / n)
        for n in "ab"
    ]
    assert all("20 clients" in one.stdout and "Drawing users" in one.stderr for one in made)
    assert (tmp_path / "a" / "checksums.json").read_bytes() == (
        tmp_path / "b" / "checksums.json"
    ).read_bytes()
    mistake(here("generate", "tropics", "-o", tmp_path / "c"), "topics")
    mistake(
        here("generate", "topics", "--like", "me", "-o", tmp_path / "c"), "like", "stackoverflow"
    )
    mistake(here("generate", "topics", "--clients", 0, "-o", tmp_path / "c"), "--clients")
    assert not (tmp_path / "c").exists()


def test_statistics_need_labels(tmp_path, here):
    assert here(*table_arguments(tmp_path), "--out", tmp_path / "labelled").returncode == 0
    measured = here("statistics", tmp_path / "labelled")
    assert "train clients, examples      " in measured.stdout, measured.stderr
    (tmp_path / "log.csv").write_text("user,x,a,r,p\n1,0.5,go,1,0.5\n2,0.7,stop,0,0.5\n")
    columns = [
        "--client",
        "user",
        "--features",
        "x",
        "--action",
        "a",
        "--reward",
        "r",
        "--propensity",
        "p",
    ]
    assert (
        here(
            "import", "logged", tmp_path / "log.csv", *columns, "--out", tmp_path / "out"
        ).returncode
        == 0
    )
    mistake(here("statistics", tmp_path / "out"), "out: no example has a label")


# An import that has read everything, and then waits for a signal in place of finishing.
WAITING = """
import time
from fedbandit.cli import main
from fedbandit.data.writer import DatasetWriter

def finish(self):
    print("about to finish", flush=True)
    time.sleep(600)

DatasetWriter.finish = finish
main()
"""


@pytest.fixture
def waiting_import(tmp_path, tmp_path_factory):
    """An import with all its files open, which does not end by itself however slow or fast the machine is."""
    path = tmp_path_factory.mktemp("source") / "a.npz"
    np.savez(path, x=np.zeros((300, 30), np.float32), y=np.zeros(300, int), c=np.arange(300))
    started = []

    def start():
        command = [sys.executable, "-c", WAITING, "data", "import", "arrays", str(path)]
        command += [
            "--features",
            "x",
            "--labels",
            "y",
            "--clients",
            "c",
            "--out",
            str(tmp_path / "new" / "out"),
        ]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(
                signal.SIGINT, signal.SIG_DFL
            ),  # ignored where tests run in a background job
        )
        started.append(process)
        assert process.stdout.readline() == "about to finish\n", process.stderr.read()
        assert (tmp_path / "new" / ".out.partial" / "train.spool").is_dir()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_leaves_nothing_behind(tmp_path, waiting_import, number):
    process = waiting_import()
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1] == "interrupted; nothing was written"
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())


def test_what_kill_leaves_is_hidden_and_the_next_import_clears_it(tmp_path, waiting_import):
    process = waiting_import()
    process.kill()
    process.communicate()
    assert [p.name for p in (tmp_path / "new").iterdir()] == [".out.partial"]
    left = tmp_path / "new" / ".out.partial" / "unpacked"
    left.write_text("left by a killed import of a packed file")
    done = fedbandit(*table_arguments(tmp_path), "--out", tmp_path / "new" / "out")
    assert done.returncode == 0, done.stderr
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["out"]


def test_a_second_import_of_a_packed_file_does_not_disturb_the_first(tmp_path, here):
    path = pack(write_sqlite(tmp_path / "emnist_all.sqlite", emnist_rows()))
    with (
        DatasetWriter(tmp_path / "out", kind="dense", shape=(1,), actions="ab") as writer,
        open_published(path, copy := writer.staging / "unpacked", SILENT),
    ):
        mistake(
            here("import", "emnist", path, "--out", tmp_path / "out"),
            "another import is writing it",
        )
        with pytest.raises(DataError, match="another import is writing it"):
            import_emnist(path, tmp_path / "out")
        assert copy.read_bytes() == (tmp_path / "emnist_all.sqlite").read_bytes()
    assert here("import", "emnist", path, "--out", tmp_path / "out").returncode == 0


def test_a_file_too_large_for_the_disk_ends_in_one_line(tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    path = pack(write_sqlite(tmp_path / "emnist_all.sqlite", emnist_rows(clients=20)))
    packed = fedbandit(
        "import", "emnist", path, "--out", tmp_path / "new" / "out", preexec_fn=limit
    )
    mistake(packed, "no space left on the disk; nothing was written")
    done = fedbandit(
        "import", "emnist", tmp_path, "--out", tmp_path / "new" / "out", preexec_fn=limit
    )
    mistake(done, "no space left on the disk; nothing was written")
    assert not (tmp_path / "new").exists()


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of half a megabyte."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small disk needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("size", [30_000, 120_000])
def test_a_full_disk_ends_in_one_line(tmp_path, small_disk, size):
    # The smaller one fits while it is spooled and meets the end of the disk only when it is completed.
    features = np.zeros((size // 10, 100 if size > 100_000 else 25), np.float32)
    np.savez(
        tmp_path / "a.npz", x=features, y=np.zeros(len(features), int), c=np.arange(len(features))
    )
    names = ["--features", "x", "--labels", "y", "--clients", "c"]
    done = fedbandit("import", "arrays", tmp_path / "a.npz", *names, "--out", small_disk / "out")
    mistake(done, "no space left on the disk; nothing was written")
    assert not list(small_disk.iterdir())


def test_the_command_line_loads_nothing_heavy_before_it_has_to():
    code = "import sys, fedbandit.cli.data; print([m for m in ('torch', 'numba', 'numpy', 'pyarrow') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_looking_before_importing_writes_nothing(here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_clicks(tmp_path / "clicks.csv", rows=100)
    command = ("import", "table", "clicks.csv", "--client", "visitor", "--labels", "clicked")
    done = here(*command, "--dry-run", "--as", "price=raw")
    assert done.returncode == 0, done.stderr
    assert "number, as it is" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["clicks.csv"]
    missing = here(*command)
    assert missing.returncode == 2
    assert (
        "error: out: name the folder to create (--out), or only look (--dry-run)" in missing.stderr
    )
    wrong = here(*command, "--dry-run", "--as", "prize=raw")
    assert "clicks.csv: no column 'prize'; did you mean price" in wrong.stderr


def test_logs_of_others_in_and_out(here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_decisions(tmp_path / "log.dsjson", rows=60)
    done = here("import", "dsjson", "log.dsjson", "--client", "User.id", "-o", "log")
    assert done.returncode == 0, done.stderr
    assert "the action that was taken: 4 of them" in done.stdout
    assert here("export", "log", "--to", "dsjson", "-o", "again.dsjson").stdout.startswith(
        "written: again.dsjson"
    )
    assert "use dsjson" in here("export", "log", "--to", "openbandit", "-o", "obd").stderr
    assert (
        "has no split 'tset'"
        in here("export", "log", "--to", "dsjson", "-o", "x", "--split", "tset").stderr
    )


def test_logs_without_propensities_are_imported_with_estimates(here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    actions = rng.choice(3, 600, p=[0.6, 0.3, 0.1])
    lines = [f"u{i % 40},{rng.random():.3f},a{a},{rng.integers(2)}" for i, a in enumerate(actions)]
    (tmp_path / "log.csv").write_text("user,x,did,click\n" + "\n".join(lines) + "\n")
    words = ["import", "logged", "log.csv", "--client", "user", "--action", "did"]
    words += ["--reward", "click", "--out", "log"]
    refused = here(*words)
    assert refused.returncode == 2
    assert "name its column, or --estimate-propensities" in refused.stderr
    done = here(*words, "--estimate-propensities")
    assert not done.returncode, done.stderr
    log = FederatedDataset.open(tmp_path / "log")
    assert log.header.source["propensities"] == "estimated"
    found = [log.train.log.propensities[log.train.log.actions == a].mean() for a in range(3)]
    np.testing.assert_allclose(found, [0.6, 0.3, 0.1], atol=0.08)
    assert "propensities estimated" in here("info", "log").stdout
