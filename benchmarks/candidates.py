"""What a catalogue's size costs: a round of 64 clients, and a choice on a device, 50 of its items shown.

`python -m benchmarks.candidates` prints CPU milliseconds for catalogues of 1,000 and 100,000 items,
with `linear` and with `two-tower`, medians of 20 rounds and of 200 choices behind a warm-up, and
writes them to `candidates.json`.
"""

import json
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from fedbandit import open_dataset, simulate
from fedbandit.config import Config
from fedbandit.core.ragged import Ragged
from fedbandit.data.embedded import catalogue
from fedbandit.deploy import Agent, DeviceModel


def measured(folder: Path, items: int, model: str) -> tuple[float, float]:
    """CPU milliseconds of a round, and of a choice on a device that carries the catalogue."""
    data = folder / f"catalogue-{items}"
    if not data.exists():
        catalogue.generate(data, users=200, items=items, shown=50)
    settings = {
        "scenario": "scratch",
        "rounds": 30,
        "deploy_every": 1,
        "clients_per_round": 64,
        "evaluate_every": 10**6,
        "threads": 1,
        "model": {"name": model},
        "policy": {"name": "softmax", "beta": 0.05},
    }
    dataset = open_dataset(str(data))
    simulation = simulate(Config.build(settings), dataset)
    spent, begin = [], time.process_time()
    for _ in simulation:
        now = time.process_time()
        spent.append(now - begin)
        begin = now
    agent = Agent(folder / f"device-{items}-{model}")
    made = DeviceModel.of_experiment(simulation.experiment, simulation.state.weights, 1)
    agent.install(made.to_bytes())
    rng, choices = np.random.default_rng(0), []
    shared = [dataset.train.contexts(np.array([i])).shared for i in range(20)]
    for i in range(220):
        shown, row = rng.choice(items, 50, replace=False).tolist(), shared[i % 20]
        context = (row.ids, row.values) if isinstance(row, Ragged) else row[0]
        begin = time.process_time()
        agent.choose(context, candidates=shown)
        choices.append(time.process_time() - begin)
    return 1000 * median(spent[9:29]), 1000 * median(choices[20:])


if __name__ == "__main__":
    print("| model | items | a round of 64 clients, CPU ms | a choice, CPU ms |")
    print("| --- | --- | --- | --- |")
    found = []
    with tempfile.TemporaryDirectory() as kept:
        for name in ("linear", "two-tower"):
            for count in (1_000, 100_000):
                round_ms, choice_ms = measured(Path(kept), count, name)
                print(f"| `{name}` | {count:,} | {round_ms:.0f} | {choice_ms:.2f} |", flush=True)
                times = {"round_ms": round(round_ms, 1), "choice_ms": round(choice_ms, 2)}
                found.append({"model": name, "items": count, **times})
    result = json.dumps(found, indent=1) + "\n"
    Path(__file__).with_suffix(".json").write_text(result, encoding="utf-8")
