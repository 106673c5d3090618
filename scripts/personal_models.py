"""Who gains and who loses by a part of their own: a table, a picture and the numbers behind them.

    python scripts/personal_models.py scripts/results/personal_models.json docs/images/personal.png

Every client trains on the older half of its examples alone. After the last round the newer half,
which nobody has trained on, is what greedy choices are scored on: by the deployed model, and by each
client's own where it has adopted one. The difference is the client's gain.
"""

import argparse
import json
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt

from fedbandit import Config, open_dataset, preset
from fedbandit.acting import explore
from fedbandit.assembly.experiment import build_experiment
from fedbandit.core.prediction import over_actions
from fedbandit.core.process import Stopwatch
from fedbandit.data import FederatedDataset
from fedbandit.data.embedded import gallery, topics
from fedbandit.engines import ThreadEngine
from fedbandit.environments import Met
from fedbandit.federated.memory import Memory
from fedbandit.federated.round import run_round
from fedbandit.federated.visit_plans import SimpleVisits, Visits
from fedbandit.policies import Greedy

SIZES = (0, 8, 16, 32, 10**9)  # events to train on: the classes of the table


class OlderHalf(SimpleVisits):
    """Clients meet the older half of their examples only."""

    def visits(self, split: Any, clients: np.ndarray, round_number: int) -> Visits:
        found = super().visits(split, clients, round_number)
        starts, sizes = split.offsets[found.clients], split.sizes()[found.clients]
        kept = np.flatnonzero(found.rows - starts < sizes // 2)
        columns = ("rows", "clients", "times", "positions", "versions", "rounds")
        some = {name: getattr(found, name)[kept] for name in columns}
        return replace(found, bounds=np.searchsorted(kept, found.bounds), **some)


def gains(config: Config, dataset: FederatedDataset) -> dict[str, list[float]]:
    """For each client: events to train on, reward on new ones by the deployed and by its own model."""
    phase = build_experiment(config, dataset).bandit
    work = replace(phase.work, plan=OlderHalf(**vars(phase.work.plan)))
    phase = replace(phase, work=work)
    state, engine = (
        phase.start(build_experiment(config, dataset).initial_weights()),
        ThreadEngine(1),
    )
    memory = Memory() if hasattr(work.algorithm, "personal") else None
    for _ in range(config.rounds):
        state, _ = run_round(phase, state, engine, Stopwatch(), memory)
    engine.close()
    split, weights = dataset.train, state.deployed[max(state.deployed)].weights
    table: dict[str, list[float]] = {"events": [], "deployed": [], "own": [], "adopted": []}
    for client in phase.cohorts.pool:
        rows = np.arange(split.offsets[client], split.offsets[client + 1])
        older, newer = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        one, bounds = np.array([client]), np.array([0, len(newer)])
        contexts, labels = split.examples(one, bounds, newer)
        times = np.full(len(newer), config.rounds)
        met = Met(
            config.seed, contexts, labels, np.full(len(newer), client), times,
            np.arange(len(newer)), work.num_actions,
        )  # fmt: skip
        expected = work.world.expected(met)
        kept = {} if memory is None else memory.read([client], config.rounds + 1)
        own = work.algorithm.personal({"weights": weights}, kept[client]) if kept else None
        for name, used in (
            ("deployed", weights),
            ("own", weights if own is None else own["weights"]),
        ):
            prediction = work.predictor.predict(used, contexts)
            chosen = explore(Greedy(), prediction, work.world.available(times))
            table[name].append(float(over_actions(chosen * expected, prediction.bounds).mean()))
        table["events"].append(len(older))
        table["adopted"].append(float(own is not None))
    return table


def worlds(folder: Path) -> dict[str, tuple[Config, FederatedDataset]]:
    """The runs by title: pictures of one's own, and text whose users like different topics."""
    made = open_dataset(str(gallery.generate(folder / "gallery", users=300)))
    pictures = preset("gallery-softmax").with_values(
        {"rounds": 60, "clients_per_round": 50, "deploy_every": 5, "threads": 1,
         "algorithm": {"name": "personal", "part": "last-layer"}}
    )  # fmt: skip
    text = open_dataset(str(topics.generate(folder / "topics", users=300)))
    titles = preset("so-scratch-softmax").with_values(
        {"rounds": 60, "clients_per_round": 50, "deploy_every": 5, "threads": 1,
         "scenario": "drift", "drift": {"kind": "rotate", "at": [30]},
         "algorithm": {"name": "personal", "part": "bias"}}
    )  # fmt: skip
    return {
        "gallery, last layer": (pictures, made),
        "topics, preferences rotate, bias": (titles, text),
    }


def summary(table: dict[str, list[float]]) -> list[dict[str, float]]:
    """One row for each class of clients, by how many events they have trained on."""
    events, gain = np.array(table["events"]), np.array(table["own"]) - np.array(table["deployed"])
    rows = []
    for low, high in pairwise(SIZES):
        own = (events >= low) & (events < high)
        if own.sum() > 1:
            rows.append({
                "from": low, "to": high - 1, "clients": int(own.sum()),
                "adopted": int(np.array(table["adopted"])[own].sum()),
                "gained": int((gain[own] > 0).sum()), "lost": int((gain[own] < 0).sum()),
                "deployed": float(np.array(table["deployed"])[own].mean()),
                "gain": float(gain[own].mean()),
                "error": float(gain[own].std(ddof=1) / np.sqrt(own.sum())),
            })  # fmt: skip
    return rows


def draw(found: dict[str, Any], out: Path) -> None:
    """One panel a world: each client's gain by its events, and the means of the classes."""
    figure, axes = plt.subplots(1, len(found), figsize=(11, 4))
    for axis, (title, result) in zip(axes, found.items(), strict=True):
        table = result["clients"]
        events, gain = np.array(table["events"]), np.array(table["own"]) - table["deployed"]
        axis.axhline(0, color="#999999", lw=0.8)
        axis.plot(np.maximum(events, 1), gain, ".", color="#0072b2", alpha=0.35, ms=5)
        for row in result["summary"]:
            own = events[(events >= row["from"]) & (events <= row["to"])]
            axis.errorbar(
                np.median(own), row["gain"], 2 * row["error"], fmt="o", color="#d55e00", capsize=3
            )
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlabel("events that a client has trained on")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("gain in reward on new events")
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("numbers", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    found = {}
    with TemporaryDirectory() as folder:
        for title, (config, dataset) in worlds(Path(folder)).items():
            tables = [gains(config.with_values({"seed": s}), dataset) for s in range(given.seeds)]
            joined = {
                name: list(chain.from_iterable(table[name] for table in tables))
                for name in tables[0]
            }
            rounded = {name: np.round(values, 4).tolist() for name, values in joined.items()}
            found[title] = {"summary": summary(joined), "clients": rounded}
            print(title)
            for row in found[title]["summary"]:
                print("  ", json.dumps({name: round(value, 4) for name, value in row.items()}))
    given.numbers.write_text(json.dumps(found) + "\n", encoding="utf-8")
    draw(found, given.picture)


if __name__ == "__main__":
    main()
