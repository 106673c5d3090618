"""A deployment with another algorithm, frozen parameters or a schedule; and what devices do not do yet."""

import numpy as np
import pytest
from network_builders import Network, a_deployment, coordinator, devices, live, settle, values

from fedbandit.algorithms import FedProx
from fedbandit.core.errors import ConfigError
from fedbandit.deploy import DeviceModel
from fedbandit.federated.algorithm import Clients
from fedbandit.federated.learners.base import ClientSettings
from fedbandit.federated.pipeline import Pipeline
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
    assert rule.mu == 3
    progress = server.state.deployed[1].progress
    assert (progress.version, progress.rounds, progress.actions) == (1, 2, 3)
    assert progress.events == 36  # six of each device before each of the two rounds


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"algorithm": {"name": "scaffold"}}, "algorithm.name: scaffold sends or remembers more"),
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
