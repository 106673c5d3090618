"""Decisions with candidates of their own: acting, training and paying for them."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbandit import simulate
from fedbandit.acting import Actor, NotFinite, explore, make_predictor
from fedbandit.acting.predictors import TorchPredictor
from fedbandit.config import Config
from fedbandit.core.contexts import Candidates, Contexts, ItemSpec
from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.prediction import Prediction, at_actions, best_action, over_actions
from fedbandit.core.ragged import Ragged
from fedbandit.data import FederatedDataset
from fedbandit.data.dataset import Catalogue
from fedbandit.data.embedded import gallery
from fedbandit.data.info import describe
from fedbandit.data.info import statistics as statistics_of
from fedbandit.data.writer import DatasetWriter
from fedbandit.environments import Met
from fedbandit.events import Events
from fedbandit.federated.learners.base import AutogradLearner, ClientSettings
from fedbandit.federated.learners.make_learner import Trainable
from fedbandit.models import DataSpec, Layout, build_model
from fedbandit.objectives import DoublyRobust, Regression, WeightedRegression
from fedbandit.policies import EpsilonGreedy, Falcon, Floored, Greedy, Softmax, Uniform

RULES = [
    Greedy(),
    EpsilonGreedy(0.2),
    Softmax(0.3),
    Falcon(4, 20),
    Uniform(),
    Floored(Softmax(0.1), 0.05),
]
SPEC = DataSpec("dense", (3,), 0, ItemSpec("dense", (4,), 4.0, 6))


def decisions(counts, seed=0, items=50):
    """Decisions with so many candidates each, of random features."""
    rng, bounds = np.random.default_rng(seed), np.cumsum([0, *counts])
    features = rng.normal(size=(bounds[-1], 4)).astype(np.float32)
    shown = Candidates(bounds, rng.integers(0, items, bounds[-1]), features)
    return Contexts(rng.normal(size=(len(counts), 3)).astype(np.float32), shown)


def linear(**parameters):
    model = build_model("linear", SPEC, parameters)
    layout = Layout.of(model.init(0))
    return model, layout, np.random.default_rng(1).normal(size=layout.size)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(counts=st.lists(st.integers(2, 9), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_a_decision_is_made_as_if_it_were_the_only_one(rule, dtype, counts, seed):
    rng, bounds = np.random.default_rng(seed), np.cumsum([0, *counts])
    scores = rng.normal(size=bounds[-1]).astype(dtype)
    whole = explore(rule, Prediction(scores, bounds=bounds))
    for first, last in itertools.pairwise(bounds):
        alone = rule.probabilities(Prediction(scores[None, first:last]))[0]
        np.testing.assert_array_equal(whole[first:last], alone)


def test_sums_and_choices_over_candidates_are_those_of_each_list():
    bounds, values = np.array([0, 2, 5]), np.array([1.0, 4.0, 2.0, 8.0, 3.0])
    assert over_actions(values, bounds).tolist() == [5, 13]
    assert best_action(values, bounds).tolist() == [4, 8]
    assert at_actions(values, np.array([1, 2]), bounds).tolist() == [4, 3]


def test_some_decisions_keep_their_candidates():
    contexts = decisions([3, 2, 5, 4])
    some, part = contexts.take(np.array([2, 0])), contexts.slice(2, 4)
    assert some.candidates.counts.tolist() == [5, 3]
    bounds = contexts.candidates.bounds
    np.testing.assert_array_equal(
        some.candidates.features[:5], contexts.candidates.features[bounds[2] : bounds[3]]
    )
    np.testing.assert_array_equal(part.candidates.items, contexts.candidates.items[bounds[2] :])
    actions = np.array([2, 1, 0, 3])
    chosen = contexts.chosen(actions).candidates
    np.testing.assert_array_equal(chosen.items, contexts.candidates.items[bounds[:-1] + actions])


@pytest.mark.parametrize("light", [True, False])
@pytest.mark.parametrize("features", [["item"], ["item", "shared*item"], None], ids=str)
def test_linear_scores_are_those_of_a_plain_form(features, light):
    given_features = {} if features is None else {"features": features}
    model, layout, weights = linear(**given_features)
    contexts = decisions([2, 4, 3])
    found = make_predictor(model, layout, light=light).predict(weights, contexts)
    parts, shown, expected = features or ["item", "shared", "shared*item"], contexts.candidates, []
    for decision in range(3):
        user = contexts.shared[decision].astype(np.float64)
        user /= np.linalg.norm(user)
        for row in range(shown.bounds[decision], shown.bounds[decision + 1]):
            item = shown.features[row].astype(np.float64)
            item /= np.linalg.norm(item)
            sides = {"item": item, "shared": user, "shared*item": np.outer(user, item).ravel()}
            x = np.concatenate([sides[part] for part in parts]) / np.sqrt(len(parts))
            expected.append(x @ weights[:-1] + weights[-1])
    np.testing.assert_allclose(found.mean, expected, rtol=0, atol=1e-6)
    plain = TorchPredictor(model, layout).predict(weights, contexts)
    np.testing.assert_allclose(plain.mean, found.mean, rtol=0, atol=1e-12)


def test_crosses_beyond_the_buckets_are_hashed_into_them():
    model, layout, weights = linear(features=["shared*item"], buckets=5)
    assert layout.size == 6
    scores = make_predictor(model, layout).predict(weights, decisions([2, 3])).mean
    assert len(np.unique(scores)) == 5


def events(counts, seed=3):
    rng, contexts = np.random.default_rng(seed), decisions(counts, seed)
    n = len(counts)
    return Events(
        bounds=np.array([0, 5, 5, n]),
        contexts=contexts,
        actions=np.array([rng.integers(0, count) for count in counts]),
        rewards=rng.random(n).astype(np.float32),
        propensities=rng.uniform(0.1, 1, n),
        versions=np.zeros(n, np.int32),
        fresh=np.ones(n, bool),
        targets=rng.random(sum(counts)),
        weights=rng.uniform(0.5, 1.5, n),
    )


@pytest.mark.parametrize("objective", [Regression(), WeightedRegression(scale=0.5)], ids=repr)
def test_training_touches_the_chosen_row_and_agrees_with_automatic_differentiation(objective):
    logged = events([2, 3, 5, 4, 2, 3, 3, 6, 2, 4, 5])
    trainable = Trainable.of({"name": "linear"}, SPEC)
    settings = ClientSettings(learning_rate=0.3, batch_size=4, epochs=2)
    weights = np.random.default_rng(1).normal(size=trainable.layout.size)
    fast = trainable.learner(objective, settings)
    slow = AutogradLearner(trainable.model, trainable.layout, objective, settings)
    reduced = trainable.reduction(objective)(logged)
    for own, other in zip(
        fast.updates(weights, reduced), slow.updates(weights, logged), strict=True
    ):
        assert (own is None) == (other is None)
        if own is not None:
            assert np.abs(own).max() > 1e-3
            np.testing.assert_allclose(own, other, rtol=0, atol=1e-12)


def test_a_loss_over_all_candidates_is_the_mean_over_decisions_of_the_mean_over_candidates():
    logged = events([2, 3, 5, 4, 2, 3, 3, 6, 2, 4, 5])
    trainable = Trainable.of({"name": "linear"}, SPEC)
    settings = ClientSettings(learning_rate=0.3, batch_size=100)
    weights = np.random.default_rng(1).normal(size=trainable.layout.size)
    logged = replace(logged, weights=None)
    learner = trainable.learner(DoublyRobust(), settings)
    (update, nothing, _) = learner.updates(weights, logged)
    assert nothing is None
    rows = trainable.model.rows(logged.contexts.slice(0, 5))
    x = np.zeros((len(rows), trainable.layout.size))
    x[rows.row_of_entry(), rows.ids], x[:, -1] = rows.values, 1
    errors = x @ weights - logged.targets[: len(rows)]
    counts = np.diff(logged.contexts.candidates.bounds[:6])
    gradient = (2 * errors / np.repeat(5 * counts, counts)) @ x
    np.testing.assert_allclose(update, -0.3 * gradient, rtol=0, atol=1e-7)


# --- whole runs ---


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return FederatedDataset.open(
        gallery.generate(tmp_path_factory.mktemp("data") / "gallery", users=60, personal=0.2)
    )


def config(photos, **values):
    base = {
        "data": {"source": str(photos.path)},
        "scenario": "scratch",
        "rounds": 12,
        "deploy_every": 3,
        "clients_per_round": 20,
        "client": {"learning_rate": 1.0},
        "server": {"learning_rate": 0.05},
        "threads": 1,
    }
    return Config.build({**base, **values})


def test_a_gallery_is_learned(photos):
    results = simulate(config(photos, rounds=30), photos).collect()
    rewards = results["reward"]
    assert rewards[-6:].mean() > rewards[:3].mean() + 0.1
    assert 0.4 < results["test_hit_rate"][-1] <= 1


def test_the_share_of_the_best_candidates_reward_is_measured_where_it_is_known(photos):
    by_label = simulate(config(photos), photos).collect()
    np.testing.assert_allclose(by_label["test_reward_share"], by_label["test_hit_rate"])
    chosen = config(photos, environment={"name": "linear", "noise": 0.0}, rounds=3)
    with simulate(chosen, photos) as simulation:
        list(simulation)
        found, work = simulation.evaluate(), simulation.experiment.bandit.work
        weights, split = simulation.state.weights, photos.test
        met = Met.at_rows(split, np.arange(split.num_examples), 0)
        means = simulation.experiment.bandit.scenario.expected(met)
        mean = work.predictor.predict(weights, met.contexts).mean
        ends = itertools.pairwise(met.bounds)
        best = [(means[a + mean[a:b].argmax()], means[a:b].max()) for a, b in ends]
        earned, possible = np.sum(best, axis=0, dtype=np.float64)
    assert found["test_reward_share"] == pytest.approx(earned / possible, rel=1e-12)
    assert found["test_reward_share"] < 1
    assert "test_sampled" not in found


@pytest.mark.parametrize("world", ["preferences", "linear", "logistic"])
@pytest.mark.parametrize("kind", ["permute", "rotate"])
def test_tastes_over_candidates_change_at_a_round(photos, world, kind):
    drift = {"kind": kind, "at": [7], "fraction": 0.5}
    chosen = config(photos, scenario="drift", drift=drift, environment={"name": world})
    with simulate(chosen, photos) as simulation:
        scenario = simulation.experiment.bandit.scenario
        split = photos.train
        rows = np.arange(split.num_examples)
        before, still, after = (
            scenario.expected(Met.at_rows(split, rows, 0, time)) for time in (1, 6, 7)
        )
        np.testing.assert_array_equal(before, still)
        assert np.abs(after - before).max() > 0.1
        plain = simulate(config(photos, environment={"name": world}), photos)
        world_of_old = plain.experiment.bandit.scenario
        np.testing.assert_array_equal(before, world_of_old.expected(Met.at_rows(split, rows, 0, 7)))
        lines = list(simulation)
    assert all(line["regret"] >= 0 for line in lines)


def test_candidates_do_not_appear_by_drift(photos):
    drift = {"kind": "appear", "at": [7]}
    chosen = config(photos, scenario="drift", drift=drift, environment={"name": "linear"})
    with pytest.raises(ConfigError, match=r"drift\.kind: appear is for fixed actions"):
        simulate(chosen, photos)


def test_metrics_over_sampled_candidates_say_so(photos):
    source = {"candidates": "the item that was picked and 4 sampled by popularity"}
    sampled = replace(photos, header=replace(photos.header, source=source))
    assert simulate(config(photos, rounds=3), sampled).collect()["test_sampled"][-1] == 1


@pytest.mark.parametrize("objective", ["weighted-regression", "doubly-robust"])
@pytest.mark.parametrize("mode", ["simple", "population"])
def test_threads_change_no_bit(photos, objective, mode):
    both = [
        simulate(
            config(photos, objective={"name": objective}, mode=mode, threads=threads), photos
        ).collect()
        for threads in (1, 3)
    ]
    assert both[0].runs[0].columns == both[1].runs[0].columns


def test_propensities_are_those_of_the_rule_over_the_decisions_own_candidates(photos):
    chosen = config(photos, policy={"name": "epsilon-greedy", "epsilon": 0.2})
    simulation = simulate(chosen, photos)
    work, state = simulation.experiment.bandit.work, simulation.state
    logged = work.act(np.arange(10), work.broadcast(state))
    counts = logged.contexts.candidates.counts
    assert len(set(counts.tolist())) > 2
    greedy = np.isclose(logged.propensities, 0.8 + 0.2 / counts)
    assert (greedy | np.isclose(logged.propensities, 0.2 / counts)).all()
    assert (logged.actions < counts).all()
    right = [
        action in photos.train.labels.slice(row, row + 1).ids
        for row, action in zip(
            work.plan.visits(photos.train, np.arange(10), 1).rows, logged.actions, strict=True
        )
    ]
    np.testing.assert_array_equal(logged.rewards, right)


def test_diagonal_newton_learns_a_gallery(photos):
    newton = config(photos, algorithm={"name": "diag-newton"}, rounds=20)
    rewards = simulate(newton, photos).collect()["reward"]
    assert rewards[-6:].mean() > rewards[:3].mean() + 0.1


@pytest.mark.parametrize("objective", ["regression", "doubly-robust"])
def test_diagonal_newton_over_candidates_is_the_plain_rule(photos, objective):
    newton = {"name": "diag-newton", "rate": 0.7, "prior": 0.5, "bias": 0.3, "same_round": 2.5}
    chosen = config(photos, algorithm=newton, objective={"name": objective}, dtype="float64")
    simulation = simulate(chosen.with_values({"deploy_every": 1}), photos)
    phase = simulation.experiment.bandit
    w, total = np.split(simulation.state.weights, 2)[0], 0.0
    rates = np.append(np.full(len(w) - 1, 0.7), 0.3 * 0.7)
    for number in range(1, 4):
        state = simulation.state
        logged = phase.work.act(phase.cohorts.draw(number), phase.work.broadcast(state))
        rows = simulation.experiment.trainable.model.rows(logged.contexts)
        x = np.zeros((len(rows), len(w)))
        x[rows.row_of_entry(), rows.ids], x[:, -1] = rows.values, 1
        if objective == "regression":
            at, targets = logged.contexts.candidates.bounds[:-1] + logged.actions, logged.rewards
        else:
            at, targets = np.arange(len(rows)), logged.targets
        own = (x[at] ** 2).sum(0)
        total = total + own
        w = w - rates * (x[at].T @ (x[at] @ w - targets)) / (0.5 + total + 1.5 * own)
        next(iter(simulation))
        weights, precision = np.split(simulation.state.weights, 2)
        np.testing.assert_allclose(weights, w, rtol=0, atol=1e-9)
        np.testing.assert_allclose(precision, 0.5 + total, rtol=0, atol=1e-9)
    assert np.abs(w).max() > 0.1


@pytest.mark.parametrize(
    "values",
    [
        {"algorithm": {"name": "diag-newton"}, "objective": {"name": "doubly-robust"}},
        {"model": {"name": "linear-heads", "heads": 4}, "policy": {"name": "bagging"}},
        {
            "model": {"name": "linear-heads", "heads": 4, "features": ["item"]},
            "policy": {"name": "ucb"},
            "objective": {"name": "doubly-robust"},
        },
    ],
    ids=["newton", "bagging", "ucb over heads"],
)
def test_targets_and_ensembles_over_candidates_learn_with_the_same_bits(photos, values):
    if "policy" in values:
        values = values | {"policy": {**values["policy"], "floor": 0.02}}
    both = [
        simulate(config(photos, rounds=24, threads=threads, **values), photos).collect()
        for threads in (1, 3)
    ]
    assert both[0].runs[0].columns == both[1].runs[0].columns
    rewards = both[0]["reward"]
    assert rewards[-6:].mean() > rewards[:3].mean() + 0.05


@pytest.mark.parametrize("objective", [Regression(), DoublyRobust()], ids=repr)
def test_each_head_over_candidates_is_trained_and_scored_as_a_model_of_its_own(objective):
    logged = events([2, 3, 5, 4, 2, 3, 3, 6, 2, 4, 5])
    counts = np.random.default_rng(4).integers(0, 3, (len(logged), 3)).astype(float)
    heads = Trainable.of({"name": "linear-heads", "heads": 3}, SPEC)
    one = Trainable.of({"name": "linear"}, SPEC)
    weights = np.random.default_rng(1).normal(size=heads.layout.size)
    settings = ClientSettings(learning_rate=0.3, batch_size=4)
    parts = np.split(weights, 3)
    together = heads.predictor().predict(weights, logged.contexts)
    reduce = heads.reduction(objective) or (lambda log: log)
    found = heads.learner(objective, settings).updates(
        weights, reduce(replace(logged, weights=counts))
    )
    alone = [
        one.learner(objective, settings).updates(
            part, reduce(replace(logged, weights=counts[:, head]))
        )
        for head, part in enumerate(parts)
    ]
    for head, part in enumerate(parts):
        expected = one.predictor().predict(part, logged.contexts).mean
        np.testing.assert_array_equal(together.heads[:, head], expected)
    np.testing.assert_allclose(together.mean, together.heads.mean(axis=1), rtol=0, atol=1e-12)
    for own, *each in zip(found, *alone, strict=True):
        assert (own is None) == (each[0] is None)
        if own is not None:
            np.testing.assert_allclose(own, np.concatenate(each), rtol=0, atol=1e-12)


def test_actor_and_fused_draws_agree(photos):
    contexts = photos.train.contexts(np.arange(40))
    trainable = Trainable.of({"name": "linear"}, DataSpec.of(photos.header))
    weights = np.random.default_rng(0).normal(size=trainable.layout.size).astype(np.float32)
    uniforms, found = np.random.default_rng(1).random(40), []
    for compiles in (True, False):
        actor = Actor(trainable.predictor(), weights, Softmax(0.2), compiles)
        found.append(actor.choose(contexts, uniforms))
    np.testing.assert_array_equal(found[0].actions, found[1].actions)
    np.testing.assert_array_equal(found[0].propensities, found[1].propensities)


@pytest.mark.parametrize(
    ("given_values", "said"),
    [
        ({"scenario": "init-shift"}, "scenario: init-shift shifts fixed actions"),
        (
            {"scenario": "drift"},
            "scenario: drift over candidates changes tastes; set environment.name",
        ),
        ({"model": {"name": "mlp"}}, "model.name: mlp scores fixed actions"),
        ({"model": {"name": "linear", "features": ["user"]}}, "model.features: 'user' is not"),
        ({"model": {"name": "linear", "features": ["shared"]}}, "model.features: without the"),
    ],
    ids=str,
)
def test_what_is_about_fixed_actions_is_refused_in_one_line(photos, given_values, said):
    with pytest.raises(ConfigError, match=f"^{said}"):
        simulate(config(photos, **given_values), photos)


@pytest.mark.parametrize(
    ("candidates", "labels", "said"),
    [
        ([[0, 9]], [[0]], "client a, row 0: a candidate is not in the catalogue"),
        ([[1]], [[0]], "client a, row 0: fewer than two candidates"),
        ([[0, 1]], [[2]], "client a, row 0: a label is no place among the candidates"),
        (None, [[0]], "over a catalogue every row has candidates"),
    ],
    ids=str,
)
def test_lists_that_do_not_fit_are_refused_by_client_and_row(tmp_path, candidates, labels, said):
    rows = None if candidates is None else Ragged.from_rows(candidates)
    with (
        DatasetWriter(
            tmp_path / "out", name="x", kind="dense", shape=(1,), catalogue=Catalogue(np.eye(3))
        ) as writer,
        pytest.raises(DataError, match=said),
    ):
        writer.add_many(["a"], np.zeros((1, 1)), Ragged.from_rows(labels), candidates=rows)


def test_a_catalogue_is_described_and_what_it_cannot_do_yet_is_said(photos):
    described = describe(photos)
    assert (
        f"catalogue: {len(photos.train.catalogue):,} items with dense features of shape 16"
        in described
    )
    with pytest.raises(DataError, match="gallery: has candidates; statistics are about fixed"):
        next(iter(statistics_of(photos)))


def test_a_score_that_is_not_finite_names_its_decision_not_its_place_in_a_block():
    model, layout, weights = linear()
    contexts = decisions([2, 4, 3, 4])
    contexts.candidates.features[contexts.candidates.bounds[3]] = np.inf
    actor = Actor(make_predictor(model, layout, light=True), weights, Softmax(0.2))
    with np.errstate(all="ignore"), pytest.raises(NotFinite) as found:
        actor.choose(contexts, np.full(4, 0.5))
    assert found.value.row == 3
