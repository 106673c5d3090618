"""A million sentences: how long an import takes and how much memory it holds, measured in a process of its own."""

import json
import subprocess
import sys

import numpy as np
import pytest
from messy_tables import write_tickets
from published import sentence, write_counts, write_sqlite

SENTENCES, USERS, WORDS = 1_000_000, 20_000, 30_000
MEASURE = """
import json, sys, time
from fedbandit.cli.app import main
sys.argv = ["fedbandit", "data", "import", *sys.argv[1:]]
start, worked = time.perf_counter(), time.process_time()
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
# Not ru_maxrss: that one survives exec, so it would tell how large the test that made the data had grown.
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
peak = int(status["VmHWM"].split()[0]) / 1024
print(json.dumps({"seconds": time.perf_counter() - start, "cpu": time.process_time() - worked, "megabytes": peak}))
"""


def measured(*arguments):
    command = [sys.executable, "-c", MEASURE, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(arguments[0], found)
    return found


def sentences():
    """(user, text, title, tags) with Zipf words; users come in blocks, as in the published file."""
    rng = np.random.default_rng(0)
    for block in range(SENTENCES // 10_000):
        ranks = np.minimum(rng.zipf(1.3, (10_000, 14)), WORDS) - 1
        tags = rng.integers(0, 60, (10_000, 2))
        for row in range(10_000):
            user = f"user{(block * 10_000 + row) * USERS // SENTENCES:06d}"
            words = [f"w{rank}" for rank in ranks[row]]
            yield user, " ".join(words[:10]), " ".join(words[10:]), f"t{tags[row, 0]}|t{tags[row, 1]}"


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc"),
]


def test_a_million_published_sentences(tmp_path):
    rows = [("train", user, sentence(text, title, tags)) for user, text, title, tags in sentences()]
    rows.append(("test", "user000000", rows[0][2]))
    path = write_sqlite(tmp_path / "stackoverflow.sqlite", rows)
    write_counts(tmp_path, {f"w{i}": WORDS - i for i in range(WORDS)}, {f"t{i}": 100 - i for i in range(60)})
    found = measured("stackoverflow", path, "--out", tmp_path / "out")
    assert found["megabytes"] < 500
    assert found["cpu"] < 150  # of one core; the clock on the wall also counts what others do


def test_a_million_sentences_of_a_shuffled_table(tmp_path):
    lines = [f"{user},{title} {text},{tags}\n" for user, text, title, tags in sentences()]
    np.random.default_rng(1).shuffle(lines)
    (tmp_path / "t.csv").write_text("".join(["user,text,tags\n", *lines]))
    columns = ["--client", "user", "--text", "text", "--labels", "tags"]
    found = measured("table", tmp_path / "t.csv", *columns, "--out", tmp_path / "out")
    assert found["megabytes"] < 500
    assert found["cpu"] < 150  # of one core; the clock on the wall also counts what others do


def test_a_large_messy_table(tmp_path):
    """Every column is looked at, and text is found on the way: a pass more, and no more memory."""
    path = write_tickets(tmp_path / "tickets.csv", rows=400_000)
    found = measured("table", path, "--client", "Kunde", "--labels", "Queue", "--out", tmp_path / "out")
    assert found["megabytes"] < 500
    assert found["cpu"] < 60  # of one core
