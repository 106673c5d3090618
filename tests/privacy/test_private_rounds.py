"""Private rounds from end to end: what is logged, clipped, left out, resumed and stopped."""

import json
from dataclasses import replace

import numpy as np
import pytest
from builders import dataset_in_memory, random_images, random_text

from fedbandit.algorithms import FedAvg
from fedbandit.assembly.experiment import build_experiment
from fedbandit.assembly.privacy import build_ledger
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError, Diverged
from fedbandit.core.process import Stopwatch
from fedbandit.engines import ThreadEngine
from fedbandit.federated.learners.base import AutogradLearner
from fedbandit.federated.pipeline import AdaptiveClipping, Contribution
from fedbandit.federated.round import run_round
from fedbandit.federated.state import Version
from fedbandit.privacy.accounting import Ledger
from fedbandit.privacy.noise import DrawnOnce, PrivateMean, SimulatedNoise
from fedbandit.privacy.plan import PrivacyPlan
from fedbandit.privacy.reporting import summary
from fedbandit.simulation import simulate

MECHANISMS = {
    "dp-fedavg": {"mechanism": "dp-fedavg", "noise_multiplier": 0.8},
    "fixed cohorts": {"mechanism": "dp-fedavg", "noise_multiplier": 0.8, "sampling": "fixed"},
    "dp-ftrl": {"mechanism": "dp-ftrl", "noise_multiplier": 0.8},
    "restarted": {"mechanism": "dp-ftrl", "noise_multiplier": 0.8, "restart_at_deployments": True},
    "banded-mf": {"mechanism": "banded-mf", "noise_multiplier": 0.8},
    "amplified": {
        "mechanism": "banded-mf",
        "noise_multiplier": 0.8,
        "sampling": "cyclic-poisson",
        "bands": 3,
    },
    "blt": {"mechanism": "blt", "noise_multiplier": 0.8, "buffers": 2},
}


def config(**values):
    base = {
        "scenario": "scratch",
        "rounds": 7,
        "deploy_every": 3,
        "clients_per_round": 5,
        "threads": 1,
        "policy": {"name": "softmax", "beta": 0.1},
        "clipping": {"norm": 0.05},
        "client": {"learning_rate": 0.5},
    }
    return Config.build({**base, **values})


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_epsilon_of_a_logged_run_is_that_of_its_configuration(name):
    data, chosen = random_text(clients=30), config(privacy=MECHANISMS[name])
    rounds = list(simulate(chosen, data))
    again = Ledger(build_ledger(Config.build(chosen.model_dump()), 30, pretrained=False).plan)
    for metrics in rounds:
        assert metrics["epsilon"] == again.epsilon(metrics["round"])
        deployed_or_last = metrics["round"] in (3, 6, 7)
        assert ("epsilon_pld" in metrics) == deployed_or_last
        if deployed_or_last:
            assert metrics["epsilon_pld"] <= metrics["epsilon"]
        json.dumps(metrics, allow_nan=False)
    found = summary(build_experiment(chosen, data).privacy, 7)
    assert found["epsilon_rdp"] == rounds[-1]["epsilon"]
    assert found["epsilon_pld"] == rounds[-1]["epsilon_pld"]
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_resumed_private_run_has_the_same_bits(name):
    data, chosen = random_text(clients=30), config(privacy=MECHANISMS[name])
    whole = simulate(chosen, data)
    expected = list(whole)
    first = simulate(chosen, data)
    rounds = iter(first)
    metrics = [next(rounds) for _ in range(4)]
    second = simulate(chosen, data, state=first.state)
    metrics += list(second)
    assert metrics == expected
    np.testing.assert_array_equal(second.state.weights, whole.state.weights)
    threads = simulate(chosen, data, engine=ThreadEngine(3))
    assert list(threads) == expected
    np.testing.assert_array_equal(threads.state.weights, whole.state.weights)


def test_runs_without_privacy_say_nothing_of_it():
    metrics = next(iter(simulate(config(), random_text(clients=30))))
    assert not any("epsilon" in key for key in metrics)


def test_a_run_stops_at_its_budget_and_never_past_it():
    data = random_text(clients=30)
    spent = Ledger(build_ledger(config(privacy=MECHANISMS["dp-fedavg"]), 30, False).plan)
    budget = (spent.epsilon(4) + spent.epsilon(5)) / 2
    run = simulate(config(privacy={**MECHANISMS["dp-fedavg"], "epsilon": budget}), data)
    rounds = list(run)
    assert run.experiment.rounds == len(rounds) == 4
    assert rounds[-1]["epsilon"] <= budget < spent.epsilon(5)
    assert "epsilon_pld" in rounds[-1]
    assert summary(run.experiment.privacy, 4)["budget"]["rounds"] == 4


def test_empty_cohorts_take_a_noise_only_step():
    data = random_text(clients=30)
    chosen = config(clients_per_round=1, rounds=12, privacy=MECHANISMS["dp-fedavg"])
    run = simulate(chosen, data)
    weights, empty = run.state.weights, 0
    for metrics in run:
        moved = run.state.weights - weights
        if metrics["clients"] == 0:
            empty += 1
            assert metrics["reward"] is None
            assert metrics["unclipped"] is None
            assert metrics["events"] == 0
        assert np.count_nonzero(moved) > 0.99 * len(moved)
        weights = run.state.weights
    assert empty > 0


def test_an_empty_cohort_moves_the_weights_by_its_noise_alone():
    data = random_text(clients=30)
    chosen = config(
        privacy=MECHANISMS["dp-fedavg"], server={"optimizer": "sgd", "learning_rate": 1.0}
    )

    class Nobody:
        pool = range(30)

        def draw(self, number):
            return np.zeros(0, np.int64)

    experiment = build_experiment(chosen, data)
    phase = replace(experiment.bandit, cohorts=Nobody())
    state = phase.start(experiment.initial_weights())
    following, metrics = run_round(phase, state, ThreadEngine(1), Stopwatch())
    noise = (
        experiment.bandit.aggregation.noise.update(1, state.weights)
        * np.float32(0.8 * 0.05)
        / np.float32(5)
    )
    np.testing.assert_array_equal(following.weights, state.weights + noise)
    assert metrics["reward"] is None
    assert following.running_reward is None
    assert following.clip_norm == state.clip_norm


def test_poisson_sampling_without_privacy_stands_still_when_nobody_comes():
    data = random_text(clients=30)
    run = simulate(config(clients_per_round=1, rounds=12, privacy={"sampling": "poisson"}), data)
    weights = run.state.weights
    sizes = []
    for metrics in run:
        sizes.append(metrics["clients"])
        if metrics["clients"] == 0 and len(sizes) == 1:
            np.testing.assert_array_equal(run.state.weights, weights)
    assert 0 in sizes
    assert max(sizes) > 1


def test_clients_without_events_count_as_zero_updates():
    """Three clients, two without examples: the exact mean counts them, the private one divides by what it expects."""
    features = np.ones((4, 3), np.float32)
    data = dataset_in_memory(features, [[0], [1], [0], [1]], [0, 0, 4, 4], 2)
    base = {
        "clients_per_round": 3,
        "rounds": 3,
        "server": {"optimizer": "sgd", "learning_rate": 1.0},
    }
    plain = simulate(config(**base, clipping={"norm": 1e6}), data)
    private = simulate(
        config(
            **base,
            clipping={"norm": 1e6},
            privacy={"mechanism": "dp-fedavg", "noise_multiplier": 0.0, "sampling": "fixed"},
        ),
        data,
    )
    for ours, theirs in zip(plain, private, strict=True):
        assert ours["events"] == 4
        assert ours["unclipped"] == theirs["unclipped"] == 1.0
        assert theirs["epsilon"] is None
    np.testing.assert_array_equal(plain.state.weights, private.state.weights)


@pytest.mark.parametrize(
    "data", [random_text(clients=20), random_images(clients=20)], ids=["text", "images"]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_clipped_norms_never_exceed_the_clip(data, dtype):
    """Each client alone, so that its clipped update is the sum itself; up to the rounding of its numbers."""
    clip = 0.02
    experiment = build_experiment(
        config(clipping={"norm": clip}, dtype=dtype, clients_per_round=1), data
    )
    phase = experiment.bandit
    weights = experiment.initial_weights()
    clipped = 0
    for client in range(20):
        broadcast = _broadcast(phase, weights, clip)
        result = phase.work(np.array([client]), broadcast)
        total = np.zeros_like(weights)
        result.sent.sums["weights"].add_to(total)
        norm = np.linalg.norm(total.astype(np.float64))
        assert norm <= clip * (1 + 4 * np.finfo(dtype).eps * np.sqrt(len(total)))
        if result.norms[0] > clip:
            clipped += 1
            assert norm == pytest.approx(clip, rel=1e-4)
        else:
            assert norm == pytest.approx(result.norms[0], rel=1e-4)
    assert clipped > 5


@pytest.mark.parametrize(
    "data", [random_text(clients=20), random_images(clients=20)], ids=["text", "images"]
)
def test_one_client_changes_the_noiseless_sum_by_at_most_the_clip(data):
    clip = 0.02
    experiment = build_experiment(config(clipping={"norm": clip}, dtype="float64"), data)
    weights = experiment.initial_weights()

    def total(clients):
        broadcast = _broadcast(experiment.bandit, weights, clip)
        result = np.zeros_like(weights)
        for chunk in np.array_split(clients, 4):
            experiment.bandit.work(chunk, broadcast).sent.sums["weights"].add_to(result)
        return result

    everybody = np.arange(20)
    whole = total(everybody)
    changes = [np.linalg.norm(whole - total(np.delete(everybody, client))) for client in everybody]
    assert max(changes) <= clip * (1 + 1e-9)
    assert max(changes) == pytest.approx(clip)


def _broadcast(phase, weights, clip):
    from fedbandit.federated.clients import Broadcast

    return Broadcast(1, {"weights": weights}, {0: Version(weights)}, clip)


@pytest.mark.parametrize("quantile", [0.3, 0.5, 0.8])
def test_the_private_adaptive_norm_finds_its_quantile(quantile):
    """Log-normal norms, a hundred clients a round: the norm must settle where that share of the mass lies below."""
    clipping = AdaptiveClipping(quantile, 0.1)
    plan = PrivacyPlan(
        population=10_000,
        clients_per_round=100,
        rounds=400,
        noise_multiplier=1.0,
        clipping=clipping,
        delta=1e-6,
    )
    mechanism = PrivateMean(plan, SimulatedNoise(plan, 3))
    rng = np.random.default_rng(0)
    norm, seen = clipping.initial, []
    for number in range(1, 401):
        norms = rng.lognormal(1.0, 0.7, rng.poisson(100))
        share = mechanism.unclipped(int((norms <= norm).sum()), len(norms), number)
        norm = clipping.following(norm, share)
        seen.append(norm)
    from scipy.stats import norm as normal

    expected = np.exp(1.0 + 0.7 * normal.ppf(quantile))
    assert np.exp(np.mean(np.log(seen[100:]))) == pytest.approx(expected, rel=0.05)


def test_adaptive_private_runs_move_their_norm_and_report_it():
    data = random_text(clients=30)
    chosen = config(
        clients_per_round=15,
        clipping={},
        privacy={"mechanism": "dp-fedavg", "noise_multiplier": 0.5},
    )
    run = simulate(chosen, data)
    norms = [metrics["clip_norm"] for metrics in run]
    assert norms[0] == 0.1
    assert len(set(norms)) == 7
    found = summary(run.experiment.privacy, 7)
    assert found["count_noise"] == 15 / 20
    assert found["update_noise_multiplier"] > 0.5


def test_updates_that_are_not_finite_are_left_out_and_named(monkeypatch):
    data = random_images(clients=8)
    honest = AutogradLearner.local

    def training(self, weights, events):
        train = honest(self, weights, events)

        def one(batches, *correction):
            bounds = (batches[0][0], batches[-1][1])
            return train(batches, *correction) * (np.nan if bounds in broken else 1)

        return one

    broken = []
    monkeypatch.setattr(AutogradLearner, "local", training)
    chosen = config(
        clients_per_round=8,
        model={"name": "linear-heads"},  # trained by automatic differentiation on images
        privacy={"mechanism": "dp-fedavg", "noise_multiplier": 0.5, "sampling": "fixed"},
    )
    experiment = build_experiment(chosen, data)
    experiment = replace(
        experiment, bandit=replace(experiment.bandit, work=_one_chunk(experiment.bandit.work))
    )
    cohort = experiment.bandit.cohorts.draw(1)
    sizes = data.train.sizes()[cohort]
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    broken.append((int(bounds[2]), int(bounds[3])))
    state = experiment.bandit.start(experiment.initial_weights())
    following, metrics = run_round(experiment.bandit, state, ThreadEngine(1), Stopwatch())
    assert metrics["rejected"] == [data.train.client_id(int(cohort[2]))]
    assert np.isfinite(following.weights).all()
    monkeypatch.setattr(
        AutogradLearner,
        "local",
        lambda self, weights, events: lambda *_: weights * float("nan"),
    )
    with pytest.raises(Diverged, match="diverged at round 1"):
        run_round(experiment.bandit, state, ThreadEngine(1), Stopwatch())


def _one_chunk(work):
    """All clients in one chunk, so that a client's events can be told by their bounds."""

    class OneChunk(type(work)):
        def chunks(self, cohort):
            return [cohort]

    return OneChunk(**vars(work))


def test_noise_of_the_system_is_never_the_same_and_the_summary_says_whose_it_is():
    data = random_text(clients=30)
    seeded, system = ({**MECHANISMS["blt"], "noise": source} for source in ("seed", "system"))
    runs = [
        simulate(config(privacy=private, rounds=2), data)
        for private in (seeded, seeded, system, system)
    ]
    for run in runs:
        list(run)
    weights = [run.state.weights for run in runs]
    np.testing.assert_array_equal(weights[0], weights[1])
    assert not np.array_equal(weights[2], weights[3])
    assert "recompute" in summary(runs[0].experiment.privacy, 2)["noise"]
    assert "who has secret.key" in summary(runs[2].experiment.privacy, 2)["noise"]
    independent = build_ledger(
        config(privacy={**MECHANISMS["dp-fedavg"], "noise": "system"}), 30, pretrained=False
    )
    assert "cannot be recomputed" in summary(independent, 2)["noise"]
    with pytest.raises(DrawnOnce):  # its memory is gone
        list(simulate(config(privacy=system, rounds=3), data, state=runs[2].state))


def test_runs_that_differ_in_anything_differ_in_their_noise():
    data = random_text(clients=30)
    drawn = []
    for changes in ({}, {"client": {"learning_rate": 0.7}}, {"seed": 1}, {"deploy_every": 2}):
        aggregation = build_experiment(
            config(privacy=MECHANISMS["dp-fedavg"], **changes), data
        ).bandit.aggregation
        drawn.append(aggregation.noise.update(1, np.zeros(4)).tobytes())
    where = build_experiment(
        config(privacy=MECHANISMS["dp-fedavg"], threads=2), data
    ).bandit.aggregation
    assert len(set(drawn)) == 4
    assert where.noise.update(1, np.zeros(4)).tobytes() == drawn[0]


def test_pretraining_is_public_or_paid_for():
    data = random_text(clients=30)
    base = {"scenario": "init", "pretraining": {"rounds": 3, "clients": 8}}
    private = {"mechanism": "dp-fedavg", "noise_multiplier": 1.0}
    paid = simulate(config(**base, privacy={**private, "pretraining": "accounted"}), data)
    declared = simulate(config(**base, privacy={**private, "pretraining": "public"}), data)
    assert not np.array_equal(
        paid.state.weights, declared.state.weights
    )  # private pre-training has noise
    spent = [next(iter(run))["epsilon"] for run in (paid, declared)]
    assert spent[0] > spent[1]
    assert "accounted" in summary(paid.experiment.privacy, 1)["pretraining"]
    assert "public" in summary(declared.experiment.privacy, 1)["pretraining"]


@pytest.mark.parametrize("mode", ["simple", "population"])
def test_private_runs_work_in_both_modes(mode):
    run = simulate(config(mode=mode, privacy=MECHANISMS["dp-fedavg"]), random_text(clients=30))
    assert len(list(run)) == 7
    assert np.isfinite(run.state.weights).all()


def released_sums(chosen, data, engine=None):
    """What the aggregation of a run is given in each round."""
    experiment, seen = build_experiment(chosen, data), []

    class Watched(type(experiment.bandit.aggregation)):
        def mean(self, total, *rest):
            seen.append(total.copy())
            return super().mean(total, *rest)

    made = Watched(**vars(experiment.bandit.aggregation))
    experiment = replace(experiment, bandit=replace(experiment.bandit, aggregation=made))
    run = simulate(chosen, data, experiment=experiment, engine=engine)
    list(run)
    return seen, run.state.weights


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_system_runs_sum_whole_steps_of_clipped_updates(algorithm, dtype):
    """Without noise, everybody in each cohort: the model is that of the plain sum, to a step."""
    data = random_text(clients=30)
    quiet = {"mechanism": "dp-fedavg", "noise_multiplier": 0.0, "sampling": "fixed"}
    base = {
        "algorithm": {"name": algorithm},
        "dtype": dtype,
        "clients_per_round": 30,
        "rounds": 2,
        "server": {"optimizer": "sgd", "learning_rate": 1.0},
    }
    sums, weights = released_sums(config(privacy={**quiet, "noise": "system"}, **base), data)
    assert all(total.dtype == np.int64 for total in sums)
    assert all(total.any() for total in sums)
    plain = simulate(config(privacy=quiet, **base), data)
    list(plain)
    assert weights.dtype == dtype
    np.testing.assert_allclose(weights, plain.state.weights, atol=2e-7)


def test_sums_of_whole_steps_do_not_depend_on_the_order_of_clients():
    """In floating point they do: then what one client changes is more than its own update."""
    chosen = config(privacy={**MECHANISMS["fixed cohorts"], "noise": "system"})
    phase = build_experiment(chosen, random_text(clients=30)).bandit
    weights = build_experiment(chosen, random_text(clients=30)).initial_weights()
    broadcast, rng, totals = _broadcast(phase, weights, 0.05), np.random.default_rng(0), []
    for _ in range(3):
        total = np.zeros(len(weights), np.int64)
        for chunk in np.array_split(rng.permutation(30), 5):
            phase.work(chunk, broadcast).sent.sums["weights"].add_to(total)
        totals.append(total)
    np.testing.assert_array_equal(totals[0], totals[1])
    np.testing.assert_array_equal(totals[0], totals[2])


def test_an_algorithm_that_adds_up_its_updates_itself_is_refused_in_system_runs():
    chosen = config(
        algorithm={"name": f"{__name__}:AddsUp"},
        privacy={**MECHANISMS["dp-fedavg"], "noise": "system"},
    )
    with pytest.raises(ConfigError, match="AddsUp adds up its updates; privacy"):
        list(simulate(chosen, random_text(clients=30)))


class AddsUp(FedAvg):
    def train(self, learner, received, clients, pipeline):
        total, norms = learner.train(received["weights"], clients.events, pipeline.clip_norm)
        return Contribution({"weights": total}, norms)
