"""LinUCB of fedbandit and of coba in the same linear world, `python -m benchmarks.coba_linucb`.

Exact cumulative regret after 5,000 events, seeds 0 to 4, in `coba_linucb.json`. fedbandit's clients send statistics
and a version is deployed every 50 events; coba's learner is told every reward before the next decision. Contexts,
actions and mean rewards are the same, draws of noise are not. Needs coba (`pip install coba`).
"""

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from fedbandit import Config, simulate
from fedbandit.environments import BUILT_IN, Met, exact_match, from_coba

KEPT = Path(__file__).with_suffix(".json")
SEEDS = range(5)
ACTIONS, NUMBERS, INTERACTIONS, CLIENTS, EVENTS = 5, 6, 20_000, 400, 5_000
ALPHA, EPSILON = 0.5, 0.1
WORLD = {"strength": 0.4, "noise": 0.2}  # of the pictures in docs/policies.md
RULES: dict[str, dict[str, Any]] = {
    "LinUCB": {"name": "ucb", "alpha": ALPHA},
    "epsilon-greedy": {"name": "epsilon-greedy", "epsilon": EPSILON},
    "random": {"name": "uniform"},
}


class Decisions:
    """Contexts of length 1 and fixed actions, as coba has an environment; what they pay is left open."""

    def read(self) -> Iterator[dict[str, Any]]:
        x = np.random.default_rng(0).normal(size=(INTERACTIONS, NUMBERS))
        actions = [tuple(row) for row in np.eye(ACTIONS).tolist()]
        for row in (x / np.linalg.norm(x, axis=1, keepdims=True)).tolist():
            yield {"context": tuple(row), "actions": actions, "rewards": [0.0] * ACTIONS}


class EpsilonGreedy:
    """Now and then any action, else the best by the ridge regression of coba's LinUCB."""

    def __init__(self, learner: Any, seed: int) -> None:
        self.learner, self.rng = learner, np.random.default_rng(seed)
        self.learn = learner.learn

    def predict(self, context: Any, actions: Any) -> Any:
        if self.rng.random() < EPSILON:
            return actions[self.rng.integers(len(actions))], EPSILON / len(actions)
        return self.learner.predict(context, actions)


def of_fedbandit(data: Any, rule: dict[str, Any], seed: int) -> float:
    """Exact regret of a run, deploying every round of 50 events."""
    config = Config.build({
        "scenario": "scratch", "rounds": EVENTS // 50, "deploy_every": 1, "clients_per_round": 5, "seed": seed,
        "client": {"max_examples": 10}, "environment": {"name": "linear", **WORLD},
        "algorithm": {"name": "statistics"}, "policy": rule, "threads": 1,
    })  # fmt: skip
    return float(sum(line["regret"] * line["events"] for line in simulate(config, data)))


def of_coba(data: Any, name: str, seed: int) -> float:
    """Exact regret of one of coba's learners, told every reward at once."""
    from coba.learners import LinUCBLearner, RandomLearner

    learner: Any = {
        "LinUCB": lambda: LinUCBLearner(ALPHA, seed=seed),
        "epsilon-greedy": lambda: EpsilonGreedy(LinUCBLearner(0, seed=seed), seed),
        "random": lambda: RandomLearner(seed),
    }[name]()
    rng, lost = np.random.default_rng(seed), 0.0
    rows = rng.permutation(INTERACTIONS)[:EVENTS]
    world = BUILT_IN["linear"](exact_match(ACTIONS), data.header, **WORLD)
    means = np.asarray(world.expected(Met.at_rows(data.train, rows, ACTIONS)), np.float64)
    noise = WORLD["noise"] * rng.normal(size=EVENTS)
    actions = [tuple(row) for row in np.eye(ACTIONS).tolist()]
    for x, mine, drawn in zip(data.train.shared(rows).tolist(), means, noise, strict=True):
        chosen, probability = learner.predict(x, actions)[:2]
        place = actions.index(tuple(chosen))
        learner.learn(x, chosen, mine[place] + drawn, probability)
        lost += mine.max() - mine[place]
    return lost


def main() -> None:
    data = from_coba(Decisions(), CLIENTS)
    found: dict[str, dict[str, list[float]]] = {"fedbandit": {}, "coba": {}}
    for name, rule in RULES.items():
        found["fedbandit"][name] = [round(of_fedbandit(data, rule, seed), 1) for seed in SEEDS]
        found["coba"][name] = [round(of_coba(data, name, seed), 1) for seed in SEEDS]
        for program, rules in found.items():
            numbers = rules[name]
            error = stdev(numbers) / len(numbers) ** 0.5
            print(f"{program:10} {name:15} regret {mean(numbers):8.1f} ± {error:.1f}")
    settings = {"events": EVENTS, "alpha": ALPHA, "epsilon": EPSILON, "world": WORLD}
    kept = {"coba": version("coba"), "settings": settings, "regret": found}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
