"""Kill small studies with SIGKILL at random moments, resume them until they are done, and compare every byte.

    python scripts/kills.py scripts/results/kills.json                     # until 150 kills are counted
    python scripts/kills.py scripts/results/kills.json --kills 300         # resumes there: 150 more
    python scripts/kills.py /tmp/kills.json --study sweep --kills 5

Each history is one study: killed, started again and killed again, up to eight times, until it ends. Moments come from
a seed: every second kill comes before the n-th file operation below the study's folder, which is the same moment wherever it
is repeated, every other one after a number of seconds. All files must then be those of an undisturbed study, but for
what a machine measures: timings, `seconds_per_round`, whether the checkpoint before the newest was kept, and files in
which two undisturbed studies differ (they are named in the results). Exits with 1 if any byte differs.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from run_faults import Faults

STUDIES = ("advise", "bakeoff", "figure", "sweep")
LONGEST = 900.0  # seconds for one start; it takes some
MOST_KILLS = 8  # of one study, before it is left alone


class Kill(Faults):
    """Kills this process before the n-th file operation below a folder; 0: counts them in a file."""

    def __init__(self, below: Path, at: int, count: Path | None = None) -> None:
        super().__init__(below, at, 0)
        self.counted = None if count is None else os.open(count, os.O_WRONLY | os.O_CREAT)

    def step(self, operation: str, path: Any) -> None:
        name = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else str(path)
        if name.startswith(self.below) or not name.startswith("/"):
            self.seen.append(operation)
            if self.counted is not None:
                os.write(self.counted, b".")
            if len(self.seen) == self.fails_at:
                os.kill(os.getpid(), signal.SIGKILL)


def start(folder: Path, command: list[str], before: Callable[[], None], seconds: float) -> str:
    """Run the command in a forked process: `done`, `killed`, or what went wrong."""
    child = os.fork()
    if not child:
        code = 70
        try:
            os.setpgid(0, 0)
            os.chdir(folder)
            said = os.open("said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(said, 1)
            os.dup2(said, 2)
            before()
            code = _main(command)
        finally:
            os._exit(code)
    with contextlib.suppress(OSError):  # it has done so itself, or is done
        os.setpgid(child, child)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            break
        time.sleep(0.005)
    else:
        os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return "killed"
    code = os.waitstatus_to_exitcode(status)
    return "done" if code == 0 else f"code {code}: {(folder / 'said.txt').read_text()[-2000:]}"


def _main(command: list[str]) -> int:
    from fedbandit.cli.app import main

    sys.argv = ["fedbandit", *command]
    try:
        main()
    except SystemExit as end:
        sys.stdout.flush()
        return end.code if isinstance(end.code, int) else 0
    return 70


def written(out: Path) -> dict[str, Any]:
    """Every file of a study by its name, without what the machine measures."""
    found: dict[str, Any] = {}
    newest = {path.parent: path for path in sorted(out.rglob("checkpoints/*.safetensors"))}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.is_dir() or path.name in (".lock", "timings.jsonl") or path.suffix == ".tmp":
            continue
        if (
            newest.get(path.parent, path) != path
        ):  # when the one before it was kept is time's matter
            continue
        found[name] = path.read_bytes()
        if path.name == "summary.json" and b"seconds_per_round" in found[name]:
            found[name] = {**json.loads(found[name]), "seconds_per_round": None}
    return found


class Studies:
    """Undisturbed studies, made once each: what the killed ones are compared with."""

    def __init__(self, base: Path) -> None:
        from small_studies import small_data

        self.base, self.data = base, small_data(base)
        self._whole: dict[str, tuple[dict[str, Any], set[str], float, int]] = {}

    def whole(self, study: str) -> tuple[dict[str, Any], set[str], float, int]:
        """Its files, those that differ between two undisturbed ones, its seconds and operations."""
        if study not in self._whole:
            files, seconds, operations = [], 0.0, 0
            for number in range(2):
                folder = self.base / f"whole-{study}-{number}"
                command, count = self._made(study, folder), folder / "operations"
                began = time.monotonic()
                ended = start(folder, command, Kill(folder / "out", 0, count).install, LONGEST)
                seconds = time.monotonic() - began
                if ended != "done":
                    raise SystemExit(f"{study} undisturbed: {ended}")
                operations = len(count.read_text())
                files.append(written(folder / "out"))
            names = files[0].keys() | files[1].keys()
            measured = {name for name in names if files[0].get(name) != files[1].get(name)}
            self._whole[study] = files[0], measured, seconds, operations
        return self._whole[study]

    def _made(self, study: str, folder: Path) -> list[str]:
        from small_studies import study_in

        shutil.rmtree(folder, ignore_errors=True)
        os.environ["FEDBANDIT_CACHE"] = str(folder / "cache")
        return study_in(folder, study, self.data)

    def history(self, study: str, seed: int) -> dict[str, Any]:
        """Kill one study until it ends: how often, and which files then differ."""
        expected, measured, seconds, operations = self.whole(study)
        folder, rng = self.base / f"{study}-{seed}", random.Random(f"{study} {seed}")
        command = self._made(study, folder)
        kills: Counter[str] = Counter()
        for number in range(MOST_KILLS):
            by_time = number % 2 == 1
            at, after = rng.randrange(1, operations // 4), rng.uniform(0, seconds / 3)
            killer = Kill(folder / "out", 0 if by_time else at)
            ended = start(folder, command, killer.install, after if by_time else LONGEST)
            if ended != "killed":
                break
            kills["seconds" if by_time else "operations"] += 1
        else:
            ended = start(folder, command, lambda: None, LONGEST)
        problems = [] if ended == "done" else [ended]
        if ended == "done":
            found = written(folder / "out")
            names = (expected.keys() | found.keys()) - measured
            problems = sorted(name for name in names if expected.get(name) != found.get(name))
        left = len(
            list((folder / "out").rglob(".*.tmp"))
        )  # hidden files of writes that were killed
        if not problems:
            shutil.rmtree(folder)
        told = {"study": study, "seed": seed, "kills": dict(kills)}
        return {**told, "differ": problems, "temporary files left": left}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, help="a JSON file; histories in it are not repeated")
    parser.add_argument("--kills", type=int, default=150, help="to have in all")
    parser.add_argument("--study", action="append", choices=STUDIES, help="repeatable")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no history after"
    )
    given = parser.parse_args(arguments)
    import torch

    import fedbandit.cli.app
    import fedbandit.cli.runs
    import fedbandit.report.advice
    import fedbandit.report.bakeoff
    import fedbandit.runs.run  # noqa: F401 - imported once, not by every start

    torch.set_num_threads(1)  # threads do not survive a fork
    kept: dict[str, Any] = {"histories": [], "measured": {}}
    if given.results.exists():
        kept = json.loads(given.results.read_text(encoding="utf-8"))
    ends = time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory(prefix="kills-") as base:
        studies = Studies(Path(base))
        while (left := given.kills - total(kept)) > 0 and time.monotonic() < ends:
            done = Counter(one["study"] for one in kept["histories"])
            study = min(given.study or STUDIES, key=lambda name: done[name])
            one = studies.history(study, done[study])
            kept["histories"].append(one)
            kept["measured"][study] = sorted(studies.whole(study)[1])
            given.results.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            print(
                f"{study} {one['seed']}: {one['kills']}, differ: {one['differ']}; {left} were left"
            )
            sys.stdout.flush()
    bad = sum(bool(one["differ"]) for one in kept["histories"])
    print(f"{total(kept)} kills in {len(kept['histories'])} histories, {bad} with other bytes")
    return 1 if bad else 0


def total(kept: dict[str, Any]) -> int:
    """Kills in all histories."""
    return sum(sum(one["kills"].values()) for one in kept["histories"])


if __name__ == "__main__":
    raise SystemExit(main())
