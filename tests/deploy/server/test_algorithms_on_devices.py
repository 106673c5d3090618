"""A deployment with another algorithm, frozen parameters or a schedule; and what devices do not do yet."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from network_builders import (
    WORDS,
    Network,
    a_deployment,
    coordinator,
    devices,
    live,
    settle,
    values,
)

from fedbandit.algorithms import FedProx
from fedbandit.core.errors import ConfigError
from fedbandit.core.prediction import Progress
from fedbandit.deploy import Agent, DeviceModel
from fedbandit.deploy.device.participant import Participant
from fedbandit.deploy.device.training import DeviceMemory
from fedbandit.federated.algorithm import Clients, RoundFacts
from fedbandit.federated.learners.base import ClientSettings
from fedbandit.federated.pipeline import Pipeline
from fedbandit.federated.state import Version
from fedbandit.objectives import Regression
from fedbandit.policies import Falcon, Uniform


def _with(**changed):
    return {**values(), **changed}


def test_fedprox_on_devices_is_fedprox(tmp_path):
    client = {"learning_rate": 0.1, "batch_size": 4, "epochs": 3}
    given = _with(
        algorithm={"name": "fedprox", "mu": 2.0},
        client=client,
        clipping={"norm": 100.0},
        dtype="float64",
    )
    deployment = a_deployment(tmp_path, given)
    network = Network(devices(tmp_path, 3))
    settle(deployment, network.participants)
    server = coordinator(deployment, network)
    server.attempt()
    algorithm, start = FedProx(None, mu=2.0), deployment.initial
    learner = deployment.trainable.learner(Regression(), ClientSettings(**client))
    total = np.zeros_like(start)
    for participant in network.participants.values():
        own = Clients(np.zeros(1, np.int64), participant.agent.events().events, 0, 0)
        algorithm.train(learner, {"weights": start}, own, Pipeline(100.0)).sums["weights"].add_to(
            total
        )
    np.testing.assert_allclose(server.state.weights, start + total / 3, rtol=0, atol=1e-12)
    assert np.abs(total).max() > 1e-3


def test_diag_newton_on_devices_is_diag_newton(tmp_path):
    given = _with(
        algorithm={"name": "diag-newton", "rate": 0.3},
        policy={"name": "softmax", "beta": 0.1, "alpha": 0.2},
        clipping={"norm": 50.0},
        dtype="float64",
    )
    deployment = a_deployment(tmp_path, given)
    network = Network(devices(tmp_path, 3))
    settle(deployment, network.participants)
    server, size = coordinator(deployment, network), deployment.trainable.layout.size
    expected = server.state.weights
    algorithm = deployment.algorithm
    totals = {name: np.zeros(size) for name in algorithm.sends}
    for participant in network.participants.values():
        own = Clients(np.zeros(1, np.int64), participant.agent.events().events, 0, 0)
        sent = algorithm.train(None, {"weights": deployment.initial}, own, Pipeline(50.0))
        for name, total in totals.items():
            sent.sums[name].add_to(total)
    server.attempt()
    means = {name: total / 3 for name, total in totals.items()}
    expected = algorithm.step({"model": expected}, means, RoundFacts(1, 3, 3))["model"]
    np.testing.assert_allclose(server.state.weights, expected, rtol=0, atol=1e-9)
    assert np.abs(np.split(expected, 2)[0]).max() > 1e-3
    server.attempt()
    server.attempt()  # installs version 1
    agent = next(iter(network.participants.values())).agent
    assert agent.model.version == 1
    assert agent.model.model["name"] == "linear-width"
    assert len(agent.model.weights["bias_precision"]) == 3


STATISTICS = {
    "algorithm": {"name": "statistics", "prior": 0.5},
    "policy": {"name": "ucb", "alpha": 0.7},
    "clipping": {"norm": 1000.0},
    "dtype": "float64",
}


def _ridge(participants, prior=0.5):
    """θ of ridge regression for each action on all events in one place."""
    events = [participant.agent.events().events for participant in participants]
    x, actions, rewards = (
        np.concatenate([getattr(own, name) for own in parts])
        for name, parts in (
            ("shared", [own.contexts for own in events]),
            ("actions", events),
            ("rewards", events),
        )
    )
    x = x.astype(np.float64)
    x = np.c_[x / np.linalg.norm(x, axis=1, keepdims=True), np.ones(len(x))]
    theta = []
    for action in range(3):
        own = x[actions == action]
        a = prior * np.eye(x.shape[1]) + own.T @ own
        theta.append(np.linalg.solve(a, own.T @ rewards[actions == action]))
    return np.array(theta), len(x)


def test_statistics_on_devices_are_ridge_regression_and_each_event_counts_once(tmp_path):
    deployment = a_deployment(tmp_path, _with(**STATISTICS, deploy_every=1))
    network = Network(devices(tmp_path, 3))
    settle(deployment, network.participants)
    server = coordinator(deployment, network)
    for attempt in range(3):
        server.attempt()
        expected, number = _ridge(network.participants.values())
        assert number == 18 * (attempt + 1)
        theta = deployment.acting.layout.split(server.state.weights)["theta"]
        np.testing.assert_allclose(theta, expected, rtol=0, atol=1e-9)
        for i, participant in enumerate(network.participants.values()):
            live(participant, seed=10 * attempt + i)
    agent = next(iter(network.participants.values())).agent
    assert agent.model.model["name"] == "linear-statistics"
    used = agent._used()
    width = used.actor.predict(used.encode(np.ones(7))).width
    assert width.shape == (1, 3)
    assert (width > 0).all()
    x = np.append(np.ones(7) / np.sqrt(7), 1.0)
    inverse = [root.T @ root for root in agent.model.weights["root"]]
    np.testing.assert_allclose(width[0] ** 2, [x @ own @ x for own in inverse], atol=1e-12)


def test_statistics_that_a_lost_reply_carried_are_sent_again(tmp_path):
    deployment = a_deployment(tmp_path, _with(**STATISTICS))
    network = Network(devices(tmp_path, 3))
    settle(deployment, network.participants)
    network.faults[101] = lambda request, reply: []
    server = coordinator(deployment, network)
    server.attempt()
    network.faults.clear()
    server.attempt()
    expected, _ = _ridge(network.participants.values())
    theta = deployment.acting.layout.split(server.state.weights)["theta"]
    np.testing.assert_allclose(theta, expected, rtol=0, atol=1e-9)


def test_statistics_learn_on_from_a_version_that_was_gone_back_to(tmp_path):
    deployment = a_deployment(tmp_path, _with(**STATISTICS))
    network = Network(devices(tmp_path, 3))
    settle(deployment, network.participants)
    server = coordinator(deployment, network)
    server.attempt()
    version = Version(server.state.weights, Progress(actions=3))
    restored = deployment.kept_from(version)
    for name in ("outer", "products"):
        np.testing.assert_allclose(restored[name], server.state.server_state[name], atol=1e-9)
    np.testing.assert_allclose(
        deployment.algorithm.model(restored)[:24], version.weights[:24], atol=1e-9
    )


def test_private_statistics_have_noise_and_a_shift_of_its_size(tmp_path):
    privacy = {"mechanism": "dp-fedavg", "noise_multiplier": 1.0}
    given = _with(**{**STATISTICS, "clipping": {"norm": 5.0}}, privacy=privacy)
    given["deployment"] |= {"population": 1000, "min_reach": 0.0}
    deployment = a_deployment(tmp_path, given)
    network = Network(devices(tmp_path, 3))
    settle(deployment, network.participants)
    server = coordinator(deployment, network)
    assert server.attempt() is not None
    outer = server.state.server_state["outer"]
    np.testing.assert_allclose(outer, outer.transpose(0, 2, 1))
    assert np.linalg.eigvalsh(outer).min() < -1  # 18 events against noise of a clip norm of 5
    assert deployment.algorithm.shift(1) == pytest.approx(1.1 * 5.0 * np.sqrt(2 * 8))
    root = deployment.acting.layout.split(server.state.weights)["root"]
    assert np.isfinite(root).all()


def _personal(tmp_path, monkeypatch):
    """Three devices under the algorithm of the documentation that gives each its own bias."""
    page = (Path(__file__).parents[3] / "docs" / "your-own-parts.md").read_text(encoding="utf-8")
    source = page.split("<!-- file: my_personal.py -->\n```python\n")[1].split("```")[0]
    (tmp_path / "my_personal.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "my_personal:PersonalBias"
    given = _with(algorithm={"name": name, "prior": 2.0}, dtype="float64", deploy_every=1)
    (tmp_path / "words.txt").write_text("\n".join(WORDS), encoding="utf-8")
    del given["deployment"]["shape"]
    given["deployment"]["vocabulary"] = "words.txt"
    agents = [
        Agent(tmp_path / f"own-{i}", uniform=np.random.default_rng(i).random, trusted=[name])
        for i in range(3)
    ]
    participants = {100 + i: Participant(agent, trusted=[name]) for i, agent in enumerate(agents)}
    return a_deployment(tmp_path, given), participants


def _use(participant, wanted, events=6, seed=0):
    """A user who likes one action alone."""
    rng = np.random.default_rng(seed)
    for _ in range(events):
        ids = np.sort(rng.choice(7, 3, replace=False))
        decision = participant.agent.choose((ids, np.full(3, 3**-0.5)))
        participant.agent.reward(decision.event_id, float(decision.action == wanted))


def test_a_device_acts_with_its_own_part_which_is_never_sent(tmp_path, monkeypatch):
    deployment, participants = _personal(tmp_path, monkeypatch)
    payload = deployment.device_model(deployment.start().deployed[0], 0).to_bytes()
    for wanted, participant in enumerate(participants.values()):
        participant.agent.install(payload)
        _use(participant, wanted)
    network = Network(participants)
    server = coordinator(deployment, network)
    before = {node: p.agent.events().events for node, p in participants.items()}
    shared = deployment.trainable.layout.split(server.state.weights)
    server.attempt()
    for node, participant in participants.items():
        agent, events = participant.agent, before[node]
        memory = agent.folder / "memory.safetensors"
        assert memory.stat().st_mode & 0o777 == 0o600
        x, row = events.contexts.shared, events.contexts.shared.row_of_entry()
        weights = shared["weight"][x.ids, events.actions[row]]
        scores = np.bincount(row, x.values * weights) + shared["bias"][events.actions]
        counts = np.bincount(events.actions, minlength=3)
        errors = np.bincount(events.actions, events.rewards - scores, 3)
        deployed = np.asarray(agent.model.weights["bias"])
        acting = deployment.trainable.layout.split(agent._used().actor.weights)["bias"]
        np.testing.assert_allclose(acting, deployed + errors / (2.0 + counts), atol=1e-12)
    sent = [reply for reply in network.received if "update" in reply.arrays]
    assert {name for reply in sent for name in reply.arrays} == {"update"}
    assert {reply.arrays["update"].size for reply in sent} == {deployment.trainable.layout.size}


def test_a_personal_part_survives_a_restart_and_counts_each_event_once(tmp_path, monkeypatch):
    deployment, participants = _personal(tmp_path, monkeypatch)
    payload = deployment.device_model(deployment.start().deployed[0], 0).to_bytes()
    for wanted, participant in enumerate(participants.values()):
        participant.agent.install(payload)
        _use(participant, wanted)
    network = Network(participants)
    lost = participants[101].agent
    network.faults[101] = lambda request, reply: []
    server = coordinator(deployment, network)
    server.attempt()
    memory = DeviceMemory(lost.memory)
    once = memory.latest()[1]["tables"]
    assert once[:3].sum() == 6
    network.faults.clear()
    server.attempt()  # the server never heard of those events, and asks for them again
    again = memory.latest()[1]["tables"]
    assert again[:3].sum() == 6
    _use(participants[101], 1, seed=9)
    server.attempt()
    assert memory.latest()[1]["tables"][:3].sum() == 12
    own = lost._used().actor.weights
    lost.close()
    with Agent(lost.folder, trusted=["my_personal:PersonalBias"]) as reopened:
        assert np.array_equal(reopened._used().actor.weights, own)
        assert not np.array_equal(
            own, deployment.trainable.layout.flatten(dict(reopened.model.weights), own.dtype)
        )


@pytest.mark.parametrize("part", ["bias", "last-layer"])
def test_the_built_in_personal_part_is_the_simulators_and_stays_on_its_device(tmp_path, part):
    settings = {"name": "personal", "part": part, "least": 6, "prior": 1.0}
    client = {"learning_rate": 0.5, "batch_size": 4}
    given = _with(algorithm=settings, client=client, dtype="float64", deploy_every=1, rounds=9)
    deployment = a_deployment(tmp_path, given)
    participants = devices(tmp_path, 3)
    payload = deployment.device_model(deployment.start().deployed[0], 0).to_bytes()
    for participant in participants.values():
        participant.agent.install(payload)
    network = Network(participants)
    server = coordinator(deployment, network)
    learner = deployment.trainable.learner(Regression(), ClientSettings(**client))
    remembered, seen = {node: {} for node in participants}, dict.fromkeys(participants, 0)
    for number in range(6):
        for wanted, participant in enumerate(participants.values()):
            _like(participant, wanted, events=8, seed=10 * number + wanted)
        weights = deployment.received(server.state)
        for node, participant in participants.items():
            logged = participant.agent.events().events
            new = logged.where(np.arange(len(logged)) >= seen[node])
            own = Clients(
                np.zeros(1, np.int64), new, 0, 0, {0: remembered[node]} if number else {},
                predictor=deployment.acting.predictor(),
            )  # fmt: skip
            found = deployment.algorithm.train(learner, {"weights": weights}, own, Pipeline(1.0))
            remembered[node], seen[node] = found.memory[0], len(logged)
        assert server.attempt() is not None
    size, adopted = deployment.algorithm.size, 0
    for node, participant in participants.items():
        agent = participant.agent
        assert agent.memory.stat().st_mode & 0o777 == 0o600
        kept = DeviceMemory(agent.memory).latest()[1]
        for name, expected in remembered[node].items():
            np.testing.assert_allclose(kept[name], np.asarray(expected), atol=1e-9)
        deployed = deployment.trainable.layout.flatten(dict(agent.model.weights), np.float64)
        used = agent._used().actor.weights - deployed
        expected = kept["part"] * kept["record"][2]
        np.testing.assert_allclose(used[-size:], expected, atol=1e-12)
        assert not used[:-size].any()
        adopted += int(kept["record"][2])
    assert adopted  # and so what was compared is more than zeros
    sent = [reply for reply in network.received if "update" in reply.arrays]
    assert {name for reply in sent for name in reply.arrays} == {"update"}
    assert {reply.arrays["update"].size for reply in sent} == {deployment.trainable.layout.size}
    assert not any("gain" in fact for reply in sent for fact in reply.facts)


def _like(participant, wanted, events, seed):
    """A user who likes one action alone, whatever the features."""
    rng = np.random.default_rng(seed)
    for _ in range(events):
        decision = participant.agent.choose(rng.random(len(WORDS)))
        participant.agent.reward(decision.event_id, float(decision.action == wanted))


_KEEPS = """
import sys
from pathlib import Path
import numpy as np
from fedbandit.deploy.device.training import DeviceMemory
memory = DeviceMemory(Path(sys.argv[1]))
(mark, *_) = [*map(int, sys.argv[2:]), 0]
while True:
    memory.keep(mark, mark + 1, {"part": np.full(50_000, mark + 1.0)}, {"space": "s"})
    mark += 1
    print(mark, flush=True)
"""


def test_a_killed_device_has_its_part_from_before_or_after_a_change(tmp_path):
    memory, mark = DeviceMemory(tmp_path / "memory.safetensors"), 0
    for kill in range(4):
        command = [sys.executable, "-c", _KEEPS, str(memory.path), str(mark)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as keeping:
            said = [int(keeping.stdout.readline()) for _ in range(3 + kill)]
            time.sleep(0.003 * kill)
            keeping.kill()
            said += map(int, keeping.stdout.read().splitlines())
        told, kept = memory.latest()
        mark = int(kept["part"][0])
        assert said[-1] <= mark <= said[-1] + 1  # the last that was said to be kept, or the next
        assert told == {"space": "s"}
        assert (kept["part"] == mark).all()
        assert (memory.at(mark - 1)["part"] == mark - 1).all()


def test_a_damaged_memory_is_said_and_the_device_acts_with_the_shared_model(
    tmp_path, monkeypatch, caplog
):
    deployment, participants = _personal(tmp_path, monkeypatch)
    agent = participants[100].agent
    agent.install(deployment.device_model(deployment.start().deployed[0], 0))
    agent.memory.write_bytes(b"garbage")
    assert agent.choose(([1, 2], [0.5, 0.5])).logged
    said = [record.message for record in caplog.records]
    assert sum("without this device's own weights" in line for line in said) == 1
    assert "memory.safetensors: damaged" in "".join(said)


def test_frozen_parameters_are_neither_sent_nor_moved_and_stand_once_in_the_device_file(tmp_path):
    given = _with(model={"name": "mlp", "hidden": 6, "freeze": ["dense1"]})
    deployment = a_deployment(tmp_path, given)
    network = Network(devices(tmp_path, 3))
    settle(deployment, network.participants)
    server = coordinator(deployment, network)
    for _ in range(2):
        server.attempt()
    layout, trained = deployment.trainable.layout, 6 * 3 + 3
    asked = [request for request in network.sent if request.kind == "train"]
    assert {request.arrays["weights"].size for request in asked} == {trained}
    assert {
        reply.arrays["update"].size for reply in network.received if "update" in reply.arrays
    } == {trained}
    before, after = layout.split(deployment.initial), layout.split(server.state.weights)
    for name in before:
        assert np.array_equal(before[name], after[name]) == name.startswith("dense1")
    payload = (deployment.folder / "models" / "model-1.safetensors").read_bytes()
    model = DeviceModel.from_bytes(payload, "model")
    assert set(model.weights) == {"dense1", "dense1_bias", "dense2", "dense2_bias"}
    assert len(payload) < 4 * layout.size + 4096


def test_a_schedule_ships_the_rule_of_each_version(tmp_path):
    deployment = a_deployment(tmp_path, _with(policy={"name": "falcon-schedule"}))
    network = Network(devices(tmp_path, 3))
    settle(deployment, network.participants)
    first = next(iter(network.participants.values())).agent
    assert first.policy == Uniform()
    server = coordinator(deployment, network)
    for _ in range(2):
        server.attempt()
        for i, participant in enumerate(network.participants.values()):
            live(participant, seed=50 + i)
    server.attempt()  # installs version 1
    rule = first.policy
    assert isinstance(rule, Falcon)
    assert rule.mu is None  # as many as the decision has
    progress = server.state.deployed[1].progress
    assert (progress.version, progress.rounds, progress.actions) == (1, 2, 3)
    assert progress.events == 36  # six of each device before each of the two rounds


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"algorithm": {"name": "scaffold"}},
            "algorithm.name: scaffold broadcasts more than the weights",
        ),
        ({"algorithm": {"name": "diag-newton"}, "clipping": {}}, "clipping.norm: missing"),
        ({"compression": {"name": "quantize"}}, "compression.name: devices do not compress"),
        (
            {"model": {"name": "mlp", "freeze": ["dense9"]}},
            "model.freeze: the model has no parameter",
        ),
    ],
)
def test_what_devices_do_not_do_is_refused(tmp_path, changed, words):
    with pytest.raises(ConfigError, match=words):
        a_deployment(tmp_path, _with(**changed))
