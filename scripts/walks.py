"""Count the files of fedbandit that five everyday tasks call: what a reader of each has to open.

    python scripts/walks.py scripts/results/walks.json      # add --source FOLDER for another version

Each task runs in a process of its own; a file counts if one of its functions is called, on any
thread. `--source` is the `src` folder of another checkout.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = {
    "run": "run so-scratch-softmax --rounds 3 --set deploy_every=1 --set clients_per_round=8 "
    "--threads 1 --quiet --out run",
    "CSV import": "data import table events.csv --client user --text title --labels tags "
    "--out imported",
    "figure": "figure fig2a --seeds 1 --scale 0.003 --set deploy_every=1 "
    "--set clients_per_round=8 --out figures",
    "advise": "advise --data imported --budget 5 --out advice",
}
TRACER = """
import json, sys, threading
from inspect import CO_OPTIMIZED
out, source, words = sys.argv[1], sys.argv[2], sys.argv[3:]
found = set()
def called(frame, event, argument):
    if event == "call" and frame.f_code.co_flags & CO_OPTIMIZED:
        found.add(frame.f_code.co_filename)
threading.setprofile(called)
sys.setprofile(called)
try:
    if words:
        sys.argv = ["fedbandit", *words]
        from fedbandit.cli import main
        main()
    else:
        import numpy as np
        from fedbandit.deploy import Agent, DeviceModel
        weights = {"weight": np.zeros((3, 2), np.float32), "bias": np.zeros(2, np.float32)}
        model = DeviceModel(version=1, kind="dense", shape=(3,), actions=("a", "b"),
                            policy={"name": "softmax", "beta": 0.1}, model={"name": "linear"},
                            weights=weights)
        with Agent("device") as agent:
            agent.install(model.to_bytes())
            agent.reward(agent.choose(np.ones(3)).event_id, 1.0)
            found.clear()
            agent.reward(agent.choose(np.ones(3)).event_id, 1.0)
            sys.setprofile(None)
finally:
    sys.setprofile(None)
    inside = sorted(name[len(source) + 1:] for name in found if name.startswith(source + "/"))
    json.dump([name for name in inside if not name.endswith("__init__.py")], open(out, "w"))
"""


def files_called(words: list[str], source: Path, folder: Path) -> list[str]:
    """The files below `source`/fedbandit that the command calls; without words a device's event."""
    out = folder / "called.json"
    environment = os.environ | {"PYTHONPATH": str(source), "FEDBANDIT_CACHE": str(folder / "cache")}
    command = [sys.executable, "-c", TRACER, str(out), str(source / "fedbandit"), *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr[-2000:] or done.stdout[-2000:]}")
    return json.loads(out.read_text())


def events() -> str:
    """A small table of clients, titles and tags."""
    words = ["red", "green", "blue", "warm", "cold"]
    rows = [
        f"u{i % 40},{words[i % 5]} {words[(i // 5) % 5]} thing,{'ab'[i % 2]}" for i in range(800)
    ]
    return "\n".join(["user,title,tags", *rows]) + "\n"


def main() -> None:
    """Walk all five and write the files of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--source", type=Path, default=ROOT / "src")
    options = parser.parse_args()
    walks = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "events.csv").write_text(events())
        for name, words in COMMANDS.items():
            walks[name] = files_called(words.split(), options.source.resolve(), Path(folder))
        walks["device event"] = files_called([], options.source.resolve(), Path(folder))
    for name, files in walks.items():
        print(f"{name}: {len(files)} files")
    options.out.write_text(json.dumps(walks, indent=1) + "\n")


if __name__ == "__main__":
    main()
