"""Text and other columns in one context: what is learned from both is more than from either, on the compiled kernel."""

import numpy as np
import pandas as pd
import pytest
from messy_tables import write_clicks, write_decisions, write_tickets

from fedbandit import import_frame, simulate
from fedbandit.assembly.experiment import build_experiment
from fedbandit.config import Config
from fedbandit.data import open_dataset
from fedbandit.data.importers.contexts import ColumnOptions
from fedbandit.data.importers.logs import DsJson, dsjson_options
from fedbandit.data.importers.tables import TableOptions, import_table
from fedbandit.federated.learners.linear import SparseLinearLearner
from fedbandit.studies.offline import train_from_logs

CONFIG = {
    "scenario": "scratch", "rounds": 40, "deploy_every": 5, "clients_per_round": 30, "threads": 1,
    "policy": {"name": "softmax", "beta": 0.1}, "client": {"learning_rate": 0.5}, "server": {"learning_rate": 0.05},
}  # fmt: skip


def accuracy(path):
    """How often the model that a run has learned would choose right, without exploring."""
    config = Config.build(
        {
            **CONFIG,
            "policy": {"name": "epsilon-greedy", "epsilon": 0.5},
            "data": {"source": str(path)},
        }
    )
    dataset = open_dataset(path)
    simulation = simulate(config, dataset)
    simulation.collect()
    predictor = build_experiment(config, dataset).bandit.work.predictor
    contexts = dataset.train.contexts(np.arange(dataset.train.num_examples))
    chosen = predictor.predict(simulation.state.weights, contexts).mean.argmax(axis=1)
    return float((chosen == dataset.train.labels.ids).mean())


def last_rewards(path):
    config = Config.build({**CONFIG, "data": {"source": str(path)}})
    dataset = open_dataset(path)
    assert isinstance(build_experiment(config, dataset).bandit.work.learner, SparseLinearLearner)
    return float(np.mean(simulate(config, dataset).collect()["reward"][-5:]))


def test_both_sides_are_learned_from(tmp_path):
    """The word says which of two pairs of answers it is, the number which of the two."""
    rng = np.random.default_rng(0)
    n = 1500
    side, high = rng.integers(0, 2, n), rng.integers(0, 2, n)
    words = [["red blue green", "cat dog cow"][s].split() for s in side]
    frame = pd.DataFrame({
        "user": rng.integers(0, 60, n),
        "said": [" ".join(rng.permutation([*rng.choice(own, 2), "and", "so", "on"])) for own in words],
        "price": np.where(high, 900.0, 100.0) + rng.normal(0, 100, n),
        "answer": [f"{'ab'[s]}{h}" for s, h in zip(side, high, strict=True)],
    })  # fmt: skip
    found = {}
    for name, treat in {"both": [], "text": ["price=ignore"], "number": ["said=ignore"]}.items():
        import_frame(
            frame, tmp_path / name, client="user", labels="answer", treat=treat, test_fraction=0
        )
        found[name] = accuracy(tmp_path / name)
    assert found["text"] < 0.6
    assert found["number"] < 0.6  # one of two answers at best, and then one of two again
    assert found["both"] > 0.95


@pytest.mark.parametrize(
    ("write", "options"),
    [(write_clicks, TableOptions(client="visitor", labels="clicked")),
     (write_tickets, TableOptions(client="Kunde", labels=["Queue"], treat=["Queue 2=ignore"]))],
)  # fmt: skip
def test_messy_tables_go_from_file_to_a_run_that_learns(tmp_path, write, options):
    import_table(write(tmp_path / "table.csv"), tmp_path / "data", options)
    assert last_rewards(tmp_path / "data") > 0.7


def test_a_messy_log_goes_from_file_to_a_model_that_has_learned(tmp_path):
    path = write_decisions(tmp_path / "log.dsjson")
    import_table(DsJson(path), tmp_path / "log", dsjson_options("User.id", ColumnOptions()))
    log = open_dataset(tmp_path / "log")
    config = Config.build(
        {**CONFIG, "clients_per_round": 20, "rounds": 60, "data": {"source": str(log.path)}}
    )
    trained = train_from_logs(config, log)
    assert log.test is not None
    rows = np.arange(log.test.num_examples)
    scores = trained.experiment.bandit.work.predictor.predict(
        trained.weights, log.test.contexts(rows)
    ).mean
    majors = [
        log.header.encoder.features().index(f"User.major={name}")
        for name in ("engineering", "arts", "law")
    ]
    contexts = log.test.shared(rows)
    best = {0: "sports", 1: "music", 2: "news"}
    right = 0
    for row in rows.tolist():
        here = contexts.slice(row, row + 1)
        major = next(place for place, feature in enumerate(majors) if feature in here.ids)
        right += log.header.actions[int(scores[row].argmax())] == best[major]
    assert right > 0.9 * len(rows) > 20
