"""The accelerator learners, on the CPU device, against the thread engine's in float64."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import random_images, random_text
from core_samples import config, images, played, text

from fedbandit.assembly.experiment import build_experiment
from fedbandit.core.contexts import Contexts
from fedbandit.core.errors import ConfigError
from fedbandit.core.ragged import Ragged
from fedbandit.events import Events
from fedbandit.federated.learners.base import ClientSettings
from fedbandit.federated.learners.make_learner import Trainable
from fedbandit.federated.learners.vectorised import VectorisedLearner
from fedbandit.models import DataSpec, Freezing, Model
from fedbandit.objectives import (
    CrossEntropy,
    FullInformation,
    FullInformationCrossEntropy,
    Regression,
    WeightedRegression,
)

DEVICE = "cpu:0"  # the same device as "cpu", which has learners of its own
OBJECTIVES = [
    Regression(),
    Regression(reduction="half-sum"),
    WeightedRegression(scale=0.1),
    CrossEntropy(),
    FullInformation(),
    FullInformationCrossEntropy(),
]
MODELS = {
    "text-linear": {"name": "linear"},
    "text-linear-heads": {"name": "linear-heads", "heads": 3},
    "text-mlp": {
        "name": "mlp",
        "hidden": 40,
    },  # as many units as words: the two must not be confused
    "images-linear": {"name": "linear"},
    "images-linear-heads": {"name": "linear-heads", "heads": 3},
    "images-mlp": {"name": "mlp"},
    "images-cnn": {"name": "cnn"},
}
FREEZES = [
    ("text-linear", "bias"),
    ("text-linear-heads", "weight1"),
    ("text-mlp", "dense1"),
    ("text-mlp", "dense2"),
    ("images-linear-heads", "bias0"),
    ("images-mlp", "dense1"),
    ("images-cnn", "conv1"),
]


def _events(dataset, heads):
    """A log of every client with random actions and rewards; some clients have few events, one none."""
    rng = np.random.default_rng(3)
    split = dataset.train
    n, k = split.num_examples, dataset.header.num_actions
    bounds = np.asarray(split.offsets)
    return Events(
        bounds=np.insert(bounds, 2, bounds[2]),
        contexts=split.contexts(np.arange(n)),
        actions=rng.integers(0, k, n),
        rewards=rng.random(n).astype(np.float32),
        propensities=rng.uniform(0.05, 1, n),
        versions=np.zeros(n, np.int32),
        fresh=np.ones(n, bool),
        targets=rng.random((n, k)).astype(np.float32),
        weights=rng.poisson(1.0, (n, heads)).astype(np.float32) if heads else None,
    )


class Pair:
    """Both learners of a model, its weights, what of them is trained, and a log of events."""

    def __init__(self, name, objective, freeze=None):
        dataset = random_text() if name.startswith("text") else random_images(shape=(8, 8))
        trainable = Trainable.of(MODELS[name], DataSpec.of(dataset.header))
        self.whole = self.trained = trainable.initial(1, np.dtype("float64"))
        freezing = Freezing.of(trainable.layout, [freeze]) if freeze else None
        settings = ClientSettings(learning_rate=0.05, batch_size=4, epochs=2)
        self.learners = [
            trainable.learner(objective, settings, device, freezing) for device in ("cpu", DEVICE)
        ]
        self.predictors = [trainable.predictor(device) for device in ("cpu", DEVICE)]
        if freezing is not None:
            self.trained = freezing.pick(self.whole)
            self.learners = [learner.over(self.whole) for learner in self.learners]
        self.events = _events(dataset, trainable.model.heads)
        assert [isinstance(learner, VectorisedLearner) for learner in self.learners] == [
            False,
            True,
        ]

    def check_predictions(self):
        expected, found = (
            predictor.predict(self.whole, self.events.contexts) for predictor in self.predictors
        )
        np.testing.assert_allclose(found.mean, expected.mean, rtol=0, atol=1e-12)
        assert (found.heads is None) == (expected.heads is None)
        if found.heads is not None:
            np.testing.assert_allclose(found.heads, expected.heads, rtol=0, atol=1e-12)

    def check_sums(self, pull=0.0):
        """Half of the clients are clipped."""
        cpu, device = self.learners
        _, unclipped = cpu.train(self.trained, self.events, np.inf, pull)
        clip_norm = float(np.median(unclipped))
        assert 0 < clip_norm < unclipped.max() < np.inf
        sums = np.zeros((2, len(self.trained)))
        expected, expected_norms = cpu.train(self.trained, self.events, clip_norm, pull)
        found, norms = device.train(self.trained, self.events, clip_norm, pull)
        expected.add_to(sums[0])
        found.add_to(sums[1])
        np.testing.assert_allclose(norms, expected_norms, rtol=0, atol=1e-10)
        np.testing.assert_allclose(sums[1], sums[0], rtol=0, atol=1e-10)

    def check_updates(self, pull=0.0, drift=None):
        each = [
            [
                None if one is None else one.copy()
                for one in learner.updates(self.trained, self.events, pull, drift)
            ]
            for learner in self.learners  # an update is used at once
        ]
        assert len(each[0]) == len(each[1]) == self.events.num_clients
        assert any(one is None for one in each[0])
        for expected, found in zip(*each, strict=True):
            assert (found is None) == (expected is None)
            if found is not None:
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)
                assert np.abs(expected).max() > 0

    @property
    def drift(self):
        rng = np.random.default_rng(5)
        added = [
            None if client % 3 == 0 else 0.1 * rng.standard_normal(len(self.trained))
            for client in range(50)
        ]
        return added.__getitem__


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: f"{type(o).__name__}-{o.reduction}")
@pytest.mark.parametrize("name", MODELS)
def test_agrees_with_the_thread_engine(name, objective):
    pair = Pair(name, objective)
    pair.check_predictions()
    pair.check_sums()


@pytest.mark.slow
@pytest.mark.parametrize("drifting", [False, True], ids=["", "drift"])
@pytest.mark.parametrize("pull", [0.0, 0.3])
@pytest.mark.parametrize("name", MODELS)
def test_single_updates_agree_as_every_algorithm_and_compression_asks_for_them(
    name, pull, drifting
):
    """FedProx pulls, SCAFFOLD drifts, and compression and robust rules see one client's update at a time."""
    pair = Pair(name, Regression())
    pair.check_updates(pull, pair.drift if drifting else None)
    if pull and not drifting:
        pair.check_sums(pull)


@pytest.mark.parametrize(
    "objective", [WeightedRegression(scale=0.1), FullInformation()], ids=["chosen", "all"]
)
@pytest.mark.parametrize(("name", "freeze"), FREEZES)
def test_agrees_where_parameters_are_frozen(name, freeze, objective):
    pair = Pair(name, objective, freeze)
    assert len(pair.trained) < len(pair.whole)
    pair.check_predictions()
    pair.check_sums()
    pair.check_updates(0.3, pair.drift)


@pytest.mark.parametrize(
    "counted", [True, False], ids=["one count an event", "no counts for heads"]
)
def test_events_count_as_the_log_says(counted):
    """A log has a count for each head of an ensemble, as in the other tests; or one for each event, or none."""
    pair = Pair("text-linear" if counted else "text-linear-heads", Regression())
    counts = np.random.default_rng(1).random(len(pair.events)).astype(np.float32)
    pair.events = replace(pair.events, weights=counts if counted else None)
    pair.check_sums()


@pytest.mark.parametrize("name", ["text-linear", "text-linear-heads", "text-mlp"])
def test_a_word_twice_in_a_context_counts_twice(name):
    pair = Pair(name, Regression())
    ids = pair.events.contexts.shared.ids.copy()
    ids[1::2] = ids[: len(ids) // 2 * 2 : 2]
    pair.events = replace(
        pair.events, contexts=Contexts(replace(pair.events.contexts.shared, ids=ids))
    )
    pair.check_predictions()
    pair.check_sums()


@pytest.mark.parametrize("name", ["text-linear", "text-linear-heads", "text-mlp"])
def test_contexts_without_words_and_logs_without_events(name):
    pair = Pair(name, Regression())
    n = len(pair.events)
    pair.events = replace(
        pair.events,
        contexts=Contexts(Ragged(np.zeros(n + 1, np.int64), *(np.zeros(0, t) for t in "if"))),
    )
    pair.check_predictions()
    pair.check_updates()
    empty = pair.events.of_client(2)
    assert not len(empty)
    for learner, predictor in zip(pair.learners, pair.predictors, strict=True):
        assert len(predictor.predict(pair.whole, empty.contexts)) == 0
        assert list(learner.updates(pair.trained, empty)) == [None]
        total = np.zeros_like(pair.trained)
        found, norms = learner.train(pair.trained, empty, 1.0)
        found.add_to(total)
        assert norms.tolist() == [0.0]
        assert not total.any()


@pytest.mark.parametrize("name", ["text-mlp", "images-mlp"])
def test_a_client_whose_update_is_not_finite_is_left_out(name):
    pair = Pair(name, Regression())
    rewards = pair.events.rewards.copy()
    rewards[: pair.events.bounds[1]] = np.inf
    pair.events = replace(pair.events, rewards=rewards)
    sums, norms = np.zeros((2, len(pair.trained))), []
    for learner, total in zip(pair.learners, sums, strict=True):
        found, own = learner.train(pair.trained, pair.events, 0.5)
        found.add_to(total)
        norms.append(np.isfinite(own))
    assert not norms[0][0]
    assert norms[0].sum() == len(norms[0]) - 1
    np.testing.assert_array_equal(*norms)
    np.testing.assert_allclose(sums[1], sums[0], rtol=0, atol=1e-10)


RUNS = {
    "heads, scaffold, quantize, trimmed mean": (
        text,
        {
            "model__name": "linear-heads",
            "algorithm__name": "scaffold",
            "compression__name": "quantize",
            "aggregation__name": "trimmed-mean",
        },
    ),
    "text, mlp, fedprox, quantize, median": (
        text,
        {
            "model__name": "mlp",
            "algorithm__name": "fedprox",
            "compression__name": "quantize",
            "aggregation__name": "median",
        },
    ),
    "images, frozen mlp, scaffold, top-k": (
        images,
        {
            "model__name": "mlp",
            "model__freeze": ["dense1"],
            "algorithm__name": "scaffold",
            "compression__name": "top-k",
            "compression__fraction": 0.2,
        },
    ),
    "images, frozen cnn, pre-trained, top-k, median": (
        images,
        {
            "scenario": "init",
            "model__name": "cnn",
            "model__freeze": ["conv1", "conv2", "dense1"],
            "compression__name": "top-k",
            "aggregation__name": "median",
        },
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_a_device_is_that_of_the_cpu(name, monkeypatch):
    monkeypatch.setattr(VectorisedLearner, "chunk_events", 12)  # several chunks, in two threads
    data, settings = RUNS[name]
    rounds, runs = zip(
        *(
            played(config(rounds=3, client__learning_rate=0.05, device=device, **settings), data())
            for device in ("cpu", DEVICE)
        ),
        strict=True,
    )
    expected, found = (run.state.weights for run in runs)
    assert isinstance(runs[1].experiment.bandit.work.learner, VectorisedLearner)
    assert np.abs(expected - runs[0].experiment.initial_weights()).max() > 1e-4
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
    assert [one["sent_bytes"] for one in rounds[0]] == [one["sent_bytes"] for one in rounds[1]]


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="device: cuda:99"):
        build_experiment(config(device="cuda:99"), random_text())


class Absolute:
    """An objective of one's own."""

    def loss(self, scores, batch):
        return (scores.gather(1, batch.actions[:, None])[:, 0] - batch.rewards).abs().sum()


def _own_scores(params, x):
    return torch.zeros(len(x), 6) + params["bias"]


OWN_MODEL = Model(init=lambda seed: {"bias": np.zeros(6)}, scores=_own_scores)


@pytest.mark.parametrize(
    ("key", "part", "said"),
    [
        (
            "objective__name",
            "Absolute",
            f"objective.name: on device {DEVICE} only the built-in objectives work",
        ),
        (
            "model__name",
            "OWN_MODEL",
            f"model.name: on device {DEVICE} only the built-in models take sparse features",
        ),
    ],
)
def test_what_has_no_learner_for_a_device_is_refused_before_the_run(key, part, said):
    own = {key: f"{__name__}:{part}"}
    build_experiment(config(**own), text())
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        build_experiment(config(device=DEVICE, **own), text())


def test_a_model_of_ones_own_on_dense_features_runs_on_a_device():
    runs = [
        played(config(model__name=f"{__name__}:OWN_MODEL", device=device), images())[1]
        for device in ("cpu", DEVICE)
    ]
    assert isinstance(runs[1].experiment.bandit.work.learner, VectorisedLearner)
    assert runs[0].state.weights.any()
    np.testing.assert_allclose(runs[1].state.weights, runs[0].state.weights, rtol=0, atol=1e-12)
