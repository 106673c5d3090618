"""Files exchanged between sibling runs, and between generations of one run: what the next command makes of it.

As a program it tries every exchange and prints a table: `PYTHONPATH=src:tests/helpers python tests/helpers/exchanges.py`.
"""

import json
import os
import shutil
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from core_samples import text
from small_runs import small_config

from fedbandit.config import Config
from fedbandit.core.errors import FedbanditError
from fedbandit.runs.run import execute

BASE = {
    "scenario": "init",
    "algorithm__name": "scaffold",
    "clients_per_round": 3,
    "deploy_every": 2,
    "pretraining__rounds": 2,
    "pretraining__clients": 6,
    "rounds": 6,
}
SIBLINGS: dict[str, dict[str, Any]] = {
    "base": {},
    "seed": {"seed": 1},
    "beta": {"policy__beta": 0.3},
    "rate": {"client__learning_rate": 0.2},
    "scenario": {"scenario": "init-shift"},
    "algorithm": {"algorithm__name": "fedavg"},
    "length": {"rounds": 8},
}
FILES = (
    "checkpoints",
    "memory.sqlite",
    "metrics.jsonl",
    "timings.jsonl",
    "summary.json",
    "cache/pretrained",
)
STOPPED, LONGER = 4, 10  # rounds after which a run is stopped, and to which it is extended
# What is done with a run, by its stage; and for older generations, the stage that the files are put back from.
STAGES = {
    "started": "started",
    "resumed": "stopped",
    "finished": "finished",
    "extended": "finished",
}
OLDER = {
    "resumed": "older",
    "finished": "stopped",
    "extended": "stopped",
    "extended before": "finished",
}


@dataclass(frozen=True)
class Exchange:
    """A run whose `files` come from another; `mode` says how far it was, and what is then asked for."""

    into: str
    files: tuple[str, ...]
    source: str  # the sibling, or the older generation
    mode: str

    def __str__(self) -> str:
        return f"{'+'.join(self.files) or 'nothing'} of {self.source} in {self.into}, {self.mode}"


def exchanges() -> Iterator[Exchange]:
    """Every file of every run in the place of every sibling's, wherever both have it."""
    for into in SIBLINGS:
        for source in (name for name in SIBLINGS if name != into):
            for name in FILES:
                modes = ["started"] if name == "cache/pretrained" else [*STAGES][1:]
                if name == "memory.sqlite" and "algorithm" in (into, source):
                    continue  # whose clients remember nothing
                for mode in modes:
                    if name != "summary.json" or mode != "resumed":
                        yield Exchange(into, (name,), source, mode)


def generations() -> Iterator[Exchange]:
    """Every subset of the files of an older generation of a run."""
    for mode in OLDER:
        for count in range(1, len(FILES)):
            for files in combinations(FILES[:-1], count):
                yield Exchange("base", files, "older", mode)


class World:
    """The siblings in all their stages, made when they are asked for, each with a cache beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def config(self, name: str, mode: str = "resumed") -> Config:
        config = small_config(**(BASE | SIBLINGS[name]))
        return config.with_values({"rounds": LONGER}) if mode.startswith("extended") else config

    def made(self, name: str, stage: str) -> Path:
        """The folder of a run that was: older (round 2), stopped, finished, extended; or `started`: pre-trained."""
        folder = self.folder / name / stage
        if not folder.exists():
            config = self.config(name, stage)
            if stage == "extended":
                shutil.copytree(self.made(name, "finished"), folder)
            until = {"older": STOPPED - 2, "stopped": STOPPED}.get(stage)
            play(config, folder, until)
            if stage == "started":
                for path in folder.iterdir():
                    if path.name != "cache":
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return folder

    def tried(self, case: Exchange) -> str:
        """`same` or `refused`: in one line that names a file, with nothing lost; anything else is a failure."""
        out = self.folder / "tried"
        shutil.rmtree(out, ignore_errors=True)
        stage = STAGES.get(case.mode, "extended")
        shutil.copytree(self.made(case.into, stage), out)
        older = case.source == "older"
        source = self.made(
            case.into if older else case.source, OLDER[case.mode] if older else stage
        )
        for name in case.files:
            _put(source, out, name)
        before = _contents(out)
        config = self.config(case.into, case.mode)
        said = ""
        try:
            play(config, out)
        except FedbanditError as error:
            said = str(error)
        if said:
            names = ["round-", *(Path(name).name for name in FILES)]
            assert any(name in said for name in names), f"{case}: names no file: {said}"
            after = _contents(out)
            changed = [name for name in before if _counts(name) and before[name] != after.get(name)]
            assert not changed, f"{case}: {changed} changed or lost"
            return "refused"
        whole = self.made(case.into, "extended" if "extended" in case.mode else "finished")
        only_read = case.mode in ("finished", "extended before")  # then nothing asks for the state
        found, expected = results(out, only_read), results(whole, only_read)
        assert found == expected, f"{case}: other results, and no word"
        return "same"


def play(config: Config, folder: Path, until: int | None = None) -> None:
    """Run into the folder, checkpoint by checkpoint, with its own cache."""
    kept = os.environ.get("FEDBANDIT_CACHE")
    os.environ["FEDBANDIT_CACHE"] = str(folder / "cache")
    (folder / "cache").mkdir(parents=True, exist_ok=True)
    run = folder / "run"
    try:
        execute(config, run, dataset=text(), until=until, checkpoint_seconds=0.0)
    finally:
        if kept is None:
            del os.environ["FEDBANDIT_CACHE"]
        else:
            os.environ["FEDBANDIT_CACHE"] = kept


def results(folder: Path, only_read: bool = False) -> dict[str, Any]:
    """All that a run computes: metrics, summary, and unless it is only read, state; not how long it took."""
    run = folder / "run"
    summary = json.loads((run / "summary.json").read_text())
    del summary["seconds_per_round"]
    newest = max((run / "checkpoints").glob("*.safetensors"))
    found = {
        "metrics": (run / "metrics.jsonl").read_bytes(),
        "summary": summary,
        "timed": (run / "timings.jsonl").read_bytes().count(b"\n"),
    }
    if only_read:
        return found
    found["checkpoint"] = (newest.name, newest.read_bytes())
    if (run / "memory.sqlite").exists():
        with closing(sqlite3.connect(run / "memory.sqlite")) as database:
            found["memory"] = sorted(database.execute("SELECT * FROM memory"))
    return found


def _put(source: Path, out: Path, name: str) -> None:
    """One of the files as the other run has it; of a file that it has not, none."""
    if name == "cache/pretrained":  # named by what went into it: the content under this run's names
        theirs = sorted((source / name).iterdir())
        for ours, other in zip(sorted((out / name).iterdir()), theirs, strict=True):
            shutil.copyfile(other, ours)
        return
    place = out / "run" / name
    for old in place.parent.glob(f"{name}*"):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    for new in (source / "run").glob(f"{name}*"):
        target = place.parent / new.name
        shutil.copytree(new, target) if new.is_dir() else shutil.copyfile(new, target)


def _contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _counts(name: str) -> bool:
    """Whether a file must stay as it is when a run is refused: not its lock and the note of its failure."""
    return not name.endswith((".lock", "error.json", "-wal", "-shm"))


def table(world: World) -> str:
    """What came of every exchange, by file."""
    counts: dict[str, Counter[str]] = {}
    for case in [*exchanges(), *generations()]:
        kind = "older generation" if case.source == "older" else case.files[0]
        counts.setdefault(kind, Counter())[world.tried(case)] += 1
    lines = ["| exchanged | tried | same bytes | refused |", "| --- | --- | --- | --- |"]
    for kind, found in counts.items():
        lines.append(f"| {kind} | {found.total()} | {found['same']} | {found['refused']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        print(table(World(Path(place))), file=sys.stdout)
