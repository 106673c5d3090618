"""Where several devices belong to one person, turns and epsilon belong to the person."""

from collections import Counter

import pytest
from network_builders import Network, a_deployment, coordinator, devices, settle, values
from secure_builders import SECURE, a_network, a_server

from fedbandit.core.errors import ConfigError, DataError
from fedbandit.deploy.device.device_identity import name_user, read_card
from fedbandit.deploy.messages import is_name
from fedbandit.deploy.server.database import user_key
from fedbandit.deploy.server.gathering import one_of_each, select
from fedbandit.deploy.server.status import in_lines, read_status
from fedbandit.deploy.server.store import Store, read_facts
from fedbandit.privacy.reporting import assumptions

OWNERS = {100: "ann", 101: "ann", 102: "bob", 103: "bob"}


def private(folder, unit="user", rounds=9, rules=None, **privacy):
    given = {
        "mechanism": "dp-ftrl",
        "noise_multiplier": 1.0,
        "sampling": "min-separation",
        "separation": 3,
        **privacy,
    }
    chosen = {"rounds": rounds, "clients_per_round": 2, "privacy": {**given, "unit": unit}}
    return a_deployment(folder, values(population=6, min_reach=0.0, **(rules or {})) | chosen)


def world(folder, deployment, owners=OWNERS):
    network = Network(devices(folder, 4))
    settle(deployment, network.participants)
    for node, user in owners.items():
        name_user(network.participants[node].agent.folder, user)
    return network


def trained(network):
    """The nodes that were asked to train, round by round."""
    asked = {}
    for request in network.sent:
        if request.kind == "train":
            asked.setdefault(request.facts["round"], []).append(request.node)
    return asked


def test_one_device_of_each_user_takes_part_and_the_user_rests(tmp_path):
    deployment = private(tmp_path)
    network = world(tmp_path, deployment)
    store = Store(deployment.folder)
    server = coordinator(deployment, network, store)
    clients = [server.attempt()["clients"] for _ in range(7)]
    assert clients == [2, 0, 0, 2, 0, 0, 2]
    asked = trained(network)
    assert all(sorted(OWNERS[node] for node in nodes) == ["ann", "bob"] for nodes in asked.values())
    assert set(asked) == {1, 4, 7}
    turns = store.marks([user_key("ann"), user_key("bob")])
    assert {mark.turn for mark in turns.values()} == {7}
    store.close()
    status = read_status(deployment.folder)
    devices = {node for nodes in asked.values() for node in nodes}
    assert read_facts(deployment.folder)["devices"] == len(devices)  # users are not counted
    assert status["devices"] is None
    assert "one user with all of their devices and data" in "\n".join(in_lines(status))


def test_a_users_turn_is_remembered_after_a_restart(tmp_path):
    deployment = private(tmp_path)
    network = world(tmp_path, deployment)
    for expected in ([2], [0], [0], [2]):
        store = Store(deployment.folder)
        assert [coordinator(deployment, network, store).attempt()["clients"]] == expected
        store.close()


def test_devices_whose_user_nobody_has_named_are_not_asked(tmp_path):
    deployment = private(tmp_path)
    network = world(tmp_path, deployment, {100: "ann"})
    metrics = coordinator(deployment, network).attempt()
    assert (metrics["asked"], metrics["clients"], trained(network)) == (1, 1, {1: [100]})


def test_a_second_device_of_a_user_is_refused_at_the_door(tmp_path, caplog):
    """Even if it was asked: two at once, or one in a round of the user's rest."""
    deployment = private(tmp_path)
    network = world(tmp_path, deployment)
    asked = {1: [100, 102], 2: [101, 103], 4: list(OWNERS)}
    server = coordinator(
        deployment, network, select=lambda deployment, nodes, number: asked.get(number, [])
    )
    first, second, _, fourth = (server.attempt() for _ in range(4))
    assert (first["clients"], first["refused"]) == (2, {})
    assert (second["clients"], second["refused"]) == (0, {"not its turn": 2})
    # in round 4, those of round 2 refuse themselves: they had their turn, though it was not taken
    assert (fourth["clients"], fourth["refused"]) == (2, {"could not train": 2})
    others = private(tmp_path / "others")
    network = world(tmp_path / "others", others)
    both = coordinator(
        others, network, select=lambda deployment, nodes, number: list(OWNERS)
    ).attempt()
    assert (both["clients"], both["refused"]) == (2, {"twice": 2})
    assert "another device of the same user as" in caplog.text


def test_poisson_sampling_draws_users_however_many_devices_they_have(tmp_path):
    deployment = private(tmp_path, mechanism="dp-fedavg", sampling="poisson", separation=None)
    plan = deployment.ledger.plan
    users = {
        node: f"user {node % 3 and node}" for node in range(60)
    }  # one of them has twenty devices
    drawn = Counter(
        users[node]
        for _ in range(800)
        for node in select(deployment, one_of_each(range(60), users), 1)
    )
    most = 800 * plan.probability
    assert drawn["user 0"] == pytest.approx(most, abs=5 * (most * (1 - plan.probability)) ** 0.5)
    assert len(one_of_each(range(60), users)) == 41


def test_epsilon_is_said_to_be_per_user(tmp_path):
    of_users, of_devices = (
        assumptions(private(tmp_path, unit).ledger.plan) for unit in ("user", None)
    )
    assert of_users["unit"] == "one user with all of their devices and data"
    assert of_users["adjacency"] == "all updates of one user are replaced by nothing"
    assert of_devices["unit"] == "one client with all its data"
    assert private(tmp_path).ledger.epsilon(9) == private(tmp_path, None).ledger.epsilon(9)


def test_the_unit_is_a_promise(tmp_path):
    deployment = private(tmp_path)
    state = deployment.start()
    with pytest.raises(ConfigError, match="started with different private figures"):
        private(tmp_path, None).resumed(state)


def test_a_device_belongs_to_one_user(tmp_path):
    path = tmp_path / "device.json"
    name_user(tmp_path, "ann")
    name_user(tmp_path, "ann")
    assert read_card(path).user == "ann"
    with pytest.raises(DataError, match="a device of user ann"):
        name_user(tmp_path, "bob")
    for wrong in ("", "x" * 65):
        with pytest.raises(DataError, match="user: not a name"):
            name_user(tmp_path / "other", wrong)
    assert not is_name(user_key("ann"))  # no device can be called that


def test_turns_in_secure_sums_are_those_of_users(tmp_path):
    """Seven devices of four people: one of each takes part, and all of a person's devices rest."""
    privacy = {"mechanism": "dp-ftrl", "noise_multiplier": 1.0, "separation": 3, "unit": "user"}
    rules = {"population": 12, "min_reach": 0.0, **SECURE}
    chosen = {"rounds": 6, "clients_per_round": 4, "privacy": privacy}
    deployment, grid, participants = a_network(tmp_path, 7, values(**rules) | chosen)
    owners = ["ann", "ann", "bob", "bob", "cy", "cy", "di"]
    for participant, user in zip(participants, owners, strict=True):
        name_user(participant.agent.folder, user)
    store = Store(deployment.folder)
    server = a_server(deployment, grid, store)
    assert [server.attempt() is not None for _ in range(2)] == [True, False]  # then all rest
    marks = store.marks([user_key(user) for user in set(owners)])
    store.close()
    assert {mark.turn for mark in marks.values()} == {1}
    assert len(marks) == 4
    cards = [read_card(one.agent.folder / "device.json") for one in participants]
    taken = [user for card, user in zip(cards, owners, strict=True) if card.summed == 1]
    assert sorted(taken) == ["ann", "bob", "cy", "di"]
