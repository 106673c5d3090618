"""The engine against runs of the authors' released code: same data, same initial weights, same learning rates."""

import ast
from dataclasses import replace

import numpy as np
import pytest
from published import encode, sentence, write_counts, write_sqlite

from fedbandit.building.experiment import build_experiment
from fedbandit.config import Config
from fedbandit.core.process import Stopwatch
from fedbandit.data import FederatedDataset
from fedbandit.data.importers.images import import_emnist
from fedbandit.data.importers.stackoverflow import StackOverflowOptions, import_stackoverflow
from fedbandit.engines import ThreadEngine
from fedbandit.federated.round import run_round
from fedbandit.objectives import FullInformation


def _stackoverflow(run, folder):
    """The data of a text run, prepared from its raw strings by the importer of the published file."""
    strings = zip(_clients(run), run["tokens"], run["titles"], run["tags"], strict=True)
    rows = [
        ("train", f"user{c:04d}", sentence(*map(str, (tokens, title, tags))))
        for c, tokens, title, tags in strings
    ]
    rows.append(("test", *rows[0][1:]))  # the published file has such a split; no run looks at it
    words = {str(word): len(run["words"]) - i for i, word in enumerate(run["words"])}
    tags = dict(zip(map(str, run["tag_names"]), map(int, run["tag_counts"]), strict=True))
    files = write_counts(folder, words, tags)
    options = StackOverflowOptions(vocabulary=len(words), actions=len(tags))
    published = write_sqlite(folder / "stackoverflow.sqlite", rows)
    dataset = FederatedDataset.open(
        import_stackoverflow(published, folder / "out", *files, options)
    )
    assert dataset.vocabulary() == list(words)
    assert dataset.header.actions == tuple(tags)
    return dataset


def _emnist(run, folder):
    """The data of an image run, through the importer of the published file."""
    pixels = run["pixels"].reshape(len(run["labels"]), -1).astype(float)
    examples = zip(_clients(run), pixels, run["labels"], strict=True)
    rows = [
        ("all_train", f"f{c:04d}_00", encode(pixels=x.tolist(), label=[int(label)]))
        for c, x, label in examples
    ]
    rows.append(("all_test", *rows[0][1:]))
    return FederatedDataset.open(
        import_emnist(write_sqlite(folder / "emnist_all.sqlite", rows), folder / "out")
    )


def _clients(run):
    """The client of each example."""
    return np.repeat(np.arange(len(run["offsets"]) - 1), np.diff(run["offsets"]))


def _play(run, dataset, model, dtype):
    """Play the run's rounds; yields the number, the weights by name in the order of the file, and the metrics."""
    spec = ast.literal_eval(str(run["spec"]))
    clients = dataset.train.num_clients
    supervised = spec["alg"].startswith("SUPERVISED")
    shifted = spec.get("shift") == "BANDITS"
    clipping = {"quantile": 0.8} if spec["adapt"] else {"norm": spec["clip"]}
    config = Config.build(
        {
            "scenario": "init-shift-released" if shifted else "scratch",
            "rounds": spec["rounds"],
            "deploy_every": spec["deploy"],
            "clients_per_round": clients // 2 if shifted else clients,
            "dtype": dtype,
            "model": {"name": model},
            "policy": {"name": "greedy"},
            "client": {"learning_rate": spec["clr"]},
            "server": {"optimizer": spec.get("opt", "adam"), "learning_rate": spec["slr"]},
            "clipping": clipping,
            "pretraining": {"clients": clients // 2},
        }
        if not supervised
        else {
            "scenario": "init",
            "dtype": dtype,
            "clients_per_round": clients // 2,
            "pretraining": {"clients": clients // 2},
            "client": {"learning_rate": spec["clr"]},
            "server": {"learning_rate": spec["slr"]},
        }
    )
    experiment = build_experiment(config, dataset)
    # Every client takes part in every round of the golden run, also in pre-training and after it.
    everybody = replace(experiment.bandit.cohorts, pool=range(clients), size=clients)
    phase = replace(experiment.pretraining if supervised else experiment.bandit, cohorts=everybody)
    if supervised:
        assert isinstance(phase.work.learner.objective, FullInformation)
    initial = [run[f"initial_{i}"] for i in range(len(experiment.layout.shapes))]
    names = [name for name, _ in experiment.layout.shapes]
    weights = experiment.layout.flatten(dict(zip(names, initial, strict=True)), np.dtype(dtype))
    state, engine = phase.start(weights), ThreadEngine(2)
    for number in range(1, spec["rounds"] + 1):
        state, metrics = run_round(phase, state, engine, Stopwatch())
        yield number, list(experiment.layout.split(state.weights).values()), metrics


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "name", ["so_greedy", "so_greedy_sgd_clip", "so_greedy_shift", "so_supervised"]
)
def test_text_runs(golden_run, tmp_path, name, dtype):
    run = golden_run(name)
    rounds = list(_play(run, _stackoverflow(run, tmp_path), "linear", dtype))
    for number, weights, metrics in rounds:
        for i, ours in enumerate(weights):
            np.testing.assert_allclose(ours, run[f"round{number}_{i}"], atol=5e-5, rtol=0)
        assert metrics["reward"] == pytest.approx(run["round_reward"][number - 1], abs=1e-6)
        assert metrics["running_reward"] == pytest.approx(
            run["average_reward"][number - 1], abs=1e-6
        )
    assert len(rounds) == len(run["round_reward"])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_image_run(golden_run, tmp_path, dtype):
    run = golden_run("emnist_greedy")
    rounds = list(_play(run, _emnist(run, tmp_path), "cnn", dtype))
    for number, _, metrics in rounds:
        assert metrics["reward"] == pytest.approx(run["round_reward"][number - 1], abs=1e-6)
        assert metrics["running_reward"] == pytest.approx(
            run["average_reward"][number - 1], abs=1e-6
        )
    number, weights, _ = rounds[-1]
    moved = np.sqrt(
        sum(((run[f"round{number}_{i}"] - run[f"initial_{i}"]) ** 2).sum() for i in range(8))
    )
    apart = np.sqrt(sum(((run[f"round{number}_{i}"] - weights[i]) ** 2).sum() for i in range(8)))
    assert apart <= 4e-4 * moved
