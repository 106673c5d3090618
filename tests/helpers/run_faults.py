"""A run whose n-th file operation fails, for any n: what the user sees, what is left, and what a resume makes of it.

As a program: `run_faults.py DATA FOLDER STEP ERRNO...`, one JSON object on standard output. Each run is a forked
process that calls the command line. Operations are those on files below the run's folder, as Python calls them;
SQLite's own are not among them.
"""

import builtins
import contextlib
import errno
import io
import json
import os
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

ROUNDS = 3


class Faults:
    """Counts operations below a folder, and lets the one of a given number fail."""

    def __init__(self, below: Path, fails_at: int, number: int) -> None:
        self.below, self.fails_at, self.number = str(below), fails_at, number
        self.seen: list[str] = []

    def step(self, operation: str, path: Any) -> None:
        name = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else str(path)
        if not name.startswith(self.below):
            return
        self.seen.append(f"{operation} {Path(name).name}")
        if len(self.seen) == self.fails_at:
            raise OSError(self.number, os.strerror(self.number), name)

    def install(self) -> None:
        for operation in ("open", "replace", "rename", "unlink", "mkdir"):
            setattr(os, operation, self._before(operation, getattr(os, operation)))
        names: dict[int, str] = {}
        real_open, real_fsync, faults = builtins.open, os.fsync, self

        def fsync(handle: Any) -> None:
            number = handle if isinstance(handle, int) else handle.fileno()
            faults.step("fsync", names.get(number) or os.readlink(f"/proc/self/fd/{number}"))
            real_fsync(handle)

        def opened(file: Any, mode: str = "r", *more: Any, **others: Any) -> Any:
            if isinstance(file, int):
                return real_open(file, mode, *more, **others)
            faults.step("open", file)
            found = real_open(file, mode, *more, **others)
            return Writing(found, faults, file) if set(mode) & set("wax+") else found

        os.fsync = fsync
        builtins.open = io.open = opened  # type: ignore[assignment] # as much of its signature as anybody uses

    def _before(self, operation: str, real: Any) -> Any:
        def call(path: Any, *more: Any, **others: Any) -> Any:
            self.step(operation, path)
            return real(path, *more, **others)

        return call


class Writing:
    """A file whose writes are counted."""

    def __init__(self, file: Any, faults: Faults, path: Any) -> None:
        self._file, self._faults, self._path = file, faults, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "Writing":
        return self

    def __exit__(self, *failure: Any) -> None:
        self._file.close()

    def write(self, data: Any) -> Any:
        self._faults.step("write", self._path)
        return self._file.write(data)

    def flush(self) -> None:
        self._faults.step("flush", self._path)
        self._file.flush()

    def truncate(self, *size: Any) -> Any:
        self._faults.step("truncate", self._path)
        return self._file.truncate(*size)


def command(data: Path, out: Path) -> list[str]:
    settings = {
        "data.source": str(data),
        "scenario": "scratch",
        "clients_per_round": 4,
        "deploy_every": 2,
        "threads": 1,
    }
    chosen = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    every = ["--rounds", str(ROUNDS), "--checkpoint-seconds", "0", "-q"]
    return ["fedbandit", "run", "so-scratch-softmax", *every, *chosen, "--out", str(out)]


def one(data: Path, out: Path, fails_at: int = 0, number: int = errno.EIO) -> dict[str, Any]:
    """Run in a forked process: exit code, what it said, and the operations until then."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        ended = {}
        try:
            ended = _here(data, out, fails_at, number)
        finally:
            os.write(writing, json.dumps(ended).encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        text = said.read()
    _, status = os.waitpid(child, 0)
    return (
        json.loads(text)
        if os.WIFEXITED(status) and text
        else {"code": -1, "said": f"status {status}", "seen": []}
    )


def _here(data: Path, out: Path, fails_at: int, number: int) -> dict[str, Any]:
    from fedbandit.cli.app import main

    faults = Faults(out, fails_at, number)
    faults.install()
    sys.argv = command(data, out)
    printed, code = io.StringIO(), -1
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        except BaseException:
            traceback.print_exc()
    return {"code": code, "said": printed.getvalue(), "seen": faults.seen}


def problems_of(
    data: Path, start: Path | None, out: Path, fails_at: int, number: int, expected: bytes
) -> list[str]:
    """Let one operation fail, then run again undisturbed."""
    from fedbandit.federated.state import load_state
    from fedbandit.runs.folder import checkpoints

    shutil.rmtree(out, ignore_errors=True)
    if start is not None:
        shutil.copytree(start, out)
    before = (
        max((load_state(path).round for path in checkpoints(out)), default=0) if out.exists() else 0
    )
    failed = one(data, out, fails_at, number)
    wrong = []
    lines = [line for line in failed["said"].splitlines() if line.strip()]
    if failed["code"] not in (0, 2) or len(lines) > 1 or (failed["code"] == 2 and not lines):
        wrong.append(f"code {failed['code']}: {failed['said'][-1500:]!r}")
    kept = [load_state(path).round for path in checkpoints(out)] if out.exists() else []
    if max(kept, default=0) < before or (out.exists() and list(out.rglob("*.damaged"))):
        wrong.append(f"a checkpoint was lost: round {before} before, {kept} after")
    again = one(data, out)
    if again["code"] != 0:
        wrong.append(f"a resume ends with {again['code']}: {again['said'][-1500:]!r}")
    elif (out / "metrics.jsonl").read_bytes() != expected:
        wrong.append("a resume ends with other bytes")
    elif list(out.rglob(".*.tmp")):
        wrong.append("something is left behind")
    what = failed["seen"][fails_at - 1] if len(failed["seen"]) >= fails_at else "?"
    return [f"operation {fails_at} ({what}), {errno.errorcode[number]}: {text}" for text in wrong]


def sweep(data: Path, folder: Path, step: int, numbers: list[int]) -> dict[str, Any]:
    """Every `step`-th operation of a run from its beginning, and of one that is resumed, with the errors in turn."""
    whole = one(data, folder / "whole")
    assert whole["code"] == 0, whole["said"]
    expected = (folder / "whole" / "metrics.jsonl").read_bytes()
    half = folder / "half"
    shutil.copytree(folder / "whole", half)
    (half / "summary.json").unlink()
    newest = sorted((half / "checkpoints").iterdir())[-1]
    newest.unlink()  # as if it had been killed before the last round was kept
    resumed = folder / "resumed"
    shutil.copytree(half, resumed)
    later = one(data, resumed)
    assert later["code"] == 0, later["said"]
    found: list[str] = []
    kinds = set()
    count = 0
    for start, seen in ((None, whole["seen"]), (half, later["seen"])):
        for fails_at in range(1, len(seen) + 1, step):
            number = numbers[count % len(numbers)]
            found += problems_of(data, start, folder / "run", fails_at, number, expected)
            count += 1
            kinds.add(seen[fails_at - 1].split()[0])
    return {
        "operations": len(whole["seen"]),
        "tried": count,
        "kinds": sorted(kinds),
        "problems": found,
    }


def swept(data: Path, folder: Path, step: int, *numbers: int) -> dict[str, Any]:
    """`sweep` in a process that has nothing but itself to fork."""
    given = [sys.executable, __file__, str(data), str(folder), str(step), *map(str, numbers)]
    environment = {**os.environ, "FEDBANDIT_CACHE": str(folder / "cache"), "NO_COLOR": "1"}
    done = subprocess.run(given, capture_output=True, text=True, timeout=1800, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


if __name__ == "__main__":
    import torch

    import fedbandit.cli.app
    import fedbandit.runs.run  # noqa: F401 - imported once, not by every child

    torch.set_num_threads(1)
    data, folder, step, *numbers = sys.argv[1:]
    print(
        json.dumps(sweep(Path(data), Path(folder), int(step), [int(number) for number in numbers]))
    )
