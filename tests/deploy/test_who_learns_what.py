"""Rows of the table *who learns what* in docs/privacy.md that no other test shows."""

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

pytest.importorskip("cryptography")

from transports import SECURE, in_process, step_of

from fedbandit.deploy import Agent
from fedbandit.deploy.device.participant import Participant
from fedbandit.deploy.device.secure_round import Identity
from fedbandit.deploy.masking import primitives as wire


def plain_site(folder, number=4, events=6):
    """Devices that have acted so often: the first as often as is asked for."""
    deployment = a_deployment(folder, values() | {"clients_per_round": number})
    network = Network(devices(folder, number))
    first, *_ = network.participants
    settle(deployment, {node: one for node, one in network.participants.items() if node != first})
    payload = deployment.device_model(deployment.start().deployed[0], 0).to_bytes()
    network.participants[first].agent.install(payload)
    live(network.participants[first], events=events, seed=99)
    return deployment, network


def test_a_user_has_their_own_log_and_the_models(tmp_path):
    """What a device keeps names no other; its model is the one that the server has deployed."""
    deployment, network = plain_site(tmp_path)
    server = coordinator(deployment, network)
    server.run(3)
    names = {reply.facts["device"] for reply in network.received if "update" in reply.arrays}
    assert len(names) == 4
    expected = deployment.device_model(server.state.deployed[1], 1)
    for participant in network.participants.values():
        folder, model = participant.agent.folder, participant.agent.model
        kept = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
        assert sum(name.encode() in kept for name in names) == 1  # its own
        assert model.version == 1
        for name, array in expected.weights.items():
            np.testing.assert_array_equal(model.weights[name], array)


def test_an_update_of_one_event_tells_its_context(tmp_path):
    """Of a linear model the gradient is the context, scaled, beside the chosen action."""
    deployment, network = plain_site(tmp_path, events=0)
    agent = next(iter(network.participants.values())).agent
    context = np.random.default_rng(99).random(len(WORDS)).astype(np.float32)
    agent.reward(agent.choose(context).event_id, 1.0)
    coordinator(deployment, network).attempt()
    (told,) = [one.arrays["update"] for one in network.received if one.facts.get("events") == 1]
    arrays = deployment.acting.layout.split(told).values()
    (moved,) = [array for array in arrays if array.shape[0] == len(WORDS)]  # [words, actions]
    moved = moved[:, np.abs(moved).sum(axis=0).argmax()]
    cosine = moved @ context / np.linalg.norm(moved) / np.linalg.norm(context)
    assert abs(cosine) > 0.9999


def test_readers_of_plain_models_and_metrics_have_exact_means_rewards_and_counts(tmp_path):
    deployment, network = plain_site(tmp_path)
    server = coordinator(deployment, network)
    before = server.state.weights.copy()
    metrics = server.attempt()
    sent = [reply for reply in network.received if "update" in reply.arrays]
    mean = np.mean([reply.arrays["update"] for reply in sent], axis=0)  # none is clipped
    assert metrics["unclipped"] == 1
    np.testing.assert_allclose(server.state.weights - before, mean, atol=1e-6)
    events, rewards = (
        sum(reply.facts[name] for reply in sent) for name in ("events", "reward_sum")
    )
    assert (metrics["clients"], metrics["events"]) == (4, events)
    assert metrics["reward"] == pytest.approx(rewards / events, rel=1e-12)


def test_a_server_of_secure_sums_is_told_who_takes_part_and_who_has_nothing_to_train_on(tmp_path):
    """One of them has never acted."""
    site = in_process(tmp_path, 5, values(**SECURE))
    idle, agent = site.nodes[4], Agent(tmp_path / "new")
    agent.install(site.participants[idle].agent.model)
    site.participants[idle] = Participant(agent, secure_only=True, identity=Identity(unsigned=True))
    site.server().attempt()
    told = {node: reply.facts for node, step, reply in site.transport.received if step == "ready"}
    assert {node: facts["ready"] for node, facts in told.items()} == {
        node: node != idle for node in site.nodes
    }
    assert len({facts["device"] for facts in told.values()}) == 5
    assert {facts["version"] for facts in told.values()} == {0}


def test_devices_know_their_neighbours_so_an_amplified_epsilon_does_not_hold_towards_them(tmp_path):
    """Numbers of neighbours come with the shares; the epsilon towards them stands in the status."""
    given = values(**SECURE, population=200, min_reach=0.0, max_dropout=0.0)
    given |= {"clients_per_round": 100, "rounds": 4}
    given["privacy"] = {"mechanism": "dp-fedavg", "noise_multiplier": 1.0, "delta": 1e-4}
    given["deployment"] |= {"min_reach": 1.0}
    deployment = a_deployment(tmp_path / "stated", given)
    found = deployment.spent(4, False)["privacy"]
    assert found["epsilon_if_cohorts_known"] > 1.3 * found["epsilon_rdp"]

    site = in_process(tmp_path, 5, values(**SECURE))
    site.server().attempt()
    asked = [request for request in site.transport.sent if step_of(request) == wire.SHARES]
    for request in asked:
        assert set(wire.read_parcels(request.sealed)) | {request.node} == set(site.nodes)
    assert len(asked) == 5
