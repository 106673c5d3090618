"""Small configurations and finished runs for tests of experiments."""

import os
from pathlib import Path

from builders import random_text

from fedbandit.config import Config
from fedbandit.runs.index import read_runs
from fedbandit.runs.run import run

SMALL = {
    "scenario": "scratch",
    "rounds": 12,
    "deploy_every": 4,
    "clients_per_round": 5,
    "policy": {"name": "softmax", "beta": 0.1},
    "client": {"learning_rate": 0.5},
    "server": {"learning_rate": 0.05},
}


def small_config(**settings) -> Config:
    """Twelve rounds of a linear model; keyword names have two underscores for a dot."""
    return Config.build(SMALL).with_values(
        {key.replace("__", "."): value for key, value in settings.items()}
    )


def make_run(folder: Path, **settings) -> Config:
    """A finished run in a folder, on a data set in memory."""
    config = small_config(**settings)
    run(config, folder, dataset=random_text())
    return config


def three_policies(folder: Path, seeds: int = 2) -> None:
    """Runs of three policies and an untrained greedy one."""
    parts = {
        "softmax": {},
        "falcon": {"policy": {"name": "falcon"}},
        "epsilon-greedy": {"policy": {"name": "epsilon-greedy"}},
        "baseline": {"policy": {"name": "greedy"}, "training": False},
    }
    for name, settings in parts.items():
        for seed in range(seeds):
            make_run(folder / name / f"seed-{seed}", seed=seed, **settings)


def find_runs(folders):
    """Every run in or below the folders that can be read."""
    yield from read_runs(folders)[0]


def running_metrics(folder: Path) -> list[Path]:
    """The metrics files under a folder in which runs are going on; `rglob` stumbles over folders that come and go."""
    return [
        Path(root) / "metrics.jsonl"
        for root, _, names in os.walk(folder)
        if "metrics.jsonl" in names
    ]
