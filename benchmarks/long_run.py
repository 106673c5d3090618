"""What reading a run of 100,000 rounds costs: `Results.open`, and the looks of the live page.

`python -m benchmarks.long_run [ROUNDS]` makes a run folder with as many lines of metrics, from the
rounds of a short run, and prints CPU seconds of this process: other processes do not change them.
"""

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedbandit import Results, preset, run
from fedbandit.report.watch import Watcher

SHORT, APPENDED = 20, 50  # rounds of the run that is repeated, and that a refresh finds


def long_run(folder: Path, rounds: int) -> None:
    """A folder with the files of an unfinished run that has come as far."""
    values = {"rounds": SHORT, "clients_per_round": 8, "evaluate_every": 10}
    run(preset("so-scratch-softmax").with_values(values), folder)
    config = folder / "config.toml"
    config.write_text(
        config.read_text().replace(f"rounds = {SHORT}\n", f"rounds = {2 * rounds}\n", 1)
    )
    (folder / "summary.json").unlink()
    first, *lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text(first + "\n")
    append(folder, [json.loads(line) for line in lines], 0, rounds)


def append(folder: Path, lines: list[dict[str, Any]], after: int, rounds: int) -> None:
    """More rounds at the end of the metrics, as a run writes them."""
    with (folder / "metrics.jsonl").open("a") as file:
        for number in range(after + 1, after + rounds + 1):
            file.write(json.dumps({**lines[number % len(lines)], "round": number}) + "\n")


def seconds(work: Callable[[], Any]) -> float:
    """CPU seconds of this process for a call."""
    started = time.process_time()
    work()
    return time.process_time() - started


def main(rounds: int) -> None:
    """Print what opening, the first looks and a refresh take."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "runs" / "long"
        long_run(folder, rounds)
        watcher = Watcher(folder.parent)
        looks = []
        while not looks or looks[-1] > 0.05:
            looks.append(seconds(watcher.now))
        print(f"live page, first looks: {', '.join(f'{look:.2f}' for look in looks[:-1])} s")
        with (folder / "metrics.jsonl").open() as file:
            lines = [json.loads(file.readline()) for _ in range(2)]
        append(folder, lines[1:], rounds, APPENDED)
        print(f"live page, a refresh with {APPENDED} new rounds: {seconds(watcher.now):.3f} s")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"Results.open: {seconds(lambda: Results.open(folder)['running_reward']):.2f} s")
        more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000
        print(f"memory that it added to the peak: {more:.0f} MB")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
