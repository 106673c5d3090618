"""Figures and gate of a private deployment: bounded, noised, paid for by the plan of the model, or not there at all."""

import json
import logging
from functools import partial
from urllib.request import urlopen

import dp_accounting
import numpy as np
import pytest
from network_builders import Network, a_deployment, coordinator, devices, live, settle, values
from test_gate_in_deployments import GOOD, LIMIT, WORSE, propose
from test_gate_in_deployments import live as live_for_the_gate

from fedbandit.assembly.privacy import build_ledger
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError
from fedbandit.deploy.secure_sums import TOLERANCE, ReportBounds
from fedbandit.deploy.server.private_metrics import RoundNoise, private_verdict
from fedbandit.deploy.server.server_status import Watch, facts_of
from fedbandit.deploy.server.status import (
    full_status,
    in_lines,
    monitoring_page,
    read_status,
    round_in_words,
    status_lines,
)
from fedbandit.deploy.server.store import Store, read_ledger
from fedbandit.federated.pipeline import AdaptiveClipping
from fedbandit.federated.state import Version
from fedbandit.privacy import Independent, PrivacyPlan, Restarted, Tree, epsilon_of, plan_epsilon
from fedbandit.privacy.discrete import discrete_gaussians
from fedbandit.privacy.noise import RELEASE, GridNoise
from fedbandit.privacy.strategies import best_banded, best_blt

ROUNDS = 12
SIZES = ("asked", "clients", "refused", "model_versions")
BOUNDS = ReportBounds(10, 1.0)
SHARES = {"figures_share": 0.2, "gate_share": 0.3}
STRATEGIES = {
    "dp-fedavg": Independent(),
    "dp-ftrl": Tree(),
    "dp-ftrl, restarted": Restarted(Tree(), 5),
    "banded-mf": best_banded(ROUNDS, 3),
    "blt": best_blt(ROUNDS, 3, 2),
}


def a_plan(strategy="dp-fedavg", sampling="min-separation", separation=3, noise=1.5, **more):
    given = {
        "population": 100,
        "clients_per_round": 20,
        "rounds": ROUNDS,
        "noise_multiplier": noise,
        **SHARES,
        **more,
    }
    return PrivacyPlan(
        strategy=STRATEGIES[strategy], sampling=sampling, separation=separation, **given
    )


@pytest.fixture
def seeded(monkeypatch):
    rng = np.random.default_rng(3)
    monkeypatch.setattr("fedbandit.privacy.noise.secret_normals", rng.standard_normal)
    monkeypatch.setattr(
        "fedbandit.privacy.noise.discrete_gaussians",
        partial(discrete_gaussians, entropy=rng.bytes),
    )


def round_noise(plan, number=1, memory=None):
    def of_weights(done, kept):
        return GridNoise(plan.strategy, plan.update_multiplier / RELEASE.step, done, kept)

    return RoundNoise(plan, number, memory or {}, of_weights)


# ---- what they cost


def multipliers(plan):
    """Noise on the sums of model, figures and gate, in units of what one device adds at most."""
    noise, of_round = round_noise(plan), np.sqrt(plan.noise_variances[0, 0])
    figures, gate = noise.figures(np.zeros(3), BOUNDS), noise.gate(np.zeros(3))
    most = np.array([BOUNDS.events, BOUNDS.events * BOUNDS.reward, BOUNDS.events])
    added = [most * (1 + TOLERANCE) / figures.deviations, 1 / gate.deviations]
    return [plan.update_multiplier, *(1 / np.linalg.norm(one * of_round) for one in added)]


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_model_figures_gate_and_count_together_cost_what_the_plan_says(sampling, adaptive):
    """By the accounting library, from the noise that each of them has, on one sample in every round."""
    clipping = {"clipping": AdaptiveClipping(initial=1.0, quantile=0.5)} if adaptive else {}
    plan = a_plan(sampling=sampling, separation=1, clients_per_round=80, **clipping)
    parts = multipliers(plan) + ([2 * plan.count_deviation] if adaptive else [])
    of_round = dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(z) for z in parts])
    if sampling == "poisson":
        of_round = dp_accounting.PoissonSampledDpEvent(plan.probability, of_round)
    together = dp_accounting.SelfComposedDpEvent(of_round, ROUNDS)
    spent, stated = epsilon_of(together, plan.delta), plan_epsilon(plan)
    assert stated * (1 - 1e-3) < spent <= stated * (1 + 1e-9)  # noise is rounded up to the grid
    alone = a_plan(
        sampling=sampling,
        separation=1,
        clients_per_round=80,
        figures_share=0.0,
        gate_share=0.0,
        **clipping,
    )
    assert plan_epsilon(plan) == plan_epsilon(alone)
    assert plan.update_multiplier > alone.update_multiplier


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_under_correlated_noise_no_device_moves_more_than_is_accounted_for(strategy):
    """C times the vectors of a device's turns, model, figures and gate at most 1 long each, in units of the noise."""
    plan = a_plan(strategy)
    matrix = np.zeros((ROUNDS + 1, ROUNDS + 1))
    for number in range(1, ROUNDS + 1):
        rows, weights = plan.strategy.column(number, ROUNDS)
        matrix[rows, number] = weights
    units = 1 / np.array(multipliers(plan))
    rng, most = np.random.default_rng(0), 0.0
    for first in range(1, plan.separation + 1):
        turns = range(first, ROUNDS + 1, plan.separation)
        for trial in range(20):
            sent = rng.normal(size=(3, ROUNDS + 1, 4))
            if trial < 10:  # always the same: what hurts most
                sent[:] = sent[:, :1]
            sent /= np.linalg.norm(sent, axis=2, keepdims=True)
            taken = np.isin(np.arange(ROUNDS + 1), list(turns))
            joint = np.concatenate(
                [unit * part * taken[:, None] for unit, part in zip(units, sent, strict=True)], 1
            )
            most = max(most, float(np.square(matrix @ joint).sum()))
    accounted = plan.squared_sensitivities[ROUNDS] / plan.noise_multiplier**2
    # reached by the worst but for the noise's rounding up to its grid, exceeded by none
    assert accounted * (1 - 1e-3) < most <= accounted * (1 + 1e-9)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_noise_is_what_the_plan_says_also_across_restarts(strategy, seeded):
    plan = a_plan(strategy)
    found = []
    for _ in range(400):
        memory, rounds = {}, []
        for number in range(1, ROUNDS + 1):  # each round by another server, from what was kept
            noise = round_noise(plan, number, memory)
            model = noise.weights.update(number, np.zeros(2)) * RELEASE.step
            model = model / plan.update_multiplier
            memory = noise.memory
            figures = noise.figures(np.zeros(3), ReportBounds(10, 2.0))
            gate = noise.gate(np.zeros(3))
            rounds.append(
                np.concatenate(
                    [model, figures.sums / figures.deviations, gate.sums / gate.deviations]
                )
            )
            assert figures.deviations[1] == pytest.approx(2 * figures.deviations[0], rel=1e-3)
        found.append(rounds)
    found = np.array(found)  # [trials, rounds, entries]
    np.testing.assert_allclose(found[:, :, 2:].std(axis=(0, 2)), 1.0, atol=0.07)
    ratio = np.sqrt(plan.noise_variances[0])
    np.testing.assert_allclose(found[:, :, :2].std(axis=(0, 2)) / ratio, 1.0, atol=0.12)
    totals = (found[:, :, 2:] * ratio[:, None]).sum(
        axis=1
    )  # over all rounds, which is where correlation pays
    assert totals.std() / np.sqrt(plan.noise_variances[1][-1]) == pytest.approx(1.0, abs=0.07)
    correlations = np.corrcoef(found[:, 0].T) - np.eye(8)
    assert np.abs(correlations).max() < 0.2  # no entry's noise undoes another's
    unit = plan.noise_multiplier * np.sqrt(3 / 0.2) * ratio[0] * 10 * 1.001
    found = round_noise(plan).figures(np.zeros(3), BOUNDS).deviations
    np.testing.assert_allclose(found, unit, rtol=1e-3)  # never less than the plan says, ...
    assert (found >= unit * (1 - 1e-9)).all()  # ... a little more where steps are coarse


# ---- what is said


def private(folder, noise=1.0, rounds=6, more=None, **privacy):
    given = {"mechanism": "dp-fedavg", "noise_multiplier": noise, "sampling": "fixed", **privacy}
    chosen = {"rounds": rounds, "clients_per_round": 3, "privacy": given}
    rules = {"population": 3, "max_events": 10, **(more or {})}
    return a_deployment(folder, values(**rules) | chosen)


def world(folder, deployment, caplog=None, number=3):
    network = Network(devices(folder, number))
    settle(deployment, network.participants)
    store = Store(deployment.folder)
    server = coordinator(
        deployment, network, store, watch=Watch(deployment.folder, facts_of(deployment))
    )
    return network, store, server


def lines_of(deployment):
    return [
        json.loads(line) for line in (deployment.folder / "metrics.jsonl").read_text().splitlines()
    ]


def test_without_a_share_nothing_is_said_of_rewards_anywhere(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    deployment = private(tmp_path)
    network, store, server = world(tmp_path, deployment)
    empty = devices(tmp_path / "empty", 1)[100]
    empty.agent.install(deployment.device_model(Version(deployment.initial), 0))
    network.participants[102] = empty
    server.run(2)
    store.close()
    names = (
        "reward",
        "propensity",
        "events",
        "running_reward",
        "idle",
        "unclipped",
        "rewards_by_version",
    )
    for line in lines_of(deployment):
        assert [line[name] for name in names] == [None] * len(names)
        assert [line[name] for name in SIZES] == [None] * len(SIZES)
        assert not {"reward_sum", "noise", "gate"} & set(line)
        assert "no reward to report" in round_in_words(line)
    assert (server.state.reward_total, server.state.rewarded_rounds, server.state.events) == (
        0.0,
        0,
        0,
    )
    status = read_status(deployment.folder)
    assert (status["reward"]["running"], status["reward"]["lately"]) == (None, None)
    assert set(status["reward"]["by_version"].values()) == {None}
    shown = "\n".join(status_lines(full_status(deployment.folder)))
    assert (
        "reward         not reported: no part of the privacy budget pays for it (privacy.figures_share)"
        in shown
    )
    assert "had nothing to train on" not in shown
    assert "reward None" in caplog.text
    with monitoring_page(deployment.folder, 0) as port:
        page = urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    assert "fedbandit_round 2.0" in page
    assert not any(f"fedbandit_{name}" in page for name in ("clients", "asked", "refused", "empty"))
    assert "events" not in page


def test_with_a_share_they_are_said_with_noise(tmp_path, seeded):
    """With little noise, so that what comes out can be compared with what went in."""
    deployment = private(tmp_path, noise=0.01, figures_share=0.5)
    network, store, server = world(tmp_path, deployment)
    total, events = sum(live(part, 3, seed=9) for part in network.participants.values()), 27
    before = [
        reward
        for part in network.participants.values()
        for reward in part.agent.events().events.rewards
    ]
    metrics = server.attempt()
    unit = 0.01 * np.sqrt(3 / 0.5) * 1.001 * 10
    assert metrics["noise"] == {
        "events": pytest.approx(unit, rel=1e-3),
        "rewards": pytest.approx(unit, rel=1e-3),
    }
    assert metrics["events"] == pytest.approx(events, abs=2)
    assert metrics["reward_sum"] != pytest.approx(sum(before), abs=1e-6)
    assert metrics["reward_sum"] == pytest.approx(sum(before), abs=5 * unit)
    assert metrics["reward"] == pytest.approx(sum(before) / events, abs=0.1)
    assert 0 < metrics["propensity"] < 1
    assert metrics["running_reward"] == pytest.approx(metrics["reward"])
    assert metrics["rewards_by_version"] is metrics["idle"] is metrics["unclipped"] is None
    assert total > 0
    again = server.attempt()
    assert again["reward"] is None  # nothing new: what is left is noise
    assert again["running_reward"] == pytest.approx(metrics["running_reward"], abs=0.1)
    store.close()
    status = read_status(deployment.folder)
    assert status["reward"]["running"] == again["running_reward"]
    assert status["reward"]["lately"] == pytest.approx(sum(before) / events, abs=0.1)
    assert "over all rounds" in (shown := "\n".join(in_lines(status)))
    assert "lately, with noise" in shown
    assert status["privacy"]["covers"].startswith(
        "covers the released models, the figures of rewards (0.5 of the"
    )
    totals = server.state.extra["figures"]
    assert totals["rewards"] == pytest.approx(metrics["reward_sum"] + again["reward_sum"])
    resumed = coordinator(deployment, network)
    assert resumed.attempt()["running_reward"] == pytest.approx(again["running_reward"], abs=0.1)


def test_noise_that_drowns_the_events_leaves_no_reward(tmp_path, seeded):
    deployment = private(tmp_path, noise=5.0, figures_share=0.1)
    _, store, server = world(tmp_path, deployment)
    metrics = [server.attempt() for _ in range(6)]
    store.close()
    assert all(line["reward"] is None or -1 <= line["reward"] <= 1 for line in metrics)
    assert any(line["reward"] is None for line in metrics)
    assert len({line["events"] for line in metrics}) > 3
    assert np.std([line["events"] for line in metrics]) > 20  # where nobody has more than 18


def test_shares_belong_to_what_devices_were_promised(tmp_path):
    deployment = private(tmp_path, figures_share=0.2)
    network, store, server = world(tmp_path, deployment)
    server.attempt()
    store.close()
    for other in (private(tmp_path), private(tmp_path, figures_share=0.3)):
        with pytest.raises(ConfigError, match="started with different private figures"):
            other.resumed(server.state)
    assert coordinator(private(tmp_path, figures_share=0.2), network).attempt()["round"] == 2


@pytest.mark.parametrize(
    ("privacy", "message"),
    [
        ({"gate_share": 0.5}, "privacy.gate_share: set, but there is no gate"),
        ({"figures_share": 1.0}, "privacy.figures_share"),
        ({"figures_share": 0.0}, "privacy.figures_share"),
        (
            {"mechanism": "none", "noise_multiplier": None, "figures_share": 0.1},
            "privacy.figures_share: set, but",
        ),
    ],
)
def test_shares_that_make_no_sense_are_refused(tmp_path, privacy, message):
    with pytest.raises(ConfigError, match=message):
        private(tmp_path, **privacy)


def test_shares_leave_something_for_the_model_and_are_for_deployments():
    chosen = {
        "mechanism": "dp-fedavg",
        "noise_multiplier": 1.0,
        "figures_share": 0.5,
        "gate_share": 0.5,
    }
    config = Config.build({"clipping": {"norm": 1.0}, "scenario": "scratch", "privacy": chosen})
    with pytest.raises(
        ConfigError, match=r"privacy\.figures_share: with gate_share it must leave something"
    ):
        build_ledger(config, 1000, False, deployed=True)
    with pytest.raises(ConfigError, match=r"privacy\.figures_share: is for deployments"):
        build_ledger(config, 1000, False)


def test_the_best_mechanism_is_found_with_shares_and_keeps_the_budget(tmp_path):
    chosen = {
        "mechanism": "best",
        "noise_multiplier": None,
        "epsilon": 8.0,
        "sampling": None,
        "figures_share": 0.1,
    }
    ledger = private(tmp_path, more={"population": 60}, **chosen).ledger
    assert ledger.plan.figures_share == 0.1
    assert ledger.epsilon(ledger.last_round) == pytest.approx(8.0, rel=0.01)


# ---- the gate


@pytest.mark.parametrize("strategy", ["dp-fedavg", "dp-ftrl", "blt"])
@pytest.mark.parametrize(("number", "noise"), [(200, 1.5), (30, 0.3)])
def test_a_worse_model_passes_no_more_often_than_allowed_and_a_better_one_mostly(
    strategy, number, noise, seeded
):
    plan, rng = a_plan(strategy, noise=noise), np.random.default_rng(7)
    passed = {}
    for gain in (-0.3, 0.0, 0.5):
        verdicts = [
            private_verdict(rng.normal(gain, 0.4, number), round_noise(plan), BOUNDS, 0.9, 0.0)[0]
            for _ in range(400)
        ]
        passed[gain] = np.mean([verdict.passes for verdict in verdicts])
        known = [verdict for verdict in verdicts if np.isfinite(verdict.gain)]
        assert np.mean([verdict.gain for verdict in known]) == pytest.approx(gain, abs=0.05)
        covered = np.mean([verdict.lower <= gain for verdict in known])
        assert covered >= 0.9 - 3 * np.sqrt(0.09 / 400)
    assert passed[-0.3] <= 0.01
    assert passed[0.0] <= 0.1 + 3 * np.sqrt(0.09 / 400)
    assert passed[0.5] >= 0.95


def test_noise_alone_passes_nothing(seeded):
    plan = a_plan(noise=3.0)
    nobody = np.zeros(0)
    verdicts = [private_verdict(nobody, round_noise(plan), BOUNDS, 0.5, 0.0)[0] for _ in range(300)]
    assert np.mean([verdict.passes for verdict in verdicts]) < 0.05


def test_one_device_moves_the_verdict_by_no_more_than_its_part():
    """Whatever it claims: the noise is measured against that."""
    plan, rng = a_plan(noise=0.0), np.random.default_rng(0)
    noise = round_noise(plan)
    others, seen = rng.normal(0.0, 0.1, 50), []
    noise.gate = lambda sums: seen.append(sums) or RoundNoise.gate(noise, sums)
    for gain in (-1e6, -1.0, 1.0, 1e6):
        private_verdict(np.append(others, gain), noise, BOUNDS, 0.9, 0.0)
    private_verdict(others, noise, BOUNDS, 0.9, 0.0)
    *with_it, without = seen
    assert all(np.all(np.abs(sums - without) <= 1 + 1e-12) for sums in with_it)


def gated(folder, noise=0.1, **changed):
    privacy = {
        "mechanism": "dp-fedavg",
        "noise_multiplier": noise,
        "gate_share": 0.5,
        "sampling": "fixed",
    }
    base = values(population=30, max_events=20) | {"deploy_every": 1, "clipping": {"norm": 100.0}}
    base |= {
        "gate": {"confidence": 0.9, "limit": LIMIT},
        "privacy": {**privacy, **changed},
        "clients_per_round": 30,
    }
    return a_deployment(folder, base)


def gated_world(folder, deployment, number=30, events=10):
    network = Network(devices(folder, number))
    for i, participant in enumerate(network.participants.values()):
        participant.agent.install(deployment.device_model(Version(deployment.initial), 0))
        live_for_the_gate(participant.agent, events, seed=i)
    return network


def test_a_private_deployment_holds_a_worse_model_back_and_lets_a_better_one_pass(
    tmp_path, seeded, caplog
):
    deployment = gated(tmp_path)
    network = gated_world(tmp_path, deployment)
    store = Store(deployment.folder)
    server = coordinator(deployment, network, store)
    propose(network, WORSE)
    first = server.attempt()
    assert (first["gate"]["passes"], server.version, server.state.round) == (False, 0, 1)
    assert first["gate"]["gain"] < 0
    assert "round 1: model held back: gain -0." in caplog.text
    propose(network, GOOD)
    second = server.attempt()
    assert (second["gate"]["passes"], server.version) == (True, 1)
    assert second["gate"]["gain"] > second["gate"]["lower"] > 0
    assert set(second["gate"]) == {
        "passes",
        "gain",
        "standard_error",
        "lower",
        "asked",
        "devices",
        "refused",
    }
    assert second["gate"]["devices"] == pytest.approx(30, abs=3)
    # the round's own devices judge, and the price is that of the plan
    judges = [request for request in network.sent if request.kind == "judge"]
    assert len(judges) == 60
    assert second["epsilon"] == pytest.approx(deployment.ledger.epsilon(2))
    for line, metrics in zip(lines_of(deployment), (first, second), strict=True):
        kept = {**metrics["gate"], "asked": None, "refused": None}
        assert line == {**metrics, **dict.fromkeys(SIZES), "gate": kept}
    assert read_ledger(deployment.folder / "ledger.jsonl").released == 2
    store.close()
    assert "let the model pass after round 2" in "\n".join(in_lines(read_status(deployment.folder)))


class Killed(BaseException):
    pass


def test_nobody_judges_a_candidate_that_was_not_charged_and_a_kill_holds_it_back(tmp_path, seeded):
    deployment = gated(tmp_path)
    network = gated_world(tmp_path, deployment, number=4, events=4)
    store = Store(deployment.folder)
    server = coordinator(deployment, network, store)
    send = network.send

    def dying(requests):
        if requests and requests[0].kind == "judge":
            assert read_ledger(deployment.folder / "ledger.jsonl").released == 1
            send(requests)
            raise Killed
        return send(requests)

    network.send = dying
    with pytest.raises(Killed):
        server.attempt()
    store.close()
    candidate = next(request for request in network.sent if request.kind == "judge").arrays[
        "weights"
    ]
    network.send = send
    resumed = coordinator(deployment, network)
    assert (resumed.state.round, resumed.version) == (1, 0)
    np.testing.assert_array_equal(
        resumed.state.weights, candidate
    )  # what they saw is what was charged
    assert not lines_of(deployment)[0]["gate"]["passes"]
    assert resumed.attempt()["round"] == 2


def test_a_device_judges_once_in_its_turn_and_at_no_other_time(tmp_path, seeded):
    deployment = gated(tmp_path)
    network = gated_world(tmp_path, deployment, number=3, events=4)
    coordinator(deployment, network).attempt()
    request = next(request for request in network.sent if request.kind == "judge")
    participant = network.participants[request.node]
    said = participant.answer("judge", request.facts, request.arrays)[0]
    assert said["problem"] == "this device has been asked about the candidate of round 1 before"
    said = participant.answer("judge", {**request.facts, "round": 2}, request.arrays)[0]
    assert said["problem"] == "round 2 is not one in which this device has had its turn"


def test_a_gate_without_its_share_or_with_judges_of_its_own_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"privacy\.gate_share: missing; the gate of a private deployment"
    ):
        gated(tmp_path, gate_share=None)
    base = values(population=30) | {
        "clients_per_round": 3,
        "gate": {"confidence": 0.9, "limit": 5.0, "clients": 9},
    }
    privacy = {"mechanism": "dp-fedavg", "noise_multiplier": 1.0, "gate_share": 0.5}
    with pytest.raises(
        ConfigError, match=r"gate\.clients: under privacy the round's own devices judge"
    ):
        a_deployment(tmp_path, base | {"privacy": privacy})
