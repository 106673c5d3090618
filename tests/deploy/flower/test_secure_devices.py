"""Secure aggregation: what a device that is set to secure sums refuses to go along with."""

import pytest
from network_builders import values

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message
from masked_round import certificate, node_key, private_file, public_line
from secure_builders import (
    FIRST,
    SHARES,
    SURVIVORS,
    TRAINING,
    UNMASKING,
    a_network,
    a_server,
    clear_task,
    with_keys,
)

from fedbandit.deploy.flower.transport import SEALED, from_records, sealed_in, to_records
from fedbandit.deploy.masking import primitives as wire
from fedbandit.deploy.masking.announcements import in_order


def clear_request(deployment, kind="train.fedbandit_round", node=FIRST):
    task = clear_task(deployment.folder.parent)
    return Message(
        to_records(task.facts, task.arrays), dst_node_id=node, message_type=kind, ttl=60.0
    )


@pytest.mark.parametrize("kind", ["train.fedbandit_round", "train.fedbandit_secure"])
def test_a_device_set_to_sums_refuses_to_send_its_update_in_clear(tmp_path, kind):
    deployment, grid, _ = a_network(tmp_path)
    [reply] = grid.send_and_receive([clear_request(deployment, kind)])
    facts, arrays = from_records(reply.content)
    assert set(facts) == {"protocol", "token", "problem"}
    assert arrays == {}
    assert (
        "secure sums only" in facts["problem"] or "not a step of a secure sum" in facts["problem"]
    )


def test_a_device_not_set_to_sums_answers_in_clear_under_the_one_name_for_it(tmp_path):
    deployment, grid, _ = a_network(tmp_path, secure=False)
    [reply] = grid.send_and_receive([clear_request(deployment)])
    assert set(from_records(reply.content)[1]) == {"update"}


@pytest.mark.parametrize(
    "kind",
    ["train", "train.default", "train.fedbandit_distil", "query.fedbandit_distil", "evaluate"],
)
def test_a_kind_of_message_that_a_later_server_has_is_not_trained_on(tmp_path, kind):
    """Flower itself answers with an error, which servers count as a failure of the node."""
    deployment, grid, _ = a_network(tmp_path, secure=False)
    [reply] = grid.send_and_receive([clear_request(deployment, kind)])
    assert reply.has_error()
    assert not reply.has_content()


def test_a_server_without_secure_sums_gets_nothing_from_devices_set_to_them(tmp_path, caplog):
    deployment, grid, _ = a_network(tmp_path, given=values())
    server = a_server(deployment, grid)
    assert server.attempt() is None
    assert caplog.text.count("could not train: this device takes part in secure sums only") == 5


class Asking:
    """What a server asks of devices is kept, to be asked again in other words."""

    def __init__(self, grid):
        self.grid, self.asked, self.push = grid, {}, grid.push_messages
        grid.push_messages = self.keep

    def keep(self, messages):
        for message in messages:
            self.asked[message.metadata.dst_node_id, self.grid._step(message)] = message
        return self.push(messages)

    def again(self, node, step, **sealed):
        """The problem that a device has with the same request, some of it changed; None if it answers."""
        before = self.asked[node, step]
        content = to_records(*from_records(before.content), {**sealed_in(before.content), **sealed})
        kind = before.metadata.message_type
        [reply] = self.grid.send_and_receive(
            [Message(content, dst_node_id=node, message_type=kind, ttl=60.0)]
        )
        facts, arrays = from_records(reply.content)
        assert arrays == {}
        assert ("problem" in facts) is not bool(sealed_in(reply.content))
        return facts.get("problem")


@pytest.mark.parametrize("step", wire.STEPS)
def test_the_middle_of_the_protocol_does_not_come_first(tmp_path, step):
    deployment, grid, _ = a_network(tmp_path)
    request = clear_request(deployment, "train.fedbandit_secure")
    request.content.config_records[SEALED] = ConfigRecord(
        {wire.STEP: step, wire.NODES: [1, 2], wire.PARCELS: [bytes(96), bytes(96)]}
    )
    [reply] = grid.send_and_receive([request])
    assert "is not due" in from_records(reply.content)[0]["problem"]
    assert sealed_in(reply.content) == {}


def test_no_step_is_answered_twice(tmp_path):
    """A second vector under the same masks, or other shares of the same secrets, would open what was hidden."""
    deployment, grid, _ = a_network(tmp_path)
    asking = Asking(grid)
    server = a_server(deployment, grid)
    assert server.attempt()["clients"] == 5
    for step in wire.STEPS:
        assert "is not due" in asking.again(FIRST, step)
    fewer = in_order(list(grid.contexts)[:4])
    assert "is not due" in asking.again(FIRST, SURVIVORS, **{wire.SURVIVORS: fewer})
    assert not list((tmp_path / "device-0").glob("secure-*"))


def test_a_request_that_is_refused_ends_the_attempt(tmp_path):
    """Who asks for too much once is not told the rest."""
    deployment, grid, _ = a_network(tmp_path)
    asking = Asking(grid)
    keep, said = asking.keep, []

    def greedy(messages):
        if grid._step(messages[0]) == UNMASKING:
            grid.push_messages = keep
            asking.asked[FIRST, UNMASKING] = messages[0]
            said.append(asking.again(FIRST, UNMASKING, **{wire.PARCELS: [bytes(96)] * 4}))
            said.append(asking.again(FIRST, UNMASKING))
        return keep(messages)

    grid.push_messages = greedy
    a_server(deployment, grid).attempt()
    assert "has not signed what the server relays in its name" in said[0]
    assert "is not due" in said[1]


def test_what_a_device_keeps_between_steps_is_its_own_and_does_not_stay(tmp_path):
    deployment, grid, _ = a_network(tmp_path)
    grid.lost = {(FIRST + i, TRAINING) for i in range(3)}
    server = a_server(deployment, grid)
    assert server.attempt() is None
    [kept] = (tmp_path / "device-0").glob("secure-*")
    assert kept.stat().st_mode & 0o777 == 0o600
    grid.lost = set()
    assert server.attempt()["clients"] == 5
    assert not list(tmp_path.glob("device-*/secure-*"))


def test_a_damaged_file_of_a_step_drops_the_device_out(tmp_path, caplog):
    deployment, grid, _ = a_network(tmp_path)
    push = grid.push_messages

    def damage(messages):
        if grid._step(messages[0]) == TRAINING:
            [kept] = (tmp_path / "device-0").glob("secure-*")
            kept.write_bytes(kept.read_bytes()[:-20])
        return push(messages)

    grid.push_messages = damage
    assert a_server(deployment, grid).attempt()["clients"] == 4
    assert (
        f"node {FIRST} refused: could not train: training: what was kept for this step"
        in caplog.text
    )


def test_with_node_keys_and_rosters_devices_sum_with_each_other(tmp_path, caplog):
    deployment, grid, _ = a_network(tmp_path)
    with_keys(grid, tmp_path / "keys")
    assert a_server(deployment, grid).attempt()["clients"] == 5
    assert "without a roster" not in caplog.text


def test_a_device_without_a_roster_takes_part_in_no_sum_unless_told_to(tmp_path, caplog):
    deployment, grid, _ = a_network(tmp_path)
    del grid.contexts[FIRST].node_config["unsigned-keys"]
    assert a_server(deployment, grid).attempt()["clients"] == 4
    assert (
        f"node {FIRST} refused: could not train: this device has no roster of registered nodes"
        in caplog.text
    )
    assert (
        caplog.text.count(
            "without a roster: the server is believed who this device's neighbours are"
        )
        == 4
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda folder: {"roster": str(folder / "missing")}, "missing: No such file"),
        (lambda folder: {"roster": str(folder / str(FIRST))}, "line 1: not a public key"),
        (lambda folder: {"node-key": str(folder / "roster.pub")}, "roster.pub: not a key as"),
        (lambda folder: {"node-key": None}, "a roster but no key of its own"),
    ],
)
def test_a_key_or_a_roster_that_cannot_be_read_is_named(tmp_path, caplog, change, why):
    deployment, grid, _ = a_network(tmp_path)
    with_keys(grid, tmp_path / "keys")
    config = grid.contexts[FIRST].node_config
    config.update(change(tmp_path / "keys"))
    for name in [name for name, value in config.items() if value is None]:
        del config[name]
    assert a_server(deployment, grid).attempt()["clients"] == 4
    assert f"node {FIRST} refused: could not train: " in caplog.text
    assert why in caplog.text


def test_certificates_of_the_operator_make_a_roster_of_one_line(tmp_path):
    deployment, grid, _ = a_network(tmp_path)
    folder, operator = tmp_path / "keys", node_key()
    for node, key in with_keys(grid, folder).items():
        (folder / f"{node}-cert.pub").write_bytes(certificate(key, operator))
    (folder / "roster.pub").write_bytes(b"cert-authority " + public_line(operator))
    assert a_server(deployment, grid).attempt()["clients"] == 5


@pytest.mark.parametrize("known_to_server", [False, True])
def test_a_node_that_is_not_on_the_roster_is_in_no_sum(tmp_path, caplog, known_to_server):
    """Who has a roster in its folder leaves such a node out; otherwise the devices do, and the attempt is lost."""
    deployment, grid, _ = a_network(tmp_path)
    with_keys(grid, tmp_path / "keys")
    (tmp_path / "keys" / str(FIRST)).write_bytes(private_file(node_key()))
    if known_to_server:
        deployment.folder.mkdir(exist_ok=True)
        (deployment.folder / "roster.pub").write_bytes(
            (tmp_path / "keys" / "roster.pub").read_bytes()
        )
    found = a_server(deployment, grid).attempt()
    why = f"the keys of node {FIRST} are signed by a node that is not on the roster"
    if known_to_server:
        assert (found["clients"], found["refused"]) == (4, {"keys": 1})
        assert caplog.text.count(why) == 1
    else:
        assert found is None
        assert caplog.text.count(f"refused: could not train: shares: {why}") == 4


def test_a_server_that_invents_neighbours_is_refused(tmp_path, caplog):
    """Whatever keys the server relays: those of nodes that it made up are signed by nobody that the device knows."""
    from fedbandit.deploy.masking.masked_sum import announce

    deployment, grid, _ = a_network(tmp_path)
    with_keys(grid, tmp_path / "keys")
    push = grid.push_messages

    def invent(messages):
        for message in messages:
            if grid._step(message) == SHARES:
                facts, _ = from_records(message.content)
                sealed = message.content.config_records[SEALED]
                made_up = [
                    announce(facts["token"], node, node_key())[1] for node in sealed[wire.NODES]
                ]
                sealed[wire.PARCELS] = [said.to_bytes() for said in made_up]
        return push(messages)

    grid.push_messages = invent
    assert a_server(deployment, grid).attempt() is None
    assert (
        caplog.text.count("signed by a node that is not on the roster") == 10
    )  # said by devices and by the server
