"""Large imports hold a bounded amount of memory, measured in processes of their own: three times the rows, no more."""

import subprocess
import sys

import numpy as np
import pytest
from messy_tables import write_tickets
from published import sentence, write_counts, write_sqlite

SIZES, USERS, WORDS = (100_000, 300_000), 20_000, 30_000
MOST, GROWTH = (
    500,
    40,
)  # megabytes; holding 200,000 sentences more as Python strings would take over 100
MEASURE = """
import sys
from fedbandit.cli.app import main
sys.argv = ["fedbandit", "data", "import", *sys.argv[1:]]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
# Not ru_maxrss: that one survives exec, so it would tell how large the test that made the data had grown.
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) / 1024)
"""


def megabytes(*arguments):
    command = [sys.executable, "-c", MEASURE, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1])


def sentences(count):
    """(user, text, title, tags) with Zipf words; users come in blocks, as in the published file."""
    rng = np.random.default_rng(0)
    for block in range(count // 10_000):
        ranks = np.minimum(rng.zipf(1.3, (10_000, 14)), WORDS) - 1
        tags = rng.integers(0, 60, (10_000, 2))
        for row in range(10_000):
            user = f"user{(block * 10_000 + row) * USERS // count:06d}"
            words = [f"w{rank}" for rank in ranks[row]]
            yield (
                user,
                " ".join(words[:10]),
                " ".join(words[10:]),
                f"t{tags[row, 0]}|t{tags[row, 1]}",
            )


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not sys.platform.startswith("linux"), reason="peak memory is read from /proc"
    ),
]


def published(folder, count):
    rows = [
        ("train", user, sentence(text, title, tags)) for user, text, title, tags in sentences(count)
    ]
    rows.append(("test", "user000000", rows[0][2]))
    path = write_sqlite(folder / "stackoverflow.sqlite", rows)
    write_counts(
        folder, {f"w{i}": WORDS - i for i in range(WORDS)}, {f"t{i}": 100 - i for i in range(60)}
    )
    return "stackoverflow", path


def shuffled_table(folder, count):
    lines = [f"{user},{title} {text},{tags}\n" for user, text, title, tags in sentences(count)]
    np.random.default_rng(1).shuffle(lines)
    (folder / "t.csv").write_text("".join(["user,text,tags\n", *lines]))
    return "table", folder / "t.csv", "--client", "user", "--text", "text", "--labels", "tags"


def messy_table(folder, count):
    """Every column is looked at, and text is found on the way: a pass more, and no more memory."""
    return (
        "table",
        write_tickets(folder / "t.csv", rows=count),
        "--client",
        "Kunde",
        "--labels",
        "Queue",
    )


@pytest.mark.parametrize("made", [published, shuffled_table, messy_table])
def test_three_times_the_rows_take_no_more_memory(made, tmp_path):
    peaks = []
    for count in SIZES:
        folder = tmp_path / str(count)
        folder.mkdir()
        peaks.append(megabytes(*made(folder, count), "--out", folder / "out"))
    print(made.__name__, peaks)
    assert peaks[-1] < MOST
    assert peaks[-1] - peaks[0] < GROWTH
