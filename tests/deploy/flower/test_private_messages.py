"""A private deployment over Flower's own messages: plan, turns, figures and gate arrive as they were said."""

import pytest

pytest.importorskip("flwr")

from network_builders import values
from secure_builders import a_network, a_server

from fedbandit.deploy.device.device_identity import read_card


def test_a_private_round_with_figures_and_a_gate(tmp_path):
    privacy = {
        "mechanism": "dp-fedavg",
        "noise_multiplier": 0.05,
        "sampling": "fixed",
        "separation": None,
    }
    shares = {"figures_share": 0.3, "gate_share": 0.3}
    given = values(population=5, max_events=10) | {"clients_per_round": 5, "deploy_every": 1}
    given |= {"privacy": {**privacy, **shares}, "gate": {"confidence": 0.5, "limit": 10.0}}
    deployment, grid, participants = a_network(tmp_path, given=given, secure=False)
    metrics = a_server(deployment, grid).attempt()
    assert (metrics["clients"], metrics["refused"], metrics["gate"]["refused"]) == (5, {}, {})
    assert metrics["gate"]["devices"] == pytest.approx(5, abs=2)
    assert metrics["events"] == pytest.approx(30, abs=10)
    for participant in participants:
        account = read_card(participant.agent.folder / "device.json").private
        assert (account.taken, account.last, account.judged) == (1, 1, 1)
        assert account.agreed.rounds == deployment.rounds
