"""A device that chooses among items with features: known ones, and ones that nobody has seen before."""

import sqlite3
import time
from dataclasses import replace

import numpy as np
import pytest

from fedbandit.assembly.experiment import build_experiment
from fedbandit.config import Config
from fedbandit.core.contexts import ItemSpec
from fedbandit.core.errors import DataError
from fedbandit.core.ragged import Ragged
from fedbandit.data import open_dataset
from fedbandit.deploy import Agent, DeviceModel, ItemCatalogue, Outcome
from fedbandit.deploy.device.training import device_learner
from fedbandit.federated.learners.base import ClientSettings
from fedbandit.federated.learners.make_learner import Trainable
from fedbandit.objectives import Regression

ITEMS = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)


def item_model(version=1, catalogue=True, seed=0, sparse=False, **changes):
    """A linear model over items: 2 features of the moment, 3 of an item."""
    rng = np.random.default_rng(seed)
    features = ITEMS
    if sparse:
        features = Ragged(
            np.arange(21) * 3, np.tile(np.arange(3, dtype=np.int32), 20), ITEMS.ravel()
        )
    names = tuple(f"photo-{i}" for i in range(20))
    width = 3 + 2 + 6
    given = {
        "weights": {
            "weight": rng.normal(size=(width, 1)).astype(np.float32),
            "bias": np.zeros(1, np.float32),
        },
        "actions": (),
        "kind": "dense",
        "shape": (2,),
        "policy": {"name": "softmax", "beta": 0.5},
        "items": ItemSpec("sparse" if sparse else "dense", (3,), 4.0, 20),
        "catalogue": ItemCatalogue(names, features) if catalogue is True else catalogue or None,
    }
    return DeviceModel(version=version, **{**given, **changes})


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_known_and_unknown_items_are_chosen_and_logged_with_their_features(tmp_path, sparse):
    new = np.array([0.5, -1.0, 2.0], np.float32)
    given = (np.arange(3), new) if sparse else new
    with Agent(tmp_path, uniform=np.random.default_rng(0).random) as agent:
        agent.install(item_model(sparse=sparse))
        seen = []
        for _ in range(30):
            decision = agent.choose([1.0, 0.0], candidates=["photo-3", 7, given, ("mine", given)])
            seen.append(decision.name)
            assert agent.reward(decision.event_id, 1.0) is Outcome.RECORDED
        assert set(seen) == {"photo-3", "photo-7", "2", "mine"}
        found = agent.events()
    shown = found.events.contexts.candidates
    assert len(found) == 30
    assert shown.items.tolist() == [3, 7, -1, -2] * 30
    rows = shown.features
    if sparse:
        rows = np.stack([rows.slice(i, i + 1).values for i in range(len(rows))])
    np.testing.assert_array_equal(rows, np.tile(np.stack([ITEMS[3], ITEMS[7], new, new]), (30, 1)))
    names = ["photo-3", "photo-7", "2", "mine"]
    assert [names[action] for action in found.events.actions] == seen


def test_a_file_with_or_without_its_catalogue_survives_and_scores_alike(tmp_path):
    whole, bare = item_model(), item_model(catalogue=False)
    again = DeviceModel.from_bytes(whole.to_bytes())
    assert again.space == whole.space == bare.space
    assert again.catalogue.digest == whole.catalogue.digest
    assert len(bare.to_bytes()) < len(whole.to_bytes())
    scores = []
    for model, candidates in ((whole, ["photo-1", "photo-2"]), (bare, [ITEMS[1], ITEMS[2]])):
        with Agent(tmp_path / str(model.catalogue is None)) as agent:
            agent.install(model)
            used = agent._used()
            scores.append(used.actor.predict(used.encode([1, 2], used.shown(candidates))).mean)
    np.testing.assert_array_equal(*scores)


def test_the_log_holds_numbers_and_no_features_of_known_items(tmp_path):
    with Agent(tmp_path) as agent:
        agent.install(item_model())
        agent.choose([1.0, 0.0], candidates=list(range(20)))
        agent.choose([1.0, 0.0], candidates=[0, ITEMS[1] + 1])
    db = sqlite3.connect(tmp_path / "events.sqlite")
    rows = db.execute("SELECT catalogue, length(items), length(own) FROM events").fetchall()
    db.close()
    digest = item_model().catalogue.digest
    assert rows == [(digest, 160, None), (digest, 16, 12)]


def test_events_of_an_earlier_catalogue_still_mean_its_items(tmp_path):
    later = ItemCatalogue(tuple("abc"), ITEMS[:3] + 9)
    with Agent(tmp_path, keep_models=2) as agent:
        agent.install(item_model(1))
        agent.reward(agent.choose([1, 1], candidates=[4, 5]).event_id, 1.0)
        agent.install(item_model(2, catalogue=later))
        agent.reward(agent.choose([1, 1], candidates=["a", "b"]).event_id, 1.0)
        found = agent.events().events.contexts.candidates
        np.testing.assert_array_equal(
            found.features, np.concatenate([ITEMS[4:6], ITEMS[:2] + np.float32(9)])
        )
        agent.install(item_model(3, catalogue=later))  # the first catalogue is gone by now
        again = agent.events()
        assert (len(again), again.left_out, again.damaged) == (1, 1, 0)


def test_too_many_features_are_not_logged_and_it_is_said(tmp_path):
    wide = item_model(
        catalogue=False,
        items=ItemSpec("dense", (4096,), 4.0, 20),
        model={"name": "linear", "features": ["item"]},
        weights={"weight": np.zeros((4096, 1), np.float32), "bias": np.zeros(1, np.float32)},
    )
    with Agent(tmp_path) as agent:
        agent.install(wide)
        decision = agent.choose([1.0, 0.0], candidates=[np.ones(4096)] * 8)
        assert not decision.logged
        assert "of which a log takes 65,536" in decision.problem
        assert agent.choose([1.0, 0.0], candidates=[np.ones(4096)] * 4).logged


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        (None, "give at least one"),
        ([], "give at least one"),
        (["nobody"], "no item 'nobody' here"),
        ([99], "no item 99"),
        ([[1.0, 2.0]], "expected shape"),
        ([[1.0, 2.0, float("nan")]], "finite"),
    ],
)
def test_candidates_that_cannot_be_shown_are_refused(tmp_path, candidates, message):
    with Agent(tmp_path) as agent:
        agent.install(item_model())
        with pytest.raises(ValueError, match=message):
            agent.choose([1.0, 0.0], candidates=candidates)


def test_a_strangers_catalogue_is_checked():
    with pytest.raises(DataError, match="one name of its own"):
        ItemCatalogue(("a", "a"), ITEMS[:2])
    with pytest.raises(DataError, match="features are not finite, or not dense"):
        item_model(catalogue=ItemCatalogue(("a", "b"), ITEMS[:2, :2]))
    with pytest.raises(DataError, match="linear model has"):
        item_model(items=ItemSpec("dense", (4,), 4.0, 20), catalogue=False)


@pytest.mark.parametrize(
    ("column", "value"),
    [("items", b""), ("items", b"abc"), ("items", np.int64([99, 1]).tobytes()), ("own", b"\0"),
     ("items", np.int64([-5, 1]).tobytes()), ("own", None), ("items", None)],
)  # fmt: skip
def test_a_damaged_list_of_candidates_is_set_aside(tmp_path, column, value):
    with Agent(tmp_path) as agent:
        agent.install(item_model())
        for _ in range(3):
            event = agent.choose([1.0, 0.0], candidates=[ITEMS[0] + 1, 1]).event_id
            agent.reward(event, 1.0)
    db = sqlite3.connect(tmp_path / "events.sqlite")
    db.execute(f"UPDATE events SET {column} = ? WHERE sequence = 2", (value,))
    db.commit()
    db.close()
    with Agent(tmp_path) as agent:
        found = agent.events()
        assert (found.sequence.tolist(), found.damaged) == ([1, 3], 1)


def test_training_on_a_device_moves_weights_as_the_simulator_does(tmp_path):
    with Agent(tmp_path, uniform=np.random.default_rng(1).random) as agent:
        agent.install(item_model())
        rng = np.random.default_rng(2)
        for _ in range(40):
            listed = rng.choice(20, rng.integers(2, 6), replace=False).tolist()
            event = agent.choose(rng.random(2), candidates=[*listed, rng.normal(size=3)]).event_id
            agent.reward(event, float(rng.random()))
        events, model = agent.events().events, agent.model
    trainable = Trainable.of(model.model, model.data)
    settings = ClientSettings(learning_rate=0.3, batch_size=8, epochs=2)
    flat = trainable.layout.flatten(dict(model.weights), np.dtype(np.float64))
    ours = device_learner("linear", trainable, Regression(), settings)
    theirs = trainable.learner(Regression(), settings)
    reduced = trainable.reduction(Regression())(events)
    got, _ = ours.train(flat, reduced, 10.0)
    expected, _ = theirs.train(flat, reduced, 10.0)
    sums = [np.zeros_like(flat), np.zeros_like(flat)]
    for made, total in zip((got, expected), sums, strict=True):
        made.add_to(total)
    assert np.abs(sums[1]).max() > 1e-3
    np.testing.assert_allclose(*sums, atol=1e-12)


def test_a_simulation_over_candidates_becomes_a_model_that_scores_alike(tmp_path):
    dataset = open_dataset("gallery")
    config = Config.build(
        {"scenario": "scratch", "clients_per_round": 2, "policy": {"name": "softmax"}}
    )
    experiment = build_experiment(config, dataset)
    weights = np.random.default_rng(0).normal(size=experiment.layout.size).astype(np.float32)
    model = DeviceModel.of_experiment(experiment, weights, 1)
    assert model.policy["beta"] > 0  # explicit
    contexts = dataset.train.contexts(np.arange(3))
    expected = experiment.bandit.work.predictor.predict(weights, contexts)
    with Agent(tmp_path) as agent:
        agent.install(model)
        used = agent._used()
        for row in range(3):
            shown = contexts.candidates.slice(row, row + 1)
            encoded = used.encode(contexts.shared[row], used.shown(shown.items.tolist()))
            at = slice(*contexts.candidates.bounds[row : row + 2])
            np.testing.assert_allclose(
                used.actor.predict(encoded).mean, expected.mean[at], rtol=1e-6, atol=1e-6
            )
        assert agent.choose(contexts.shared[0], candidates=shown.items.tolist()).logged
    bare = DeviceModel.of_experiment(experiment, weights, 1, catalogue=False)
    assert bare.catalogue is None
    assert replace(bare, catalogue=model.catalogue).space == model.space


def test_a_choice_among_fifty_of_a_hundred_thousand_items_takes_milliseconds(tmp_path):
    """Cost goes with what is shown: counted in CPU seconds, with room for slow machines."""
    many = np.random.default_rng(0).normal(size=(100_000, 3)).astype(np.float32)
    catalogue = ItemCatalogue(tuple(map(str, range(100_000))), many)
    with Agent(tmp_path) as agent:
        agent.install(item_model(catalogue=catalogue))
        listed = [str(i) for i in range(0, 100_000, 2_000)]
        agent.choose([1.0, 0.0], candidates=listed)
        started = time.process_time()
        for _ in range(20):
            assert agent.choose([1.0, 0.0], candidates=listed).logged
        print(f"{(time.process_time() - started) / 20 * 1000:.2f} ms of CPU a choice")
