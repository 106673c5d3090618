"""Secure aggregation: what the server refuses, and what a configuration cannot ask for."""

import logging

import numpy as np
import pytest
from network_builders import Network, a_deployment, coordinator, values

pytest.importorskip("flwr")

from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.secaggplus_constants import Key
from secure_builders import FIRST, TRAINING, UNMASKING, a_network, a_server, secure_values

from fedbandit.core.errors import ConfigError
from fedbandit.deploy.flower.transport import SEALED
from fedbandit.deploy.server.store import Store


def replaced(change):
    """A fault that changes the masked entries of an answer."""

    def fault(reply):
        from flwr.common import ndarray_to_bytes

        weight, entries = (
            bytes_to_ndarray(part) for part in reply.content.config_records[SEALED][Key.MASKED_PARAMETERS]
        )
        parts = change(weight, entries)
        reply.content.config_records[SEALED][Key.MASKED_PARAMETERS] = [ndarray_to_bytes(part) for part in parts]

    return fault


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weight, entries: (weight, entries + np.eye(1, len(entries), 28, dtype=int)[0]), "6 devices are in it"),
        (lambda weight, entries: (weight, entries + 2**38 * (np.arange(len(entries)) < 20)), "norm"),
        (lambda weight, entries: (weight * 2, entries), "did not weigh one each"),
    ],
)
def test_a_sum_that_honest_devices_cannot_come_to_is_refused_as_a_whole(tmp_path, caplog, change, message):
    deployment, grid, _ = a_network(tmp_path)
    grid.broken = {(FIRST, TRAINING): replaced(change)}
    server = a_server(deployment, grid)
    assert server.attempt() is None
    assert "the sum is refused" in caplog.text
    assert message in caplog.text
    grid.broken = {}
    assert server.attempt()["events"] == 30


@pytest.mark.parametrize(
    "change",
    [
        lambda weight, entries: (weight, entries[:-1]),
        lambda weight, entries: (weight, entries.astype(np.float64)),
        lambda weight, entries: (weight,),
    ],
)
def test_a_device_whose_masked_vector_is_garbage_is_left_out(tmp_path, caplog, change):
    deployment, grid, _ = a_network(tmp_path)
    grid.broken = {(FIRST, TRAINING): replaced(change)}
    metrics = a_server(deployment, grid).attempt()
    assert (metrics["clients"], metrics["refused"]) == (4, {"garbage": 1})
    assert f"node {FIRST} refused: garbage: training: " in caplog.text


def test_a_wrong_share_gives_up_the_attempt(tmp_path, caplog):
    def wrong(reply):
        sealed = reply.content.config_records[SEALED]
        sealed[Key.SHARE_LIST] = [share[:4] + bytes(len(share) - 4) for share in sealed[Key.SHARE_LIST]]

    deployment, grid, _ = a_network(tmp_path)
    grid.broken = {(FIRST, UNMASKING): wrong}
    server = a_server(deployment, grid)
    assert server.attempt() is None
    assert "no secure sum" in caplog.text
    assert server.state.round == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"clients_per_round": 2**18}, "clients_per_round: at most 262143 devices"),
        ({"deployment": secure_values(min_reports=2)["deployment"]}, "deployment.min_reports"),
        ({"deployment": secure_values(report_goal=59)["deployment"]}, "deployment.report_goal"),
        ({"deployment": secure_values(secure_threshold=0.5)["deployment"]}, "deployment.secure_threshold"),
        ({"deployment": secure_values(max_events=2**22)["deployment"]}, "deployment.max_events"),
        (
            {
                "privacy": {"mechanism": "dp-fedavg", "noise_multiplier": 1.0},
                "deployment": secure_values(population=500)["deployment"],
            },
            "deployment.min_reports: a draw of fewer than 3 devices is drawn anew",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, given, message):
    with pytest.raises(ConfigError, match=message):
        a_deployment(tmp_path, {**secure_values(), **given})


def test_a_living_deployment_does_not_change_to_or_from_secure_sums(tmp_path):
    deployment, grid, _ = a_network(tmp_path)
    store = Store(deployment.folder)
    a_server(deployment, grid, store)
    store.close()
    with pytest.raises(ConfigError, match="was started with different secure aggregation"):
        coordinator(a_deployment(tmp_path, values()), Network({}))


def test_status_says_that_it_is_on(tmp_path):
    from fedbandit.deploy.server.store import in_lines, read_status

    deployment, grid, _ = a_network(tmp_path)
    a_server(deployment, grid).attempt()
    status = read_status(deployment.folder)
    assert status["secure_aggregation"] is True
    assert "aggregation    secure: only sums are seen here" in in_lines(status)
    assert status["devices"] == 5


def test_a_report_goal_ends_the_training_step(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    deployment, grid, _ = a_network(
        tmp_path, given={**secure_values(report_goal=4, round_seconds=1e6), "clients_per_round": 5}
    )
    grid.lost = {(FIRST, TRAINING)}
    assert a_server(deployment, grid).attempt()["clients"] == 4
