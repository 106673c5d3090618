"""The gate over devices: better models go out, worse ones are held back, and no device decides that alone."""

import json
from dataclasses import replace
from functools import reduce
from operator import add

import numpy as np
import pytest
from network_builders import (
    ACTIONS,
    WORDS,
    Network,
    a_deployment,
    changed,
    coordinator,
    devices,
    values,
    with_update,
)

from fedbandit.acting import Actor
from fedbandit.core.errors import ConfigError
from fedbandit.core.prediction import Prediction
from fedbandit.deploy import Agent
from fedbandit.deploy.device.participant import Participant
from fedbandit.deploy.flower.operate import Seen
from fedbandit.deploy.messages import Reply
from fedbandit.deploy.server.gate import screen, without_any_one
from fedbandit.deploy.server.gathering import select_judges
from fedbandit.deploy.server.status import in_lines, read_status
from fedbandit.deploy.server.store import Store
from fedbandit.evaluation.estimators import Bootstrap, sums_of_terms
from fedbandit.evaluation.gate import GainEstimator, verdict_of
from fedbandit.federated.state import Version
from fedbandit.policies import Softmax

BAD, LIMIT, BETA = 101, 10.0, 0.3
K = len(ACTIONS)
_RIGHT = np.eye(K)[
    np.arange(len(WORDS)) % K
]  # features speak for the action that pays where they are the largest
GOOD = np.append((3 * (_RIGHT - _RIGHT.mean(axis=1, keepdims=True))).ravel(), np.zeros(K))
WORSE = -GOOD


def gated(gate=None, *, rules=None, **changed):
    """A deployment with a gate; every round would deploy, and updates may be as large as the tests need."""
    base = {**values(**(rules or {})), "deploy_every": 1, "clipping": {"norm": 100.0}}
    return {**base, "gate": {"confidence": 0.9, "limit": LIMIT, **(gate or {})}, **changed}


def live(agent, events, seed, masks=False, scale=1.0):
    """An app that is paid where the action fits the context; with masks, some actions cannot be chosen."""
    rng = np.random.default_rng(seed)
    for _ in range(events):
        context = rng.random(len(WORDS)).astype(np.float32)
        available = (
            sorted(rng.choice(K, 2, replace=False).tolist())
            if masks and rng.random() < 0.5
            else None
        )
        decision = agent.choose(context, available)
        agent.reward(decision.event_id, scale * float(decision.action == int(context.argmax()) % K))


def world(folder, number=12, events=30, given=None):
    deployment = a_deployment(folder, given or gated())
    network = Network(devices(folder, number))
    for i, participant in enumerate(network.participants.values()):
        participant.agent.install(deployment.device_model(Version(deployment.initial), 0))
        live(participant.agent, events, seed=i)
    return deployment, network


def propose(network, candidate):
    """Have training come to this model."""

    def towards(request, reply):
        return with_update(lambda _: candidate.astype(np.float32) - request.arrays["weights"])(
            request, reply
        )

    network.faults = dict.fromkeys(network.participants, towards)


def lines_of(deployment):
    return [
        json.loads(line) for line in (deployment.folder / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.parametrize("estimator", ["ips", "dr"])
def test_a_better_model_goes_out(tmp_path, caplog, estimator):
    caplog.set_level("INFO")
    deployment, network = world(tmp_path, given=gated({"estimator": estimator}))
    propose(network, GOOD)
    server = coordinator(deployment, network)
    verdict = server.attempt()["gate"]
    assert verdict["passes"]
    assert 0 <= verdict["lower"] < verdict["gain"]
    assert (verdict["asked"], verdict["devices"], verdict["events"], verdict["refused"]) == (
        12,
        12,
        360,
        {},
    )
    assert server.version == 1
    np.testing.assert_allclose(server.state.deployed[1].weights, GOOD, atol=1e-5)
    server.attempt()
    assert {participant.agent.model_version for participant in network.participants.values()} >= {1}
    assert "round 1: model passed the gate: gain 0." in caplog.text
    assert "let the model pass" in "\n".join(in_lines(read_status(deployment.folder)))


@pytest.mark.parametrize("estimator", ["ips", "dr"])
def test_a_worse_model_is_held_back_and_devices_keep_the_old_one(tmp_path, caplog, estimator):
    deployment, network = world(tmp_path, given=gated({"estimator": estimator}))
    propose(network, WORSE)
    server = coordinator(deployment, network)
    first, second = server.attempt(), server.attempt()
    assert not first["gate"]["passes"]
    assert first["gate"]["gain"] < 0
    assert (first["model_version"], second["model_version"], server.version) == (0, 0, 0)
    assert server.state.round == 2  # training goes on, from its own weights
    np.testing.assert_allclose(server.state.weights, WORSE, atol=1e-5)
    np.testing.assert_array_equal(server.state.deployed[0].weights, deployment.initial)
    agent = network.participants[100].agent
    assert agent.choose(np.ones(len(WORDS))).model_version == agent.model_version == 0
    assert "round 1: model held back: gain -0." in caplog.text
    status = read_status(deployment.folder)
    assert (status["gate"]["held_back"], status["gate"]["judged"], status["gate"]["round"]) == (
        2,
        2,
        2,
    )
    assert "held the model back after round 2" in "\n".join(in_lines(status))
    said = []
    Seen(deployment.folder, said.append).look()
    assert len(said) == 2
    assert said[0].endswith("the new model was held back")


def test_a_model_that_was_held_back_goes_out_once_it_has_become_better(tmp_path):
    deployment, network = world(tmp_path)
    server = coordinator(deployment, network)
    propose(network, WORSE)
    assert not server.attempt()["gate"]["passes"]
    propose(network, GOOD)
    assert server.attempt()["gate"]["passes"]
    assert [entry["version"] for entry in server.state.extra["versions"]] == [0, 1]


def test_without_a_gate_nobody_is_asked(tmp_path):
    deployment, network = world(
        tmp_path, number=3, events=4, given={**gated(), "gate": {"limit": LIMIT}}
    )
    metrics = coordinator(deployment, network).attempt()
    assert "gate" not in metrics
    assert not [request for request in network.sent if request.kind == "judge"]
    assert read_status(deployment.folder)["gate"] is None


def direct_sums(agent, deployed, candidate, estimator, limit, most, newest):
    """The same by the textbook, one event at a time."""
    logged = agent.events()
    found = []
    for i in range(max(0, len(logged) - newest), len(logged)):
        x = logged.events.contexts.shared[i].astype(np.float64)
        x = x / np.linalg.norm(x)
        possible = np.ones(K, bool) if logged.available is None else logged.available[i]
        scores = [x @ w[:-K].reshape(-1, K) + w[-K:] for w in (deployed, candidate)]
        old, new = (
            np.where(possible, np.exp(s / BETA), 0) / np.exp(s / BETA)[possible].sum()
            for s in scores
        )
        predicted = np.clip(scores[0], -most, most) if estimator == "dr" else np.zeros(K)
        action, reward = (
            logged.events.actions[i],
            np.clip(float(logged.events.rewards[i]), -most, most),
        )
        inverse = min(1 / logged.events.propensities[i], limit)
        gain = (new - old) @ predicted + (new - old)[action] * inverse * (
            reward - predicted[action]
        )
        found.append(
            (
                1,
                gain,
                importance := min(new[action] / logged.events.propensities[i], limit),
                importance**2,
            )
        )
    return np.sum(found, axis=0)


@pytest.mark.parametrize("estimator", ["ips", "dr"])
def test_a_devices_sums_are_those_of_its_log(tmp_path, estimator):
    """With actions that were not available, rewards and inverse propensities that are cut, and too many events."""
    rng = np.random.default_rng(8)
    rules = {"max_events": 40, "max_reward": 0.8}
    deployment = a_deployment(
        tmp_path,
        gated({"estimator": estimator, "limit": 2.5}, rules=rules, dtype="float64", rounds=1),
    )
    deployment = replace(deployment, initial=rng.normal(0, 0.5, len(GOOD)))
    network = Network(devices(tmp_path, 3))
    for i, participant in enumerate(network.participants.values()):
        participant.agent.install(deployment.device_model(Version(deployment.initial), 0))
        live(participant.agent, 30 + 10 * i, seed=i, masks=i > 0, scale=1.5)
    coordinator(deployment, network).attempt()
    asked = [request for request in network.sent if request.kind == "judge"]
    answers = [reply for reply in network.received if "gain" in reply.facts]
    assert len(asked) == len(answers) == 3
    candidate = asked[0].arrays["weights"]
    assert not np.array_equal(candidate, deployment.initial)
    by_device = {reply.facts["device"]: reply for reply in answers}
    for participant in network.participants.values():
        card = json.loads((participant.agent.folder / "device.json").read_text())
        said = by_device[card["device"]]
        expected = direct_sums(
            participant.agent, deployment.initial, candidate, estimator, 2.5, 0.8, 40
        )
        names = ("events", "gain", "importance", "importance_squares")
        np.testing.assert_allclose(
            [said.facts[name] for name in names], expected, rtol=1e-9, atol=1e-12
        )
        assert set(said.facts) == {"protocol", "token", "device", "version", *names}
        assert said.arrays == {}
    assert [
        reply.facts["events"] for reply in sorted(answers, key=lambda reply: reply.facts["events"])
    ] == [30, 40, 40]


class UnitLinear:
    """Linear scores of contexts of length one, independent of the library's predictors."""

    def predict(self, weights, contexts):
        x = contexts.shared.astype(np.float64)
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        return Prediction(x @ weights[:-K].reshape(-1, K) + weights[-K:])


@pytest.mark.parametrize("estimator", ["ips", "dr"])
def test_the_verdict_is_that_of_a_simulations_gate_on_the_same_events(tmp_path, estimator):
    deployment, network = world(tmp_path, given=gated({"estimator": estimator}, dtype="float64"))
    verdict = coordinator(deployment, network).attempt()["gate"]
    candidate = next(request for request in network.sent if request.kind == "judge").arrays[
        "weights"
    ]
    terms, weights = [], []
    for participant in network.participants.values():
        logged = participant.agent.events()
        old, new = (Actor(UnitLinear(), w, Softmax(BETA)) for w in (deployment.initial, candidate))
        found = GainEstimator(estimator, LIMIT).terms(logged.events, old, new)
        terms.append(found[0])
        weights.append(np.minimum(found[1], LIMIT))
    bounds = np.arange(13) * 30
    gains, importance = np.concatenate(terms), np.concatenate(weights)
    sums = sums_of_terms(
        np.arange(12), bounds, gains, np.ones(360), importance, importance, Bootstrap(0)
    )
    assert verdict["gain"] == pytest.approx(sums.value, rel=1e-9)
    assert verdict["standard_error"] == pytest.approx(sums.standard_error, rel=1e-9)
    assert verdict["effective_sample_size"] == pytest.approx(
        importance.sum() ** 2 / (importance**2).sum(), rel=1e-9
    )
    assert verdict["lower"] <= verdict_of(sums, 0.9, 0.0).lower


LIES = {
    "drops out": (
        lambda request, reply: [],
        None,
        "round 1, judging: node 101 has not answered in time",
    ),
    "fails": (
        lambda request, reply: [Reply(reply.ticket, error="Flower's error 2")],
        "failed",
        "Flower's error 2",
    ),
    "cannot": (changed(problem="no room"), "could not judge", "no room"),
    "no facts": (lambda request, reply: [Reply(reply.ticket)], "other round", "another round"),
    "another attempt's token": (changed(token="0" * 16), "other round", "another round"),
    "no name": (changed(device=""), "garbage", "no device named"),
    "a version that is a text": (changed(version="0"), "garbage", "version: not a count"),
    "events that are a fraction": (changed(events=2.5), "garbage", "events: not a count"),
    "events below zero": (changed(events=-3), "garbage", "events: not a count"),
    "events without end": (changed(events=10**400), "garbage", "events: not a count"),
    "too many events": (changed(events=1001), "too many events", "more than the 1000"),
    "a gain that is a text": (changed(gain="much"), "garbage", "gain: not a finite number"),
    "a gain that is a truth": (changed(gain=True), "garbage", "gain: not a finite number"),
    "a gain that is no number": (
        changed(gain=float("nan")),
        "garbage",
        "gain: not a finite number",
    ),
    "an infinite gain": (changed(gain=float("inf")), "garbage", "gain: not a finite number"),
    "a gain without end": (changed(gain=10**400), "garbage", "gain: not a finite number"),
    "too much gain": (
        changed(gain=1e6),
        "gain too large",
        "1e+06 over 30 events of at most 22 each",
    ),
    "too much loss": (changed(gain=-1e6), "gain too large", "-1e+06 over 30 events"),
    "importance below zero": (changed(importance=-1.0), "garbage", "importance of -1"),
    "too much importance": (
        changed(importance=1e9, importance_squares=1e10),
        "garbage",
        "importance of 1e+09",
    ),
    "squares too small": (changed(importance_squares=0.0), "garbage", "contradict"),
    "squares too large": (changed(importance_squares=1e9), "garbage", "contradict"),
    "arrays": (
        lambda request, reply: [Reply(reply.ticket, reply.facts, {"update": np.zeros(3)})],
        "garbage",
        "where sums were expected",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_refused_and_named_and_changes_nothing(tmp_path, caplog, name):
    lie, kind, message = LIES[name]
    deployment, network = world(tmp_path, number=4)
    propose(network, GOOD)
    network.lies = {BAD: lie}
    verdict = coordinator(deployment, network).attempt()["gate"]
    assert verdict["refused"] == ({} if kind is None else {kind: 1})
    assert verdict["devices"] == 3
    assert message in caplog.text
    del network.participants[BAD]
    honest = coordinator(a_deployment(tmp_path / "honest", gated()), network).attempt()["gate"]
    for figure in ("gain", "standard_error", "lower", "events", "passes"):
        assert verdict[figure] == pytest.approx(honest[figure], rel=1e-9)


def test_nothing_that_a_device_says_makes_the_server_fail():
    strange = [
        None,
        True,
        "",
        "x",
        -1,
        0,
        1,
        2**70,
        10**400,
        1e308,
        -1e308,
        float("nan"),
        float("inf"),
        [],
        {},
        [1],
    ]
    sound = {"token": "t", "device": "d", "version": 0, "events": 2}
    sound |= {"gain": 0.1, "importance": 2.0, "importance_squares": 2.0}
    estimator = GainEstimator("dr", LIMIT, 1.0)
    assert len(screen([(1, Reply("a", sound))], "t", 0, estimator, 10).sums) == 1
    rng = np.random.default_rng(5)
    pairs = [(name, value) for name in sound for value in strange]
    drawn = [
        dict(pairs[i] for i in rng.integers(len(pairs), size=rng.integers(1, 5)))
        for _ in range(500)
    ]
    for lies in [{name: value} for name, value in pairs] + drawn:
        found = screen([(1, Reply("a", {**sound, **lies}))], "t", 0, estimator, 10)
        assert len(found.sums) + len(found.refused) + found.idle + found.behind == 1
        assert np.isfinite(without_any_one(found.sums * 3, 0.9, 0.0).gain) == bool(found.sums)


def test_a_device_behind_two_nodes_judges_once(tmp_path, caplog):
    deployment, network = world(tmp_path, number=3)
    network.participants[200] = Participant(Agent(network.participants[100].agent.folder))
    verdict = coordinator(deployment, network).attempt()["gate"]
    assert (verdict["devices"], verdict["events"], verdict["refused"]) == (3, 90, {"twice": 1})
    assert "has already judged in this round" in caplog.text


@pytest.mark.parametrize("estimator", ["ips", "dr"])
def test_one_liar_cannot_let_a_worse_model_pass(tmp_path, estimator):
    """It claims the most that it may: as many events as allowed, each with the largest gain."""
    deployment, network = world(tmp_path, given=gated({"estimator": estimator}))
    propose(network, WORSE)
    honest = coordinator(
        a_deployment(tmp_path / "honest", gated({"estimator": estimator})), network
    ).attempt()["gate"]
    largest = GainEstimator(estimator, LIMIT, 1.0).largest
    network.lies = {
        BAD: changed(events=1000, gain=1000 * largest, importance=1000.0, importance_squares=1000.0)
    }
    verdict = coordinator(deployment, network).attempt()["gate"]
    assert (verdict["refused"], verdict["devices"], verdict["events"]) == ({}, 12, 1330)
    assert (
        honest["gain"] < 0 < verdict["gain"]
    )  # the mean has been turned, as far as the bounds allow, ...
    assert verdict["gain"] - honest["gain"] <= 1000 * largest / 1330 + 30 / 360 * largest
    assert verdict["lower"] < 0
    assert not verdict["passes"]  # ... but not the verdict


def test_the_mean_alone_would_have_been_fooled():
    """Why a model must pass without any one device: a device with many events looks like a sure thing."""
    estimator = GainEstimator("ips", LIMIT, 1.0)
    own = {"token": "t", "version": 0, "importance": 1.0, "importance_squares": 1.0}
    honest = [
        (i, Reply("a", {**own, "device": str(i), "events": 30, "gain": -3.0})) for i in range(11)
    ]
    liar = (99, Reply("a", {**own, "device": "x", "events": 1000, "gain": 1000.0}))
    found = screen([*honest, liar], "t", 0, estimator, 1000).sums
    assert verdict_of(reduce(add, found), 0.9, 0.0).passes
    assert not without_any_one(found, 0.9, 0.0).passes
    assert without_any_one(found, 0.9, 0.0).lower == pytest.approx(-0.1)


def test_one_liar_can_hold_a_good_model_back(tmp_path):
    """The other way round there is no protection: who doubts, keeps what there is."""
    deployment, network = world(tmp_path)
    propose(network, GOOD)
    network.lies = {
        BAD: changed(events=1000, gain=-1000.0, importance=1000.0, importance_squares=1000.0)
    }
    assert not coordinator(deployment, network).attempt()["gate"]["passes"]


def test_devices_that_hold_another_version_or_no_events_say_so(tmp_path):
    deployment, network = world(tmp_path, number=5)
    ahead, empty = network.participants[100].agent, Agent(tmp_path / "empty")
    ahead.install(deployment.device_model(Version(deployment.initial), 7))
    propose(network, GOOD)
    network.participants[300] = Participant(empty)
    verdict = coordinator(deployment, network).attempt()["gate"]
    assert (verdict["asked"], verdict["devices"], verdict["behind"], verdict["idle"]) == (
        6,
        4,
        1,
        1,
    )
    assert verdict["events"] == 120


@pytest.mark.parametrize(("number", "rules", "least"), [(4, {"min_reports": 4}, 4), (3, {}, 3)])
def test_too_few_judges_hold_a_model_back(tmp_path, number, rules, least):
    deployment, network = world(tmp_path, number=number, events=60, given=gated(rules=rules))
    propose(network, GOOD)
    server = coordinator(deployment, network)
    network.lies = {BAD: lambda request, reply: []}
    verdict = server.attempt()["gate"]
    assert (verdict["devices"], verdict["passes"], server.version) == (least - 1, False, 0)
    assert verdict["gain"] > 0
    assert network.time() == pytest.approx(
        deployment.rules.round_seconds, abs=1
    )  # waited for as for a report
    network.lies = {}
    assert server.attempt()["gate"]["passes"]


def test_nobody_answers(tmp_path):
    deployment, network = world(tmp_path, number=3, events=4)
    network.lies = dict.fromkeys(network.participants, lambda request, reply: [])
    verdict = coordinator(deployment, network).attempt()["gate"]
    assert (verdict["passes"], verdict["gain"], verdict["lower"], verdict["devices"]) == (
        False,
        None,
        None,
        0,
    )
    assert lines_of(deployment)[0]["gate"] == verdict
    assert "held the model back" in "\n".join(in_lines(read_status(deployment.folder)))


def test_others_are_asked_than_those_that_train(tmp_path):
    deployment, network = world(tmp_path, number=8, events=4, given=gated({"clients": 5}))
    server = coordinator(
        deployment, network, select=lambda deployment, nodes, number: list(nodes)[:4]
    )
    verdict = server.attempt()["gate"]
    assert (verdict["asked"], verdict["trained"]) == (5, 1)
    judges = {request.node for request in network.sent if request.kind == "judge"}
    assert judges > {104, 105, 106, 107}
    assert len(judges) == 5


def test_judges_are_chosen_by_chance_among_the_others_first():
    chosen = [select_judges(range(100), range(40), 50) for _ in range(20)]
    assert all(len(set(nodes)) == 50 and min(nodes) >= 40 for nodes in chosen)
    assert len({tuple(sorted(nodes)) for nodes in chosen}) > 1
    assert set(select_judges(range(10), range(8), 64)) == set(range(10))


def test_a_server_killed_between_verdict_and_checkpoint_plays_the_round_again(
    tmp_path, monkeypatch
):
    deployment, network = world(tmp_path)
    propose(network, GOOD)
    store = Store(deployment.folder)
    server = coordinator(deployment, network, store)

    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(store, "checkpoint", die)
        with pytest.raises(Killed):
            server.attempt()
    assert network.sent[-1].kind == "judge"
    assert (server.version, server.state.round) == (0, 0)
    assert not (deployment.folder / "metrics.jsonl").exists()
    assert not (deployment.folder / "models" / "model-1.safetensors").exists()
    store.close()
    second = coordinator(deployment, network)
    metrics = second.attempt()
    assert (metrics["round"], metrics["events"], metrics["gate"]["passes"], second.version) == (
        1,
        360,
        True,
        1,
    )
    assert len({request.facts["token"] for request in network.sent if request.kind == "judge"}) == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (gated({"limit": None}), "gate.limit: missing"),
        (gated(policy={"name": "greedy"}), "gate: a policy that never explores"),
        (
            gated(policy={"name": "epsilon-greedy", "epsilon": 0}),
            "gate: a policy that never explores",
        ),
        (
            gated(rules={"secure_aggregation": True, "min_reports": 3}),
            "gate: not with deployment.secure_aggregation",
        ),
        (
            gated(
                privacy={"mechanism": "dp-fedavg", "noise_multiplier": 1.0},
                rules={"population": 500},
            ),
            "privacy.gate_share: missing",
        ),
        (gated({"clients": 2}), "gate.clients: at least 3"),
        (gated({"clients": 5}, rules={"min_reports": 6}), "gate.clients: at least 6"),
        (gated({"confidence": 1.5}), "gate.confidence"),
    ],
)
def test_gates_that_cannot_work_are_refused(tmp_path, given, message):
    with pytest.raises(ConfigError, match=message) as refused:
        a_deployment(tmp_path, given)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"estimator": "guess"}, "guess"),
        ({"limit": float("inf")}, "without a limit"),
        ({"limit": 10**400}, "without a limit"),
        ({"estimator": ["dr"]}, "estimator"),
        ({"rule": []}, "rule"),
        ({"rule": {"name": ["greedy"]}}, "rule"),
        ({"limit": None}, "without a limit"),
        ({"space": "elsewhere"}, "other actions or features"),
        ({"learning": {}}, "learning.client: missing"),
    ],
)
def test_a_device_says_what_it_cannot_judge(tmp_path, changes, said):
    deployment, network = world(tmp_path, number=1, events=4)
    coordinator(deployment, network).attempt()
    asked = network.sent[-1]
    assert asked.kind == "judge"
    facts, arrays = network.participants[100].answer(
        "judge", {**asked.facts, **changes}, asked.arrays
    )
    assert set(facts) == {"protocol", "token", "problem"}
    assert said in facts["problem"]
    assert arrays == {}


def test_over_flowers_own_messages_and_a_device_set_to_secure_sums_refuses(tmp_path, caplog):
    pytest.importorskip("flwr")
    from secure_builders import FIRST, a_network, a_server

    deployment, grid, participants = a_network(tmp_path, given=gated(), secure=False)
    server = a_server(deployment, grid)
    verdict = server.attempt()["gate"]
    assert (verdict["devices"], verdict["events"]) == (5, 30)
    before = [participant.agent.events() for participant in participants]
    grid.contexts[FIRST].node_config["secure-aggregation"] = True
    server._gatekeeper.judge(
        2, server.version, Version(server.state.weights), []
    )  # asked nothing else meanwhile
    assert (
        f"node {FIRST} refused: could not judge: this device takes part in secure sums only"
        in caplog.text
    )
    answers = {node: reply for node, step, reply in grid.received if step == "judge"}
    assert json.loads(answers[FIRST].content["facts"]["json"]).keys() == {
        "protocol",
        "token",
        "problem",
    }
    assert "gain" in json.loads(answers[FIRST + 1].content["facts"]["json"])
    assert [len(logged) for logged in before] == [
        len(participant.agent.events()) for participant in participants
    ]
