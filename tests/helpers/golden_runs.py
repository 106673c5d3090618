"""Runs of the authors' released code, made into data and phases of ours: same data, same initial weights.

`tests/golden/README.md` describes the files.
"""

import ast
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from published import encode, sentence, write_counts, write_sqlite

from fedbandit.assembly.experiment import build_experiment
from fedbandit.config import Config
from fedbandit.core.randomness import Purpose
from fedbandit.data import FederatedDataset
from fedbandit.data.importers.images import import_emnist
from fedbandit.data.importers.stackexchange import StackOverflowOptions, import_stackoverflow
from fedbandit.federated.clients import ClientWork
from fedbandit.federated.visit_plans import SimpleVisits


def spec_of(run):
    """The settings of a golden run, under the names of the released code."""
    return ast.literal_eval(str(run["spec"]))


def stackoverflow(run, folder):
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


def emnist(run, folder):
    """The data of an image run, through the importer of the published file."""
    pixels = run["pixels"].reshape(len(run["labels"]), -1)
    pixels = pixels.astype(np.float32)
    if run["pixels"].dtype == np.uint8:
        pixels = pixels / np.float32(255)
    examples = zip(_clients(run), pixels.astype(float), run["labels"], strict=True)
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


def phase_of(run, dataset, dtype):
    """The layout of our model and the phase of the golden run; every client takes part in every round."""
    spec, clients = spec_of(run), dataset.train.num_clients
    config = Config.build(_settings(spec, clients) | {"dtype": dtype})
    experiment = build_experiment(config, dataset)
    phase = experiment.pretraining if _is_supervised(spec) else experiment.bandit
    everybody = replace(experiment.bandit.cohorts, pool=range(clients), size=clients)
    return experiment.layout, replace(phase, cohorts=everybody)


def _is_supervised(spec):
    return spec["alg"].startswith("SUPERVISED")


def _settings(spec, clients):
    """Our configuration of what the released names in a golden run stand for."""
    half = {"pretraining": {"clients": clients // 2}, "clients_per_round": clients // 2}
    server = {"optimizer": spec.get("opt", "adam"), "learning_rate": spec["slr"]}
    settings = {
        "rounds": spec["rounds"],
        "deploy_every": spec["deploy"],
        "model": {"name": "cnn" if spec["task"] == "emnist" else "linear"},
        "client": {"learning_rate": spec["clr"], "batch_size": spec.get("batch", 16)},
        "server": server,
        "clipping": _clipping(spec),
    }
    if _is_supervised(spec):
        return settings | half | {"scenario": "init"}
    settings["policy"] = _policy(spec)
    if spec["alg"] == "EPSILON_GREEDY":
        settings["objective"] = {"name": "weighted-regression"}
    if spec.get("aggregator") == "DPSGD":
        settings["privacy"] = {
            "mechanism": "dp-fedavg",
            "sampling": "fixed",
            "noise_multiplier": spec["noise"],
        }
    if spec.get("shift") == "BANDITS":
        return settings | half | {"scenario": "init-shift-released"}
    return settings | {"scenario": "scratch", "clients_per_round": clients}


def _clipping(spec):
    if spec["adapt"]:
        return {"quantile": 0.8}
    return {"norm": spec["clip"]} if "clip" in spec else {"enabled": False}


def _policy(spec):
    if spec["alg"] == "SOFTMAX":
        return {"name": "softmax", "beta": spec["temperature"]}
    if spec["alg"] == "FALCON":
        return {"name": "falcon", "mu": spec["mu"], "gamma": spec["gamma"]}
    if "epsilon" in spec:
        return {"name": "epsilon-greedy", "epsilon": spec["epsilon"]}
    return {"name": "greedy"}


def initial_weights(run, layout, dtype):
    """The flat vector that the golden run starts from."""
    shapes = dict(layout.shapes)
    if "initial_0" in run:
        arrays = [run[f"initial_{i}"] for i in range(len(shapes))]
    else:
        generator = np.random.RandomState(spec_of(run)["initial_seed"])
        arrays = [_drawn_weights(generator, shape) for shape in shapes.values()]
    return layout.flatten(dict(zip(shapes, arrays, strict=True)), np.dtype(dtype))


def _drawn_weights(generator, shape):
    limit = 0.02
    if len(shape) > 1:
        limit = np.sqrt(6 / (np.prod(shape[:-2], dtype=int) * (shape[-2] + shape[-1])))
    return generator.uniform(-limit, limit, shape).astype(np.float32)


def of_clients(run, round_number, clients):
    """The places of these clients' events of a round in the arrays `event_*`, in the recorded order."""
    of_round = run["event_round"] == round_number
    found = [np.flatnonzero(of_round & (run["event_client"] == client)) for client in clients]
    return np.concatenate(found)


@dataclass(frozen=True)
class RecordedOrder(SimpleVisits):
    """Clients meet their examples in the recorded order, which decides what a mini-batch holds."""

    run: Any = None

    def visits(self, split, clients, round_number):
        found = super().visits(split, clients, round_number)
        events = of_clients(self.run, round_number, clients)
        return replace(found, rows=self.run["event_example"][events].astype(np.int64))


@dataclass(frozen=True)
class RecordedActions(ClientWork):
    """Clients log what they logged in the golden run."""

    run: Any = None

    def act(self, clients, broadcast, *more):
        ours = super().act(clients, broadcast, *more)
        events = of_clients(self.run, broadcast.round, clients)
        return replace(
            ours,
            actions=self.run["event_action"][events].astype(np.int64),
            rewards=self.run["event_reward"][events],
            propensities=self.run["event_probability"][events].astype(ours.propensities.dtype),
        )


def with_recorded_order(phase, run):
    """The same phase over the recorded order of the examples."""
    plan = phase.work.plan
    ordered = RecordedOrder(plan.seed, plan.deploy_every, plan.max_examples, run)
    return replace(phase, work=replace(phase.work, plan=ordered))


def with_recorded_actions(phase, run):
    """The same phase over the recorded actions."""
    parts = {name: getattr(phase.work, name) for name in phase.work.__dataclass_fields__}
    return replace(phase, work=RecordedActions(**parts, run=run))


def draw_as_recorded(run, monkeypatch):
    """Feed our draws of actions the recorded uniforms.

    The released softmax and FALCON draw as we do. Its epsilon-greedy draws twice, whether to explore and then what;
    the middle of the recorded action's share stands for both.
    """
    uniforms = run["event_uniform"].astype(np.float64)
    if "event_random_action" in run:
        rows, actions = np.arange(len(uniforms)), run["event_action"]
        probabilities = run["event_probabilities"].astype(np.float64)
        ends = np.cumsum(probabilities, axis=1)
        uniforms = ends[rows, actions] - probabilities[rows, actions] / 2

    def recorded(seed, purpose, times, clients, positions):
        assert purpose is Purpose.ACTIONS
        events = [
            of_clients(run, time, [client])[position]
            for time, client, position in zip(times, clients, positions, strict=True)
        ]
        return uniforms[events]

    monkeypatch.setattr("fedbandit.federated.clients.uniforms", recorded)
