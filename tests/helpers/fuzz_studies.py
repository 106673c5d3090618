"""The folders of a run and of every study, each with the commands that read it."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

from command_line import in_this_process
from fuzz_kinds import Kind, contents
from small_studies import STUDIES, small_data, study_in

from fedbandit.core.errors import DataError

# Commands that read any folder with runs, and those that read one run.
ANYWHERE = {"report": ["report", "out", "-o", "page.html"]}
OF_A_RUN = {
    "run": ["run", "start.toml", "-o", "out", "-q"],
    "more rounds": ["run", "start.toml", "-o", "out", "--rounds", "5", "-q"],
    "regret": ["regret", "out", "--rounds", "1"],
    "export": ["export", "out", "-o", "model.safetensors"],
    "compare": [
        "compare",
        "other.toml",
        "out/config.toml",
        *["--seeds", "1", "--workers", "1", "-o", "c", "-q"],
    ],
}


def commanded(*command: str) -> Callable[[Path], Any]:
    """Call the command line in the folder; what it refuses in one line becomes a `DataError`."""

    def use(folder: Path) -> None:
        with chdir(folder):
            done = in_this_process(*command)
        lines = done.stderr.strip().splitlines()
        if done.returncode == 0:
            return
        said = lines[-1] if lines else ""
        assert done.returncode == 2, f"code {done.returncode}: {done.stderr}"
        assert said.startswith("error: "), done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        raise DataError(said)

    return use


def read(folder: Path) -> None:
    """What `watch` and `Results` make of it."""
    from fedbandit.report.watch import Watcher
    from fedbandit.results import Results

    Watcher(folder / "out").now()
    Results.open(folder / "out").summary()


def study_kinds() -> Iterator[tuple[str, Kind]]:
    base = Path(tempfile.mkdtemp(prefix="fuzz-studies-"))
    data = small_data(base)
    for study in ("run", *STUDIES):
        folder = base / study
        command = OF_A_RUN["run"] if study == "run" else study_in(folder, study, data)
        if study == "run":
            study_in(folder, "sweep", data)  # which writes the start
        commanded(*command)(folder)
        files = contents(folder)
        shutil.rmtree(folder)
        told = tuple(n for n in files if not n.startswith("out"))
        commands = {**ANYWHERE, **(OF_A_RUN if study == "run" else {study: command})}
        if study == "figure":
            commands["gallery"] = ["gallery", "out", "-o", "page.html"]
        for name, words in commands.items():
            long = name in ("compare", study) or study == "advise"
            yield (
                f"folder of {study}, {name}",
                Kind(files, commanded(*words), spared=told, special=True, takes_long=long),
            )
        yield f"folder of {study}, watch", Kind(files, read, spared=told, special=True)
    os.environ.setdefault("MPLBACKEND", "agg")
