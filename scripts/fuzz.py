"""Spoil real files and messages of every kind, one at a time, and see what reads them.

    python scripts/fuzz.py                          # make fuzz: eight minutes over all kinds
    python scripts/fuzz.py --count 20000            # so many, however long it takes
    python scripts/fuzz.py --special                # ten special files x every file x every command
    python scripts/fuzz.py --count 30000 --seed 1 --out scripts/results/fuzz.json   # in parts: resumes there
    python scripts/fuzz.py --case "model file" 77   # one of them again, with its traceback

Each must end as it would have without the damage, or with one line that refuses it. A signal, a traceback, a hang (or
more memory than any honest file takes), or another result where there are checksums is a failure: it is printed with
the command that repeats it, its files are kept, and the exit code is 1.
"""

import argparse
import json
import logging
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from fuzz_mutations import SPECIAL

LONGEST = 120.0  # seconds for one case, which takes about 0.1, on a machine that may be busy
MOST = 5.0  # seconds without those that it waited for a core: on one, or blocked
MEMORY = 3 << 30  # bytes more than the process has at the start
SECONDS = 480.0
PART = 500  # cases after which the results are written


class _Tracebacks(logging.Handler):
    """What was caught and logged as unexpected counts as a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.seen.append("".join(traceback.format_exception(record.exc_info[1])))


def setting_up(special: bool = False) -> dict[str, Any]:
    """All kinds, each of which works as long as nothing is spoiled."""
    import torch

    torch.set_num_threads(1)  # threads do not survive the fork
    os.environ["FEDBANDIT_CACHE"] = tempfile.mkdtemp(prefix="fuzz-cache-")
    logging.getLogger("fedbandit").setLevel(logging.CRITICAL)
    from fuzz_kinds import all_kinds

    kinds = all_kinds(special)
    logging.getLogger("fedbandit").setLevel(logging.WARNING)
    return kinds


def outcome_of(
    kind: Any, files: dict[str, Any], folder: Path, tracebacks: _Tracebacks
) -> tuple[str, Any]:
    """`ran` with the result, `refused` with the line, or `traceback` with it."""
    from fuzz_kinds import put

    from fedbandit.core.errors import FedbanditError

    tracebacks.seen.clear()
    try:
        result = kind.use(put(files, folder))
    except FedbanditError as error:
        line = str(error)
        return (
            ("refused", line)
            if line.strip() and "\n" not in line
            else ("traceback", f"not one line: {line!r}")
        )
    except BaseException:
        return "traceback", traceback.format_exc()
    return ("traceback", tracebacks.seen[0]) if tracebacks.seen else ("ran", result)


def work(
    kinds: dict[str, Any], cases: list[tuple[str, int]], expected: dict[str, Any], said: int
) -> None:
    """A worker: one line when a case begins, one with how it ended."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    tracebacks = _listening()
    base, parent = Path(tempfile.mkdtemp(prefix="fuzz-")), os.getppid()
    for name, seed in cases:
        if os.getppid() != parent:  # it was killed
            break
        os.write(said, json.dumps([name, seed]).encode() + b"\n")
        kind, began = kinds[name], _seconds()
        how, what = outcome_of(kind, _damaged(name, kind, seed), base / "case", tracebacks)
        if (used := _seconds() - began) > MOST:
            how, what = "slow", f"{used:.1f} s, then: {how} {what}"
        if how == "ran":
            differs = kind.checked and what != expected[name]
            how, what = ("another result", f"{what!r:.2000}") if differs else (how, "")
        shutil.rmtree(base / "case", ignore_errors=True)
        os.write(said, json.dumps([name, seed, how, what[-3000:]]).encode() + b"\n")
    shutil.rmtree(base, ignore_errors=True)


def _seconds() -> float:
    """A clock that stands while this process waits for a core."""
    waited = int(Path("/proc/self/schedstat").read_text().split()[1])
    return time.monotonic() - waited / 1e9


def _damaged(name: str, kind: Any, seed: int) -> dict[str, Any]:
    if seed < 0:
        return kind.with_special(-1 - seed)
    return kind.damaged(random.Random(f"{name} {seed}"))


def _listening() -> _Tracebacks:
    tracebacks = _Tracebacks()
    logger = logging.getLogger("fedbandit")
    logger.addHandler(tracebacks)
    logger.propagate = False
    return tracebacks


class Worker:
    """A forked process that works through some cases; who dies or hangs over one is replaced for the rest."""

    def __init__(
        self, kinds: dict[str, Any], cases: list[tuple[str, int]], expected: dict[str, Any]
    ) -> None:
        self.kinds, self.cases, self.expected = kinds, cases, expected
        self.begin()

    def begin(self) -> None:
        self.reading, writing = os.pipe()
        self.process = os.fork()
        if not self.process:
            try:
                work(self.kinds, self.cases, self.expected, writing)
            finally:
                os._exit(0)
        os.close(writing)
        self.buffer, self.current, self.since = b"", None, time.monotonic()

    def listen(self) -> list[list[Any]] | None:
        """Cases that have ended; None when there is nothing more to come."""
        data = os.read(self.reading, 1 << 20)
        ended = []
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            case = json.loads(line)
            self.since = time.monotonic()
            if len(case) == 2:
                self.current = tuple(case)
            else:
                ended.append(case)
                self.cases = self.cases[self.cases.index((case[0], case[1])) + 1 :]
                self.current = None
        if data:
            return ended
        return self._replaced("ended")

    def hangs(self) -> bool:
        return self.current is not None and time.monotonic() - self.since > LONGEST

    def kill(self) -> list[list[Any]] | None:
        os.kill(self.process, signal.SIGKILL)
        return self._replaced("hang")

    def _replaced(self, how: str) -> list[list[Any]] | None:
        os.close(self.reading)
        _, status = os.waitpid(self.process, 0)
        if self.current is None:
            if not self.cases:
                return None
            how = "worker lost"
        if how == "ended":
            how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "left"
        case = self.current or self.cases[0]
        self.cases = self.cases[self.cases.index(case) + 1 :]
        if self.cases:
            self.begin()
            return [[*case, how, ""]]
        self.reading = -1
        return [[*case, how, ""]]

    def stop(self) -> None:
        if self.reading >= 0:
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
            os.close(self.reading)
            self.reading = -1


def random_cases(kinds: dict[str, Any], count: int, seed: int) -> list[tuple[str, int]]:
    """Cases of every kind in turn; kinds that take long have every fifth turn only."""
    cases: list[tuple[str, int]] = []
    for turn in range(count):
        there = (name for name, kind in kinds.items() if turn % 5 == 0 or not kind.takes_long)
        cases += [(name, seed + turn) for name in there]
        if len(cases) >= count:
            break
    return cases[:count]


def special_cases(kinds: dict[str, Any], count: int | None, seed: int) -> list[tuple[str, int]]:
    """Every file, with everything that is no file in its place; or a sample of so many."""
    sizes = {name: len(kind.special_names()) * len(SPECIAL) for name, kind in kinds.items()}
    every = [(name, -1 - number) for name, size in sizes.items() for number in range(size)]
    return every if count is None else random.Random(seed).sample(every, min(count, len(every)))


def undamaged(kinds: dict[str, Any]) -> dict[str, Any]:
    """What comes of the files of each kind as they were written."""
    tracebacks = _listening()
    expected = {}
    for name, kind in kinds.items():
        with tempfile.TemporaryDirectory() as folder:
            how, expected[name] = outcome_of(kind, kind.files, Path(folder), tracebacks)
        if how != "ran":
            raise SystemExit(f"{name}: does not work undamaged: {expected[name]}")
    return expected


def fuzz(
    kinds: dict[str, Any],
    expected: dict[str, Any],
    cases: list[tuple[str, int]],
    workers: int,
    seconds: float,
) -> dict[str, Counter[str]]:
    """Spoil and use; prints failures as they come. Returns how cases ended, by kind."""
    tally: dict[str, Counter[str]] = {name: Counter() for name in kinds}
    running = [Worker(kinds, cases[i::workers], expected) for i in range(min(workers, len(cases)))]
    until = time.monotonic() + seconds
    stopping: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):  # what has been found so far is still reported
        signal.signal(number, lambda number, frame: stopping.append(number))
    while running and time.monotonic() < until and not stopping:
        ready, _, _ = select.select([worker.reading for worker in running], [], [], 1.0)
        for worker in list(running):
            if worker.reading in ready:
                ended = worker.listen()
            elif worker.hangs():
                ended = worker.kill()
            else:
                continue
            for name, number, how, what in ended or ():
                tally[name][how] += 1
                if how not in ("ran", "refused"):
                    report(name, number, how, what)
            if ended is None or worker.reading < 0:
                running.remove(worker)
    for worker in running:
        worker.stop()
    return tally


def report(name: str, number: int, how: str, what: str) -> None:
    print(
        f"\nFAILURE: {name}, {number}: {how}\n  repeat: python scripts/fuzz.py --case {name!r} {number}"
    )
    print("  " + what.strip().replace("\n", "\n  "), flush=True)


def again(kinds: dict[str, Any], name: str, number: int, keep: Path) -> int:
    """One case in this process, its files kept."""
    kind = kinds[name]
    files = _damaged(name, kind, number)
    changed = [file for file in files if files[file] != kind.files.get(file)]
    folder = keep / f"{name} {number}".replace(" ", "-").replace(",", "").replace("'", "")
    shutil.rmtree(folder, ignore_errors=True)
    tracebacks = _listening()
    how, what = outcome_of(kind, files, folder, tracebacks)
    if how == "ran" and kind.checked:
        with tempfile.TemporaryDirectory() as whole:
            right = outcome_of(kind, kind.files, Path(whole), tracebacks)[1]
        how = how if what == right else "another result"
    print(f"{name}, {number}: {how}\nchanged: {', '.join(changed)}\nfiles: {folder}\n{what}")
    return 0 if how in ("ran", "refused") else 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--count", type=int, help="cases; without it, as many as eight minutes allow"
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="of the first case; without it, another every time"
    )
    parser.add_argument(
        "--kind", action="append", help="only kinds whose name contains this; repeatable"
    )
    parser.add_argument(
        "--special",
        action="store_true",
        help="pipes, links, folders and the like in the place of every file",
    )
    parser.add_argument("--workers", type=int, default=max(1, len(os.sched_getaffinity(0))))
    parser.add_argument(
        "--case", nargs=2, metavar=("KIND", "NUMBER"), help="repeat one case, and keep its files"
    )
    parser.add_argument(
        "--out", type=Path, help="a JSON file: cases that it counts already are not repeated"
    )
    parser.add_argument(
        "--keep", type=Path, default=Path("fuzz-failures"), help="where --case keeps files"
    )
    given = parser.parse_args(arguments)
    kinds = setting_up(given.special)
    if given.case:
        return again(kinds, given.case[0], int(given.case[1]), given.keep)
    if given.kind:
        kinds = {
            name: kind for name, kind in kinds.items() if any(part in name for part in given.kind)
        }
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**9)
    kept: dict[str, Any] = {"seed": seed, "cases": 0, "failures": 0, "kinds": {}}
    if given.out is not None and given.out.exists():
        kept = json.loads(given.out.read_text(encoding="utf-8"))
    print(f"seed {kept['seed']}, {len(kinds)} kinds, {given.workers} workers", flush=True)
    began = time.monotonic()
    limit = SECONDS if given.count is None and not given.special else float("inf")
    count = given.count if given.special else given.count or 10**6
    cases = (special_cases if given.special else random_cases)(kinds, count, kept["seed"])
    expected = undamaged(kinds)
    part = len(cases) if given.out is None else PART
    for first in range(kept["cases"], len(cases), part):
        add(kept, fuzz(kinds, expected, cases[first : first + part], given.workers, limit))
        if given.out is not None and kept["cases"] in (first + part, len(cases)):
            given.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        elif given.out is not None:  # interrupted: this part is repeated as a whole
            break
    for name, ended in kept["kinds"].items():
        print(
            f"{name:32} {sum(ended.values()):6}  {', '.join(f'{how} {n}' for how, n in sorted(ended.items()))}"
        )
    print(f"{kept['cases']} cases in {time.monotonic() - began:.0f} s, {kept['failures']} failures")
    shutil.rmtree(os.environ["FEDBANDIT_CACHE"], ignore_errors=True)
    return 1 if kept["failures"] else 0


def add(kept: dict[str, Any], tally: dict[str, Counter[str]]) -> None:
    """Add how the cases of a part ended to those of the parts before it."""
    for name, ended in tally.items():
        kept["kinds"][name] = dict(Counter(kept["kinds"].get(name, {})) + ended)
        kept["cases"] += sum(ended.values())
        kept["failures"] += sum(n for how, n in ended.items() if how not in ("ran", "refused"))


if __name__ == "__main__":
    sys.exit(main())
