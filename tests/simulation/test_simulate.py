"""Running a simulation from Python: rounds and arrays, pre-trained models, baselines, divergence, and learning."""

import importlib
import sys
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from core_samples import ROUNDS, config, easy, images, played, text

from fedbandit.assembly.experiment import build_experiment
from fedbandit.core.errors import ConfigError, DataError, Diverged
from fedbandit.engines import ThreadEngine
from fedbandit.federated.cohorts import FixedCohorts
from fedbandit.federated.state import load_state, save_state
from fedbandit.simulation import simulate

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture
def pretrained(tmp_path, monkeypatch):
    """The folder of pre-trained models, empty at first."""
    monkeypatch.setenv("FEDBANDIT_CACHE", str(tmp_path))
    return tmp_path / "pretrained"


# --- rounds and arrays ---


def test_an_engine_of_its_own_is_closed_after_the_last_round_and_by_with():
    for play in (list, lambda simulation: simulation.collect()):
        simulation = simulate(config(), text())
        play(simulation)
        assert simulation.engine._pool._shutdown
    with simulate(config(), text()) as simulation:
        next(iter(simulation))
        assert not simulation.engine._pool._shutdown  # one who stops can go on
        next(iter(simulation))
    assert simulation.engine._pool._shutdown


def test_an_engine_that_was_given_stays_open():
    engine = ThreadEngine(1)
    with simulate(config(), text(), engine=engine) as simulation:
        list(simulation)
    list(simulate(config(), text(), engine=engine))
    engine.close()


def test_iterating_gives_every_round():
    simulation = simulate(config(), text())
    numbers = [metrics["round"] for metrics in simulation]
    assert numbers == list(range(1, ROUNDS + 1))
    assert simulation.state.round == ROUNDS
    assert list(simulation) == []  # finished


def test_collecting_gives_the_same_as_arrays():
    rounds = list(simulate(config(), text()))
    arrays = simulate(config(), text()).collect()
    for name in (
        "round",
        "reward",
        "running_reward",
        "propensity",
        "events",
        "clip_norm",
        "update_norm",
    ):
        assert arrays[name].shape == (ROUNDS,)
        np.testing.assert_array_equal(arrays[name], [metrics[name] for metrics in rounds])


def test_what_a_round_reports():
    rounds = list(simulate(config(), images()))
    rewards = [metrics["reward"] for metrics in rounds]
    for t, metrics in enumerate(rounds, start=1):
        assert metrics["running_reward"] == pytest.approx(np.mean(rewards[:t]))
        assert metrics["clients"] == 6
        assert metrics["model_version"] == (t - 1) // 2
        assert metrics["rejected"] == []
        spread = metrics["client_reward"]
        assert (
            spread["worst_decile"]
            <= spread["p25"]
            <= spread["p50"]
            <= spread["p75"]
            <= spread["p90"]
        )


def test_a_run_can_go_on_from_a_saved_state(tmp_path):
    """In memory or through a file: the same bits as without a break, optimiser, clip norm and averages included."""
    chosen, dataset = config(mode="population", population__pull_probability=0.5, rounds=8), text()
    expected, uninterrupted = played(chosen, dataset)
    simulation = simulate(chosen, dataset)
    first = list(islice(simulation, 5))
    save_state(simulation.state, tmp_path / "state.safetensors")
    rest, resumed = played(chosen, dataset, state=load_state(tmp_path / "state.safetensors"))
    assert first + rest == expected
    assert resumed.state.weights.tobytes() == uninterrupted.state.weights.tobytes()


def test_a_damaged_state_is_refused(tmp_path):
    path = tmp_path / "state.safetensors"
    save_state(simulate(config(), text()).state, path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match="damaged checkpoint"):
        load_state(path)


def test_held_out_accuracy_is_reported_at_deployments_and_at_the_end():
    dataset = easy()
    dataset = replace(dataset, test=dataset.train)
    rounds = list(simulate(config(client__learning_rate=2.0, server__learning_rate=0.5), dataset))
    reported = [metrics["round"] for metrics in rounds if "test_accuracy" in metrics]
    assert reported == [2, 4, 5]
    every_round = list(simulate(config(evaluate_every=1), dataset))
    assert all(0 <= metrics["test_accuracy"] <= 1 for metrics in every_round)


def test_held_out_recall_of_several_labels():
    dataset = text()
    rounds = list(simulate(config(), replace(dataset, test=dataset.train)))
    assert 0 < rounds[-1]["test_recall_at_5"] <= 1


# --- cohorts ---


def test_cohorts_are_drawn_without_replacement_from_their_pool():
    cohorts = FixedCohorts(range(10, 30), 8, seed=1)
    drawn = [cohorts.draw(t) for t in range(1, 200)]
    assert all(len(set(cohort.tolist())) == 8 for cohort in drawn)
    assert set(np.concatenate(drawn).tolist()) == set(range(10, 30))
    np.testing.assert_array_equal(cohorts.draw(5), drawn[4])
    assert (drawn[0] != drawn[1]).any()


def test_initial_clients_stay_out_of_the_bandit_phase():
    experiment = build_experiment(config(scenario="init"), text())
    assert experiment.pretraining.cohorts.pool == range(6)
    assert experiment.bandit.cohorts.pool == range(6, 13)
    assert build_experiment(config(), text()).bandit.cohorts.pool == range(13)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clients_per_round": 14}, "clients_per_round: 14 is more than the 13 clients"),
        (
            {"clients_per_round": 8, "scenario": "init", "pretraining__clients": 8},
            "8 of the 13 clients .* leave 5",
        ),
        ({"clients_per_round": 7, "scenario": "init"}, "more than the 6 pre-training clients"),
        (
            {"scenario": "init", "pretraining__clients": 50},
            "pretraining.clients: 50 of the 13 clients",
        ),
        ({"scenario": "init-shit"}, "did you mean init-shift"),
        ({"scenario": "init-shift", "objective__name": "cross-entropy"}, r"rewards in \[0, 1\]"),
        ({"policy__name": "softmax", "policy__beta": -1.0}, "policy.beta must be positive"),
        ({"policy__name": "softmax", "policy__gamma": 1.0}, "policy.gamma: unknown key"),
        ({"server__optimizer": "adan"}, "did you mean adam"),
    ],
)
def test_parts_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        build_experiment(config(**settings), text())


# --- pre-trained models ---


def kept_files(folder):
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}


def test_a_pretrained_model_is_kept_and_shared(pretrained):
    dataset = text()
    first = simulate(config(scenario="init"), dataset)
    kept = kept_files(pretrained)
    assert len(kept) == 1
    for settings in (
        {},
        {"seed": 9},
        {"policy__name": "greedy"},
        {"rounds": 2, "deploy_every": 1},
        {"mode": "population"},
    ):
        again = simulate(config(scenario="init", **settings), dataset)
        np.testing.assert_array_equal(again.state.weights, first.state.weights)
        assert kept_files(pretrained) == kept


def test_with_rates_of_its_own_a_pretrained_model_is_shared_across_rates(pretrained):
    dataset = text()
    own = {
        "scenario": "init",
        "pretraining__client_learning_rate": 0.5,
        "pretraining__server_learning_rate": 0.05,
    }
    simulate(config(**own), dataset)
    kept = kept_files(pretrained)
    simulate(config(**own, client__learning_rate=0.9, server__learning_rate=0.2), dataset)
    assert kept_files(pretrained) == kept


@pytest.mark.parametrize(
    "settings",
    [
        {"pretraining__seed": 1},
        {"pretraining__rounds": 4},
        {"client__learning_rate": 0.4},
        {"client__max_examples": 3},
        {"server__optimizer": "sgd"},
        {"pretraining__server_optimizer": "sgd"},
        {"pretraining__objective": "full-information-cross-entropy"},
        {"scenario": "init-shift"},
        {"clipping__norm": 0.01},
        {"clients_per_round": 5},
        {"pretraining__reduction": "half-sum"},
    ],
    ids=str,
)
def test_another_pretraining_is_another_model(pretrained, settings):
    dataset = text()
    first = simulate(config(scenario="init"), dataset)
    other = simulate(config(**{"scenario": "init", **settings}), dataset)
    assert len(kept_files(pretrained)) == 2
    assert (first.state.weights != other.state.weights).any()


def test_another_data_set_or_precision_is_another_model(pretrained):
    simulate(config(scenario="init"), text(0))
    simulate(config(scenario="init"), text(1))
    simulate(config(scenario="init", dtype="float32"), text(0))
    assert len(kept_files(pretrained)) == 3


def test_a_model_of_ones_own_that_was_changed_is_another_model(pretrained, tmp_path, monkeypatch):
    """Its name has stayed, and so have its shapes and what it starts from."""
    monkeypatch.chdir(tmp_path)
    weights = []
    for factor in (1.0, 0.5):
        monkeypatch.delitem(sys.modules, "changing_model", raising=False)
        importlib.invalidate_caches()
        (tmp_path / "changing_model.py").write_text(
            "import numpy as np\n"
            "from fedbandit import Model\n"
            "def mine(spec):\n"
            "    size = int(np.prod(spec.shape))\n"
            "    init = lambda seed: {'w': np.zeros((size, spec.num_actions))}\n"
            f"    return Model(init, lambda params, x: {factor} * (x.reshape(len(x), -1) @ params['w']))\n"
        )
        chosen = config(scenario="init", model__name="changing_model:mine", policy__name="greedy")
        weights.append(simulate(chosen, images()).state.weights)
    assert len(kept_files(pretrained)) == 2
    assert (weights[0] != weights[1]).any()


def test_data_that_does_not_say_what_it_is_shares_no_pretrained_model(pretrained):
    nameless = [
        replace(data, header=replace(data.header, fingerprint="")) for data in (text(0), text(1))
    ]
    first, other = (simulate(config(scenario="init"), data).state.weights for data in nameless)
    assert (first != other).any()
    assert not pretrained.exists()


def test_a_damaged_pretrained_model_is_made_again(pretrained):
    dataset = text()
    first = simulate(config(scenario="init"), dataset)
    (path,) = pretrained.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    again = simulate(config(scenario="init"), dataset)
    np.testing.assert_array_equal(again.state.weights, first.state.weights)
    np.testing.assert_array_equal(load_state(path).weights, first.state.weights)


def test_the_bandit_phase_starts_afresh_after_pretraining(pretrained):
    state = simulate(config(scenario="init", clipping__initial=0.7), text()).state
    assert (state.round, state.clip_norm, state.running_reward) == (0, 0.7, None)
    assert not any(np.any(value) for name, value in state.server_state.items() if name != "weights")
    np.testing.assert_array_equal(state.deployed[0].weights, state.weights)


# --- baselines, divergence, learning ---


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "momentum", "adagrad", "yogi"])
@pytest.mark.parametrize("data", [text, images])
def test_the_baseline_leaves_the_weights_as_they_are(data, optimizer):
    chosen = config(
        scenario="init", training=False, policy__name="greedy", server__optimizer=optimizer
    )
    simulation = simulate(chosen, data())
    before = simulation.state.weights.copy()
    rounds = list(simulation)
    np.testing.assert_array_equal(simulation.state.weights, before)
    for weights in (version.weights for version in simulation.state.deployed.values()):
        np.testing.assert_array_equal(weights, before)
    assert {metrics["events"] > 0 for metrics in rounds} == {True}


def test_noise_does_not_move_a_baseline():
    private = {
        "privacy__mechanism": "dp-fedavg",
        "privacy__noise_multiplier": 1.0,
        "privacy__delta": 1e-3,
    }
    simulation = simulate(config(training=False, clipping__norm=0.5, **private), text())
    before = simulation.state.weights.copy()
    assert list(simulation)[-1]["update_norm"] > 0
    np.testing.assert_array_equal(simulation.state.weights, before)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("deploy_every", [1, 1000])
@pytest.mark.parametrize(
    "settings",
    [
        {"client__learning_rate": 1e12, "client__epochs": 5},
        {"server__learning_rate": 1e30},
    ],
    ids=["client", "server"],
)
@pytest.mark.parametrize(("data", "model"), [(text, "linear"), (images, "linear"), (images, "mlp")])
def test_a_diverged_run_says_so(data, model, settings, deploy_every, dtype):
    settings = {
        "server__optimizer": "sgd",
        "clipping__enabled": False,
        **settings,
        "model__name": model,
    }
    chosen = config(
        rounds=60, deploy_every=deploy_every, client__batch_size=2, dtype=dtype, **settings
    )
    with pytest.raises(Diverged, match=r"^diverged at round \d+: "):
        list(simulate(chosen, data()))


def test_scores_that_overflow_are_divergence_and_name_the_client():
    dataset = images()
    experiment = build_experiment(config(dtype="float32", model__name="mlp"), dataset)
    state = experiment.bandit.start(np.full(experiment.layout.size, 1e30, np.float32))
    with pytest.raises(
        Diverged, match=r"^diverged at round 1: the scores of client c\d+ are not finite"
    ):
        list(simulate(config(dtype="float32", model__name="mlp"), dataset, state=state))


def test_a_few_clients_that_leave_the_finite_numbers_are_rejected_by_name():
    """One client's contexts are huge: its update overflows, the others' do not."""
    dataset = images()
    features = dataset.train.features.copy()
    begin, end = dataset.train.offsets[2:4]
    features[begin:end] *= np.float32(1e30)
    dataset = replace(dataset, train=replace(dataset.train, features=features))
    settings = {
        "model__name": "mlp",
        "model__hidden": 4,
        "clients_per_round": 12,
        "rounds": 1,
        "dtype": "float32",
    }
    (metrics,) = list(simulate(config(policy__name="greedy", **settings), dataset))
    assert metrics["rejected"] == ["c002"]
    assert np.isfinite(metrics["update_norm"])


@pytest.mark.parametrize("policy", ["softmax", "epsilon-greedy", "falcon"])
def test_an_easy_problem_is_learned(policy):
    """Four actions a linear model can tell apart: chance before the first deployment, more than twice that after."""
    parameters = {
        "softmax": {"beta": 0.1},
        "epsilon-greedy": {"epsilon": 0.1},
        "falcon": {"mu": 4.0, "gamma": 50.0},
    }
    settings = {f"policy__{key}": value for key, value in parameters[policy].items()}
    chosen = config(
        policy__name=policy,
        **settings,
        rounds=40,
        deploy_every=8,
        clients_per_round=8,
        dtype="float32",
        client__batch_size=16,
        client__learning_rate=2.0,
        server__learning_rate=0.05,
    )
    arrays = simulate(chosen, easy()).collect()
    by_period = arrays["reward"].reshape(5, 8).mean(axis=1)
    assert by_period[0] == pytest.approx(0.25, abs=0.1)
    assert (by_period[1:] > 0.5).all()


def test_an_engine_of_ones_own_is_used():
    class Counting(ThreadEngine):
        chunks = 0

        def run(self, work, chunks, broadcast, memory=None):
            self.chunks += len(chunks)
            yield from super().run(work, chunks, broadcast, memory)

    engine = Counting(1)
    list(simulate(config(), text(), engine=engine))
    assert engine.chunks > ROUNDS


def test_a_model_that_stays_is_evaluated_once(monkeypatch):
    module = importlib.import_module("fedbandit.simulation")
    evaluated = []
    found = module.held_out_metrics
    monkeypatch.setattr(
        module, "held_out_metrics", lambda *given: evaluated.append(given) or found(*given)
    )
    data = replace(text(), test=text(1).train)
    rounds = simulate(config(scenario="init", training=False, evaluate_every=1), data).collect()
    assert len(evaluated) == 1
    assert len(rounds["test_recall_at_5"]) == ROUNDS
    simulate(config(evaluate_every=1), data).collect()
    assert len(evaluated) == 1 + ROUNDS
