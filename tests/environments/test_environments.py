"""Worlds: what they pay is fixed by the event and the item, and its mean is what they expect."""

import json
from dataclasses import replace

import numpy as np
import pytest
from builders import random_images, random_text
from core_samples import config, easy, met_with, played, text

from fedbandit.assembly.experiment import build_experiment
from fedbandit.config import Config
from fedbandit.core.contexts import Candidates, Contexts, ItemSpec
from fedbandit.core.errors import ConfigError
from fedbandit.core.ragged import Ragged
from fedbandit.core.randomness import Purpose, generator
from fedbandit.environments import (
    BUILT_IN,
    Bernoulli,
    Liked,
    Linear,
    Met,
    Preferences,
    Renamed,
    Scenario,
    Stage,
    changed_like,
    exact_match,
    per_label,
)
from fedbandit.evaluation.metrics import expected_rewards
from fedbandit.federated.state import Version
from fedbandit.runs.run import run
from fedbandit.simulation import simulate

DATA = {"text": random_text(), "images": random_images()}
WORLDS = [name for name in BUILT_IN if name != "stated"]  # which needs data of its own: test_coba
NAMES = [name for name in WORLDS if name != "labels"]


def world(name, header, **parameters):
    labels = per_label(np.linspace(0.1, 0.9, header.num_actions))
    return BUILT_IN[name](labels, header, **parameters)


def many_times(dataset, rows, times):
    """The same examples met at each of many times."""
    k = dataset.header.num_actions
    met = Met.at_rows(dataset.train, np.repeat(rows, times), k)
    return replace(met, times=np.tile(np.arange(1, times + 1), len(rows)))


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", WORLDS)
def test_the_mean_of_many_rewards_is_what_is_expected(name, data):
    dataset, times = DATA[data], 4000
    k = dataset.header.num_actions
    environment = world(name, dataset.header)
    for row in (0, 7):
        met = many_times(dataset, np.array([row]), times)
        expected = environment.expected(met)[0]
        for action in range(k):
            paid = environment.rewards(met, np.full(times, action))
            assert paid.dtype == np.float32
            error = 4 * paid.std() / np.sqrt(times) + 1e-6
            assert paid.mean() == pytest.approx(expected[action], abs=error)


@pytest.mark.parametrize("name", WORLDS)
def test_a_reward_is_fixed_by_its_event_whatever_else_is_asked(name):
    dataset = DATA["text"]
    environment = world(name, dataset.header)
    met = many_times(dataset, np.arange(40), 3)
    actions = np.random.default_rng(0).integers(0, dataset.header.num_actions, len(met))
    whole = environment.rewards(met, actions)
    np.testing.assert_array_equal(environment.rewards(met, actions), whole)
    some = np.array([100, 3, 57])
    np.testing.assert_array_equal(environment.rewards(met.take(some), actions[some]), whole[some])
    others = (actions + 1) % dataset.header.num_actions  # of all events but one
    others[57] = actions[57]
    assert environment.rewards(met, others)[57] == whole[57]
    if name != "labels":
        assert (environment.rewards(replace(met, seed=1), actions) != whole).any()


def test_draws_differ_by_purpose_and_every_part_of_the_address():
    dataset = DATA["text"]
    met = Met.at_rows(dataset.train, np.zeros(20000, int), 6)
    met = replace(met, positions=np.arange(20000))
    items = np.zeros(20000, int)
    click = met.uniforms("click", items)
    changes = {
        "purpose": met.uniforms("noise", items),
        "items": met.uniforms("click", items + 1),
        **{
            name: replace(met, **{name: getattr(met, name) + 1}).uniforms("click", items)
            for name in ("seed", "times", "clients")
        },
    }
    for name, other in changes.items():
        assert abs(np.corrcoef(click, other)[0, 1]) < 4 / np.sqrt(20000), name
    normal = met.normals("noise", items)
    assert normal.mean() == pytest.approx(0, abs=4 / np.sqrt(20000))
    assert normal.std() == pytest.approx(1, abs=4 / np.sqrt(40000))
    np.testing.assert_allclose(
        np.mean(normal[:, None] < [-1, 0, 1.96], axis=0), [0.1587, 0.5, 0.975], atol=0.015
    )


def test_clicks_of_a_table_above_one_are_divided_by_its_highest_value():
    met = met_with(Ragged.from_rows([[0], [1]]), 2)
    clicks = Bernoulli(per_label(np.array([1.0, 4.0])))
    np.testing.assert_allclose(clicks.expected(met), [[0.25, 0], [0, 1]])
    assert "divided by 4" in clicks.note
    assert Bernoulli(exact_match(2)).note is None
    with pytest.raises(ValueError, match="least"):
        Bernoulli(exact_match(2), least=0.5, most=0.2)


def test_changes_are_laid_over_any_environment():
    header = DATA["text"].header
    met = Met.at_rows(DATA["text"].train, np.arange(10), header.num_actions)
    source = world("logistic", header)
    roles = np.roll(np.arange(header.num_actions), 1)
    labels = Renamed(Liked(exact_match(6), np.full((2, 6), 0.5, np.float32)), roles)
    moved = changed_like(labels, source)
    np.testing.assert_allclose(moved.expected(met), 0.5 * source.expected(met)[:, roles])
    actions = np.arange(10) % 6
    np.testing.assert_array_equal(
        moved.rewards(met, actions), 0.5 * source.rewards(met, roles[actions])
    )
    assert changed_like(exact_match(6), source) is source


@pytest.mark.parametrize("kind", ["permute", "appear", "rotate"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["simple", "population"])
def test_every_world_drifts(name, kind, mode):
    def rewards(at):
        chosen = config(
            scenario="drift",
            rounds=12,
            mode=mode,
            drift__kind=kind,
            drift__at=[at],
            drift__fraction=1.0,
            environment__name=name,
        )
        return simulate(chosen, text()).collect()["reward"]

    early, late = rewards(5), rewards(13)
    np.testing.assert_array_equal(early[:4], late[:4])
    assert (early[4:] != late[4:]).any()


def _act(experiment, round_number):
    from fedbandit.federated.clients import Broadcast

    weights = experiment.initial_weights()
    deployed = {version: Version(weights) for version in range(20)}
    everybody = np.arange(experiment.dataset.train.num_clients)
    sent = Broadcast(round_number, {"weights": weights}, deployed, 1.0)
    return experiment.bandit.work.act(everybody, sent)


@pytest.mark.parametrize("kind", ["permute", "appear", "rotate"])
def test_cached_events_are_paid_by_the_world_of_their_own_time(kind):
    """What a client logged before a change is the same when it is trained on after it."""
    chosen = config(
        scenario="drift", mode="population", rounds=12, drift__kind=kind, drift__at=[5],
        population__events_per_period=5, population__cache_size=20,
    )  # fmt: skip
    experiment = build_experiment(chosen, text())
    work = experiment.bandit.work
    everybody = np.arange(experiment.dataset.train.num_clients)
    before, after = _act(experiment, 4), _act(experiment, 6)  # periods 1 and 2
    old, new = (work.plan.visits(work.split, everybody, number) for number in (4, 6))
    assert set(new.rounds.tolist()) == {1, 3, 5}

    def logged(events, visits):
        keys = zip(visits.clients, visits.times, visits.positions, strict=True)
        return {
            tuple(map(int, key)): (int(a), float(r), float(p))
            for key, a, r, p in zip(
                keys, events.actions, events.rewards, events.propensities, strict=True
            )
        }

    then, now = logged(before, old), logged(after, new)
    assert then.keys() < now.keys()
    assert all(now[key] == then[key] for key in then)
    if kind == "appear":
        masks = [stage.available for stage in experiment.bandit.scenario.stages]
        exist = np.where((new.rounds < 5)[:, None], *masks)
        np.testing.assert_array_equal(after.available, exist)
        assert exist[np.arange(len(after)), after.actions].all()
        assert not masks[0][after.actions[new.rounds >= 5]].all()


def test_missing_rewards_are_neither_trained_on_nor_averaged_and_are_counted():
    dataset = easy(clients=40, per_client=50)
    plain, some = (
        build_experiment(config(environment__missing=rate), dataset) for rate in (0.0, 0.3)
    )
    whole, seen = _act(plain, 1), _act(some, 1)
    assert whole.missing is None
    assert len(seen) + seen.missing.sum() == len(whole)
    assert seen.missing.sum() / len(whole) == pytest.approx(0.3, abs=4 * np.sqrt(0.21 / 2000))
    assert seen.bounds[-1] == len(seen) == len(seen.contexts)
    first, mine = whole.of_client(0), seen.of_client(0)
    assert len(mine) + mine.missing[0] == len(first)
    kept = [any((x == y).all() for y in mine.contexts.shared) for x in first.contexts.shared]
    np.testing.assert_array_equal(first.where(np.array(kept)).actions, mine.actions)
    rounds, _ = played(config(environment__missing=0.3), dataset)
    everything, _ = played(config(), dataset)
    for line, all_of_it in zip(rounds, everything, strict=True):
        assert line["events"] + line["missing"] == all_of_it["events"]
        assert "missing" not in all_of_it


def test_an_environment_of_a_users_own_says_whose_reward_arrives():
    class Shy(Linear):
        def observed(self, met, actions):
            return actions != 0

    dataset = text()
    experiment = build_experiment(config(), dataset)
    work = replace(
        experiment.bandit.work,
        world=Scenario((Stage(Shy(np.zeros((dataset.header.shape[0], 6)))),)),
    )
    events = _act(replace(experiment, bandit=replace(experiment.bandit, work=work)), 1)
    assert (events.actions != 0).all()
    assert events.missing.sum() > 0


def test_delayed_rewards_are_learned_from_when_they_arrive():
    """With a delay of one period, training in a period is as without delay in the one before."""
    living = {"mode": "population", "population__events_per_period": 4, "rounds": 6}
    at_once, late = (
        build_experiment(config(**living, environment__delay=delay), text()) for delay in (0, 1)
    )
    first, second = _act(late, 1), _act(late, 3)
    assert len(first) == 0
    assert second.fresh.all()
    expected = _act(at_once, 1)
    for name in ("bounds", "actions", "rewards", "fresh"):
        np.testing.assert_array_equal(getattr(second, name), getattr(expected, name))
    third = _act(late, 5)
    assert 0 < third.fresh.sum() < len(third)
    rounds, _ = played(config(**living, environment__delay=1), text())
    assert [line["reward"] is None for line in rounds] == [True, True, *[False] * 4]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"environment__delay": 1},
            r"^environment\.delay: 1 periods, but .* of 1; population mode",
        ),
        (
            {"environment__delay": 4, "mode": "population"},
            r"^environment\.delay: 4 .* events of 4;",
        ),
        ({"environment__name": "linear", "objective__name": "cross-entropy"}, "cross-entropy"),
        ({"environment__name": "linear", "environment__noise": "much"}, r"environment\.noise"),
        ({"environment__name": "nowhere:World"}, r"environment\.name: cannot import nowhere"),
        ({"environment__name": "builtins:dict"}, r"environment\.name|environment: "),
    ],
)
def test_worlds_that_cannot_be_are_refused_in_one_line(settings, message):
    with pytest.raises(ConfigError, match=message) as refused:
        build_experiment(config(**settings), text())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "settings",
    [{"environment.nois": 1.0, "environment.name": "linear"}, {"environment.name": "linaer"}],
    ids=str,
)
def test_misspelt_keys_are_refused_when_they_are_set(settings):
    with pytest.raises(ConfigError, match="did you mean"):
        Config().with_values(settings)


WRONG = """
import numpy as np

class Base:
    def __init__(self, labels, header):
        self.labels = labels
    def rewards(self, met, actions):
        return self.labels.rewards(met, actions)
    def expected(self, met):
        return self.labels.expected(met)

class Short(Base):
    def rewards(self, met, actions):
        return np.zeros(len(met) + 1)

class Endless(Base):
    def rewards(self, met, actions):
        return np.full(len(met), np.inf)

class Secret(Base):
    def expected(self, met):
        return None

class Raises(Base):
    def rewards(self, met, actions):
        return met.nothing

class Deaf:
    def __init__(self, labels, header):
        pass
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Short", r"environment\.name: Short\.rewards gave numbers that are shape"),
        ("Endless", r"Endless\.rewards gave numbers that are not finite"),
        ("Secret", "environment.name: Secret cannot pay: .*needs expected rewards"),
        ("Raises", "environment.name: Raises cannot pay"),
        ("Deaf", "environment.name: Deaf has no method `rewards`"),
    ],
)
def test_mistakes_of_a_users_own_environment_show_before_round_1(
    name, message, tmp_path, monkeypatch
):
    (tmp_path / "wrong_worlds.py").write_text(WRONG)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        build_experiment(config(scenario="init", environment__name=f"wrong_worlds:{name}"), text())


@pytest.mark.parametrize("name", NAMES)
def test_learning_beats_chance_in_every_world(name):
    """A linear model learns most of what context or popularity tell."""
    settings = {
        "scenario": "scratch", "rounds": 60, "deploy_every": 5, "clients_per_round": 10,
        "client": {"learning_rate": 0.3}, "server": {"learning_rate": 0.05},
        "environment": {"name": name}, "policy": {"name": "epsilon-greedy", "epsilon": 0.2},
    }  # fmt: skip
    rewards = simulate(Config.build(settings), easy(60, 20)).collect()["reward"]
    assert rewards[-15:].mean() > rewards[:5].mean() + 0.02


def test_regret_is_exact_and_falls_to_what_exploration_costs():
    """Of ε-greedy in a world that its model can represent: ε times what a random action loses."""
    dataset = easy(60, 20)
    settings = {
        "scenario": "scratch", "rounds": 150, "deploy_every": 5, "clients_per_round": 20,
        "client": {"learning_rate": 0.3}, "server": {"learning_rate": 0.05},
        "environment": {"name": "linear"}, "policy": {"name": "epsilon-greedy", "epsilon": 0.2},
    }  # fmt: skip
    simulation = simulate(Config.build(settings), dataset)
    work = simulation.experiment.bandit.work
    regret = simulation.collect()["regret"]
    truth = expected_rewards(dataset.train, work.world, 4)(np.arange(1200))
    random = float((truth.max(axis=1) - truth.mean(axis=1)).mean())
    assert regret[0] == pytest.approx(random, rel=0.25)  # before it has learned anything
    assert 0.15 * random < regret[-20:].mean() < 0.35 * random


def test_regret_counts_only_actions_that_exist():
    chosen = config(scenario="drift", drift__kind="appear", drift__at=[4],
                    environment__name="linear", policy__name="greedy")  # fmt: skip
    experiment = build_experiment(chosen, text())
    stage = experiment.bandit.scenario.stage(1)
    world, split = experiment.bandit.work.world, experiment.dataset.train
    met = Met.at_rows(split, np.arange(30), 6)
    means = np.where(stage.available, stage.environment.expected(met), -np.inf)
    assert world.regret(met, means.argmax(axis=1)).max() == 0
    assert "regret" not in played(config(), text())[0][0]


def test_candidates_are_paid_by_their_item_wherever_it_stands_in_the_list():
    """The same item shown at another place, or among others, pays and is expected to pay the same."""
    lists = [[4, 9, 2], [7, 4], [2, 3, 4, 9]]
    worlds = Preferences(seed=3)

    def met(lists):
        shown = [item for items in lists for item in items]
        bounds = np.cumsum([0, *map(len, lists)])
        candidates = Candidates(bounds, np.array(shown), np.zeros((len(shown), 1)))
        plain = met_with(Ragged.from_rows([[] for _ in lists]), 0)
        return replace(plain, contexts=Contexts(np.zeros((len(lists), 1)), candidates))

    forward, backward = met(lists), met([items[::-1] for items in lists])
    places = np.array([0, 1, 2])  # item 4 of each
    mirrored = np.array([2, 0, 1])
    np.testing.assert_array_equal(forward.items(places), [4, 4, 4])
    np.testing.assert_array_equal(
        worlds.rewards(forward, places), worlds.rewards(backward, mirrored)
    )
    every = forward.uniforms("click", forward.items())
    assert len(every) == 9
    np.testing.assert_array_equal(
        forward.chosen(every, places), backward.uniforms("click", backward.items(mirrored))
    )
    world = Scenario((Stage(worlds), Stage(worlds, from_round=2)))
    later = replace(forward, times=np.array([1, 2, 1]))
    means = world.expected(later)
    np.testing.assert_array_equal(means, worlds.expected(forward))
    regret = world.regret(later, places)
    split = np.split(means.astype(float), [3, 5])
    np.testing.assert_allclose(regret, [m.max() - m[p] for m, p in zip(split, places, strict=True)])


class Shy:
    """Never tells the reward of action 0."""

    def __init__(self, labels, header):
        self.rewards, self.expected = labels.rewards, labels.expected

    def observed(self, met, actions):
        return actions != 0


def test_what_is_laid_over_an_environment_keeps_what_it_does_not_observe():
    header = DATA["text"].header
    met = Met.at_rows(DATA["text"].train, np.arange(12), 6)
    actions = np.arange(12) % 6
    shy, roles = Shy(exact_match(6), header), np.roll(np.arange(6), 1)
    layers = [Bernoulli(shy), Liked(shy, np.ones((2, 6), np.float32)), Renamed(shy, roles)]
    for layer, hidden in zip(layers, (0, 0, 1), strict=True):
        seen = Scenario((Stage(layer),)).observed(met, actions)
        np.testing.assert_array_equal(seen, actions != hidden)
    assert Scenario((Stage(Bernoulli(exact_match(6))),)).observed(met, actions) is None


@pytest.mark.parametrize("starts", [(2,), (1, 9, 4), ()], ids=str)
def test_stages_begin_with_the_first_round_and_ascend(starts):
    with pytest.raises(ValueError, match="stages: "):
        Scenario(tuple(Stage(exact_match(2), from_round=start) for start in starts))


def test_the_summary_of_a_run_says_what_was_divided(tmp_path):
    shifted = {"scenario": "init-shift", "environment__name": "bernoulli"}
    for name, settings in (("plain", {}), ("clicks", shifted)):
        run(config(**settings), tmp_path / name, dataset=text())
    plain, clicks = (
        json.loads((tmp_path / name / "summary.json").read_text()) for name in ("plain", "clicks")
    )
    assert "environment" not in plain
    highest = max(text().header.frequencies) / min(text().header.frequencies)
    assert f"divided by {highest:g}, the highest" in clicks["environment"]["note"]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", NAMES)
def test_events_of_a_whole_round_are_paid_as_its_chunks_were(name, data):
    found = []

    def keep(state, events, metrics):
        one = events()
        found.append((metrics["reward"], one.rewards[one.fresh].mean(dtype=float)))

    chosen = config(environment__name=name, environment__missing=0.1)
    simulate(chosen, DATA[data], callbacks=[keep]).collect()
    ours, again = np.array(found).T
    np.testing.assert_allclose(ours, again, rtol=0, atol=1e-12)


def test_a_table_pays_the_candidate_whose_place_is_the_label():
    """Labels are places in a decision's own list, as actions are; items have other numbers."""
    candidates = Candidates(np.array([0, 3, 5]), np.array([4, 9, 2, 0, 1]), np.zeros((5, 1)))
    met = replace(
        met_with(Ragged.from_rows([[1], [0]]), 3), contexts=Contexts(np.zeros((2, 1)), candidates)
    )
    table = exact_match(3)
    np.testing.assert_array_equal(table.expected(met), [0, 1, 0, 1, 0])
    for actions in ([0, 0], [1, 1], [2, 0], [1, 0]):
        np.testing.assert_array_equal(
            table.rewards(met, np.array(actions)),
            met.chosen(table.expected(met), np.array(actions)),
        )


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("name", ["linear", "logistic"])
def test_over_candidates_one_theta_meets_the_features_of_items(name, kind):
    features = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    rows = Ragged(np.arange(6) * 3, np.tile(np.arange(3), 5), features.reshape(-1))
    shown = Candidates(np.array([0, 3, 5]), np.arange(5), features if kind == "dense" else rows)
    met = replace(
        met_with(Ragged.from_rows([[], []]), 3), contexts=Contexts(np.zeros((2, 1)), shown)
    )
    header = replace(DATA["text"].header, items=ItemSpec(kind, (3,), shown=2.5, most=3))
    world = BUILT_IN[name](exact_match(3), header, strength=1.0)
    theta = generator(0, Purpose.WORLD).standard_normal((3, 1))[:, 0]
    products = features @ theta / np.linalg.norm(features, axis=1)
    means = 0.5 + products if name == "linear" else 1 / (1 + np.exp(1 - products))
    np.testing.assert_allclose(world.expected(met), means, rtol=1e-5)
    many = met.take(np.zeros(4000, int))
    many = replace(many, times=np.arange(4000))
    paid = world.rewards(many, np.full(4000, 2))
    assert paid.mean() == pytest.approx(means[2], abs=4 * paid.std() / np.sqrt(4000))
