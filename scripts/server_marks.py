"""What a round of 100 reports costs the server's database, and how long a server takes to open it, at many devices.

    python scripts/server_marks.py --devices 10000000

CPU seconds of this process; nothing is measured by the wall clock.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedbandit.deploy.server.database import Generation, Mark, create

REPORTS = 100
AT_ONCE = 100_000  # devices that are made before they are written


def name_of(device: int, devices: int) -> str:
    """Names spread over all that there can be, as random ones are, and in order, which is how they are made fastest."""
    return f"{device * (2**128 // devices):032x}"


def cpu_seconds(action: Callable[[], object]) -> float:
    before = time.process_time()
    action()
    return time.process_time() - before


def measure(path: Path, devices: int, rounds: int) -> None:
    database, known, last = create(path, Generation(0, {}, {})), {"devices": 0, "names": 0}, 0
    for start in range(0, devices, AT_ONCE):
        some = range(start, min(start + AT_ONCE, devices))
        marks = {name_of(i, devices): Mark(i % 1000, i % 500) for i in some}
        found = database.commit(Generation(last + 1, {}, known), marks, {}, last, last)
        known, last = dict(zip(known, found, strict=True)), last + 1
    print(f"{devices:,} devices, {path.stat().st_size / 1e6:,.0f} MB")
    chance = np.random.default_rng(0)
    spent = []
    for number in range(last, last + rounds):
        names = [name_of(int(i), devices) for i in chance.choice(devices, REPORTS, replace=False)]

        def one_round(names: list[str] = names, number: int = number) -> None:
            database.marks(names)  # what devices are told before they train
            found = database.marks(names)  # what their reports are held against
            following = {name: Mark(found[name].counted + 5, number) for name in names}
            nodes = {number * REPORTS + i: name for i, name in enumerate(names)}
            following_state = Generation(number + 1, {}, known)
            found = database.commit(following_state, following, nodes, number, number)
            known.update(zip(("devices", "names"), found, strict=True))

        spent.append(cpu_seconds(one_round))
    print(
        f"a round of {REPORTS} reports: median {np.median(spent):.4f}, at most {max(spent):.4f} CPU s ({rounds} rounds)"
    )
    print(
        f"opening it, with SQLite's check of the whole file: {cpu_seconds(database.check):.2f} CPU s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder) / "server.sqlite", given.devices, given.rounds)


if __name__ == "__main__":
    main()
