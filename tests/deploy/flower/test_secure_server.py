"""Secure aggregation: what the server refuses, and what a configuration cannot ask for."""

import logging

import numpy as np
import pytest
from network_builders import Network, a_deployment, coordinator, values

pytest.importorskip("flwr")

from secure_builders import (
    FIRST,
    READY,
    SHARES,
    SURVIVORS,
    TRAINING,
    UNMASKING,
    a_network,
    a_server,
    secure_values,
)

from fedbandit.core.errors import ConfigError
from fedbandit.deploy.flower.transport import SEALED
from fedbandit.deploy.masking import primitives as wire
from fedbandit.deploy.masking.primitives import packed, unpacked
from fedbandit.deploy.server.store import Store


def replaced(name, change):
    """A fault that changes one value of an answer."""

    def fault(reply):
        sealed = reply.content.config_records[SEALED]
        sealed[name] = change(sealed[name])

    return fault


def added(what):
    """A fault that adds numbers to the masked entries of an answer."""
    return replaced(
        wire.MASKED,
        lambda vector: packed(unpacked(vector) + what(len(unpacked(vector))).astype(np.uint64)),
    )


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda size: np.eye(1, size, 28, dtype=int)[0], "6 devices are in it"),
        (lambda size: 2**38 * (np.arange(size) < 20), "norm"),
    ],
)
def test_a_sum_that_honest_devices_cannot_come_to_is_refused_as_a_whole(
    tmp_path, caplog, what, message
):
    deployment, grid, _ = a_network(tmp_path)
    grid.broken = {(FIRST, TRAINING): added(what)}
    server = a_server(deployment, grid)
    assert server.attempt() is None
    assert "the sum is refused" in caplog.text
    assert message in caplog.text
    grid.broken = {}
    assert server.attempt()["clients"] == 0
    assert "its sum was unmasked before, and is lost" in caplog.text
    assert server.attempt()["events"] == 30


@pytest.mark.parametrize(
    ("step", "fault", "kind", "left"),
    [
        (
            READY,
            replaced(wire.ANNOUNCEMENT, lambda said: said[:-1]),
            "keys: an announcement of 127 bytes",
            4,
        ),
        (READY, replaced(wire.ANNOUNCEMENT, lambda said: 7), "keys: announcement: no bytes", 4),
        (
            READY,
            replaced(wire.ANNOUNCEMENT, lambda said: said[:32] + said[:96]),
            "keys: one key stands for two",
            4,
        ),
        (
            READY,
            replaced(wire.ANNOUNCEMENT, lambda said: said + bytes(300)),
            "keys: neither a node's public key",
            4,
        ),
        (
            SHARES,
            replaced(wire.NODES, lambda nodes: nodes[:-1]),
            "garbage: shares: parcels: 4 for 3 nodes",
            4,
        ),
        (
            SHARES,
            replaced(wire.NODES, lambda nodes: [nodes[0], *nodes[:-1]]),
            "garbage: shares: nodes: a node st",
            4,
        ),
        (
            SHARES,
            replaced(wire.NODES, lambda nodes: [FIRST, *nodes[1:]]),
            "garbage: shares: parcels for others",
            4,
        ),
        (
            SHARES,
            replaced(wire.PARCELS, lambda found: [b"", *found[1:]]),
            "garbage: shares: parcels: not of 82",
            4,
        ),
        (
            TRAINING,
            replaced(wire.MASKED, lambda vector: vector[:-1]),
            "garbage: training: a masked vector of 144",
            4,
        ),
        (
            TRAINING,
            replaced(wire.MASKED, lambda vector: 0.5),
            "garbage: training: vector: no bytes",
            4,
        ),
        (
            SHARES,
            replaced(wire.STATEMENT, lambda said: said[:-1]),
            "garbage: shares: statement: no bytes, or not 96",
            4,
        ),
        (
            SURVIVORS,
            replaced(wire.STATEMENT, lambda said: 7),
            "garbage: survivors: statement: no bytes",
            5,
        ),
        (
            UNMASKING,
            replaced(wire.PARCELS, lambda found: [b"", *found[1:]]),
            "garbage: unmasking: parcels: not of",
            5,
        ),
        (
            UNMASKING,
            replaced(wire.NODES, lambda nodes: ["x"] * 5),
            "garbage: unmasking: nodes: not the numbers",
            5,
        ),
    ],
)
def test_a_device_whose_answer_is_garbage_is_left_out(tmp_path, caplog, step, fault, kind, left):
    deployment, grid, _ = a_network(tmp_path)
    grid.broken = {(FIRST, step): fault}
    metrics = a_server(deployment, grid).attempt()
    assert (metrics["clients"], metrics["refused"]) == (left, {kind.partition(":")[0]: 1})
    assert f"node {FIRST} refused: {kind}" in caplog.text


@pytest.mark.parametrize("lost", [set(), {(FIRST + 4, TRAINING)}])
def test_a_wrong_share_gives_up_the_attempt(tmp_path, caplog, lost):
    """Of the seed of somebody's own mask, or of the key of somebody who has dropped out."""
    about = FIRST + 4 if lost else FIRST + 1

    def wrong(reply):
        sealed = reply.content.config_records[SEALED]
        place = sealed[wire.NODES].index(about)
        sealed[wire.PARCELS] = [
            bytes([*share[:-1], share[-1] ^ 1]) if i == place else share
            for i, share in enumerate(sealed[wire.PARCELS])
        ]

    deployment, grid, _ = a_network(tmp_path)
    grid.lost = lost
    grid.broken = {(FIRST, UNMASKING): wrong}
    server = a_server(deployment, grid)
    assert server.attempt() is None
    assert f"no secure sum: the shares of node {about}'s secret do not recover it" in caplog.text
    assert server.state.round == 0
    grid.broken = {}
    assert server.attempt()["clients"] == 0
    assert server.attempt()["clients"] == 5 - len(lost)


def test_a_device_that_seals_garbage_gives_up_the_attempt(tmp_path, caplog):
    """Its neighbours find out, and are lost with it."""
    deployment, grid, _ = a_network(tmp_path)
    grid.broken = {
        (FIRST, SHARES): replaced(
            wire.PARCELS, lambda found: [bytes(len(parcel)) for parcel in found]
        )
    }
    assert a_server(deployment, grid).attempt() is None
    assert (
        caplog.text.count(
            "training: a packet that its sender did not seal for this device in this round"
        )
        == 4
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"clients_per_round": 2**18}, "clients_per_round: at most 262143 devices"),
        ({"deployment": secure_values(min_reports=2)["deployment"]}, "deployment.min_reports"),
        ({"deployment": secure_values(report_goal=59)["deployment"]}, "deployment.report_goal"),
        (
            {"deployment": secure_values(secure_threshold=0.5)["deployment"]},
            "deployment.secure_threshold",
        ),
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
    from fedbandit.deploy.server.status import in_lines, read_status

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
