"""One small `sweep`, `compare`, `figure`, `advise` and `bakeoff` each: their files, and their commands.

Used by `scripts/fuzz.py`, which spoils their folders, and by `scripts/kills.py`, which kills them.
"""

import json
from pathlib import Path

import numpy as np
from small_runs import small_config

from fedbandit.data.importers.tables import TableOptions, import_table

TAGS = ("java", "python", "sql", "css")
SWEEP = """
start = ["so-scratch-softmax"]
seeds = 2

[set]
rounds = 4
deploy_every = 2
clients_per_round = 6
threads = 1
data.source = "{data}"

[grid]
"client.learning_rate" = [0.2, 1.0]
"""
BAKEOFF = """
start = "start.toml"
seeds = 2
tries = 2

[situations.period.2]
deploy_every = 2

[contenders.rule.softmax]

[contenders.rule.greedy.policy]
name = "greedy"

[contenders.algorithm.fedavg.tune]
"client.learning_rate" = [0.1, 0.5]
"""
PLAN = {"rounds": 4, "deploy_every": 2, "tries": 2, "seeds": 2, "longer": 2}
FIGURE = {"clients_per_round": 6, "pretraining.clients": 8, "pretraining.rounds": 1, "threads": 1}
STUDIES = ("sweep", "compare", "figure", "advise", "bakeoff")


def small_data(folder: Path) -> Path:
    """Thirty users with eight titles each, imported."""
    rng = np.random.default_rng(7)
    lines = ["user,title,tags"]
    for user in range(30):
        for tag in rng.choice(len(TAGS), 8):
            lines.append(f"u{user:02d},w{tag}{rng.integers(3)} noise{rng.integers(9)},{TAGS[tag]}")
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "table.csv"
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = TableOptions(client="user", labels="tags", text=["title"], vocabulary=30, actions=4)
    import_table(table, folder / "data", options)
    return folder / "data"


def study_in(folder: Path, study: str, data: Path) -> list[str]:
    """Write what a study is told into a new folder; its command, to be run there into `out`."""
    folder.mkdir(parents=True)
    config = small_config(rounds=4, deploy_every=2, threads=1, data__source=str(data))
    (folder / "start.toml").write_text(config.to_toml(), encoding="utf-8")
    other = config.with_values({"policy.name": "greedy"})
    (folder / "other.toml").write_text(other.to_toml(), encoding="utf-8")
    every = ["--workers", "1", "-o", "out"]
    if study == "sweep":
        (folder / "sweep.toml").write_text(SWEEP.format(data=data), encoding="utf-8")
        return ["sweep", "sweep.toml", *every, "-q"]
    if study == "compare":
        return ["compare", "start.toml", "other.toml", "--seeds", "2", *every, "-q"]
    if study == "bakeoff":
        (folder / "bakeoff.toml").write_text(BAKEOFF, encoding="utf-8")
        return ["bakeoff", "bakeoff.toml", *every, "-q"]
    if study == "figure":
        settings = [word for key, value in FIGURE.items() for word in ("--set", f"{key}={value}")]
        shortened = ["--data", str(data), "--seeds", "2", "--scale", "0.003"]
        return ["figure", "fig2c", *shortened, *settings, *every]
    (folder / "out").mkdir()
    (folder / "out" / "plan.json").write_text(json.dumps(PLAN), encoding="utf-8")
    return ["advise", "--data", str(data), "--epsilon", "0", *every, "-q"]
