"""The memory and disk that `fedbandit sweep` needs for many members: `python -m benchmarks.sweep_memory`.

Runs a sweep of one-round members over a small data set in this process, and prints the largest
resident memory of the process and the bytes that are left on disk.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from fedbandit import preset
from fedbandit.data.importers.tables import TableOptions, import_table
from fedbandit.results.reading import write_table
from fedbandit.runs.local_runner import LocalRunner
from fedbandit.studies.sweeps import SweepSpec, rows_of, run_sweep


def main() -> None:
    """Print one line: members, largest memory, bytes on disk, seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("members", type=int, nargs="?", default=1000)
    members = parser.parse_args().members
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        config = preset("so-scratch-softmax").with_values(
            {"data.source": _data(out), "rounds": 1, "clients_per_round": 2, "deploy_every": 1}
        )
        grid = {"policy.beta": np.linspace(0.01, 1, members).tolist()}
        began, spec = time.monotonic(), SweepSpec(start=config, grid=grid)
        ranked = run_sweep(spec, out / "sweep", runner=LocalRunner(1), say=str, keep=False)
        write_table(rows_of(ranked, spec.all_seeds, out / "sweep"), out / "sweep" / "results")
        size = sum(path.stat().st_size for path in (out / "sweep").rglob("*") if path.is_file())
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        seconds = time.monotonic() - began
    print(
        f"{members} members: {most:.0f} MB of memory, {size / 1e6:.0f} MB on disk, {seconds:.0f} s"
    )


def _data(folder: Path) -> str:
    """Sixty users with a dozen short titles each, as a data set folder."""
    rng = np.random.default_rng(0)
    lines = ["user,title,tag"]
    for row in range(720):
        tag = rng.integers(6)
        lines.append(f"u{row % 60},w{tag}{rng.integers(3)} noise{rng.integers(20)},t{tag}")
    (folder / "table.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = TableOptions(client="user", labels="tag", text=["title"], vocabulary=60)
    return str(import_table(folder / "table.csv", folder / "data", options))


if __name__ == "__main__":
    main()
