"""A deployment over any transport: what each must carry, and what then holds whichever it is.

Runs against participants that are called directly and against Flower; a new transport is one more entry in SITES.
"""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cryptography")

from network_builders import live, values
from transports import SECURE, in_process, over_flower, step_of

from fedbandit.deploy.device.device_identity import read_card
from fedbandit.deploy.masking import primitives as wire
from fedbandit.deploy.messages import Reply, Request
from fedbandit.deploy.secure_sums import update_error
from fedbandit.deploy.server.store import Store

SITES = {"in process": in_process, "flower": over_flower}
PRIVATE = {"mechanism": "dp-fedavg", "noise_multiplier": 0.05, "sampling": "fixed"}


@pytest.fixture(params=SITES)
def site_of(request, tmp_path):
    """Makes a site with this transport: number of devices, configuration, and options."""
    if request.param == "flower":
        pytest.importorskip("flwr")

    def made(number=4, given=None, name="site", **more):
        return SITES[request.param](tmp_path / name, number, given or values(), **more)

    return made


def exchanged(transport, request):
    [ticket] = transport.send([request])
    [reply] = transport.receive([ticket])
    return reply


def train_request(site, node, **facts):
    """A request to train as plain servers make it."""
    own = site.deployment
    task = {"token": "t", "round": 1, "clip_norm": 1.0, "space": own.space, "counted": None}
    task |= {"learning": own.learning, "bounds": own.rules.bounds.to_json(), **facts}
    return Request("train", node, task, {"weights": own.start().server_state["weights"]}, 60.0)


# What a transport carries


def test_nodes_are_the_devices_in_reach(site_of):
    site = site_of(3, secure_only=False)
    assert sorted(site.transport.nodes()) == sorted(site.nodes)


def test_each_request_gets_its_own_reply_once(site_of):
    site = site_of(3, secure_only=False)
    tickets = site.transport.send([train_request(site, node) for node in site.nodes])
    assert len(set(tickets)) == 3
    assert site.transport.receive([]) == []
    first = site.transport.receive(tickets[1:2])
    assert [reply.ticket for reply in first] == tickets[1:2]
    rest = site.transport.receive(tickets)
    assert sorted(reply.ticket for reply in rest) == sorted([tickets[0], tickets[2]])
    assert site.transport.receive(tickets) == []
    devices = {reply.facts["device"] for reply in (*first, *rest)}
    assert len(devices) == 3


def test_a_request_to_a_node_that_has_left_is_answered_with_an_error(site_of):
    site = site_of(2, secure_only=False)
    reply = exchanged(site.transport, train_request(site, 12345))
    assert reply.error
    assert (reply.facts, reply.arrays, reply.sealed) == ({}, {}, {})


def test_a_device_that_fails_is_an_error_of_its_own_and_of_no_other(site_of, monkeypatch):
    from fedbandit.deploy.device.participant import Participant

    site, reply_to = site_of(2, secure_only=False), Participant.reply

    def fails(self, request, ticket=""):
        if request.node == site.nodes[0]:
            raise RuntimeError("out of memory")
        return reply_to(self, request, ticket)

    monkeypatch.setattr(Participant, "reply", fails)
    tickets = site.transport.send([train_request(site, node) for node in site.nodes])
    found = {reply.ticket: reply for reply in site.transport.receive(tickets)}
    assert "out of memory" in found[tickets[0]].error
    assert found[tickets[1]].error is None


def test_facts_arrays_and_sealed_values_arrive_as_they_were_said(site_of, monkeypatch):
    from fedbandit.deploy.device.participant import Participant

    facts = {"text": "é", "number": 0.1, "whole": 2**40, "none": None, "list": [1, {"a": False}]}
    arrays = {
        "weights": np.linspace(0, 1, 7, dtype=np.float32).reshape(7, 1),
        "levels": np.arange(3),
        "empty": np.zeros((0, 2)),
    }
    sealed = {"bytes": bytes(range(256)), "numbers": [1, 2**63 - 1], "parcels": [b"", b"\x00"]}
    met = []

    def echo(self, request, ticket=""):
        met.append(request)
        return Reply(ticket, dict(request.facts), dict(request.arrays), None, dict(request.sealed))

    site = site_of(1, secure_only=False)
    monkeypatch.setattr(Participant, "reply", echo)
    node = site.nodes[0]
    reply = exchanged(site.transport, Request("secure", node, facts, arrays, 60.0, sealed))
    for found in (met[0], reply):
        assert found.facts == facts
        assert found.arrays.keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(found.arrays[name], array)
            assert (found.arrays[name].dtype, found.arrays[name].shape) == (
                array.dtype,
                array.shape,
            )
        assert found.sealed == sealed
    assert (met[0].kind, met[0].node, reply.error) == ("secure", node, None)


# What holds over every transport


def test_plain_rounds_count_each_reward_once_and_resume(site_of):
    site = site_of(3, secure_only=False)
    store = Store(site.deployment.folder)
    server = site.server(store)
    assert server.attempt()["events"] == 18
    store.close()
    live(next(iter(site.participants.values())), events=5, seed=9)
    server = site.server()
    assert [server.attempt()["events"] for _ in range(2)] == [5, 0]
    assert server.state.round == 3
    assert {p.agent.model_version for p in site.participants.values()} == {1}


@pytest.mark.parametrize("kind", ["train", "judge"])
def test_a_device_set_to_secure_sums_tells_nothing_in_clear(site_of, kind):
    site = site_of(2)
    request = replace(train_request(site, site.nodes[0]), kind=kind)
    reply = exchanged(site.transport, request)
    assert reply.facts["problem"] == "this device takes part in secure sums only"
    assert set(reply.facts) == {"protocol", "token", "problem"}
    assert (reply.arrays, reply.sealed) == ({}, {})


def test_a_secure_round_is_the_plain_one_up_to_rounding(site_of):
    secure = site_of(5, values(**SECURE))
    plain = site_of(5, name="plain", secure_only=False)
    servers = [site.server() for site in (secure, plain)]
    found, expected = (server.attempt() for server in servers)
    for name in ("round", "events", "clients", "unclipped", "idle", "refused"):
        assert found[name] == expected[name], name
    np.testing.assert_allclose(
        servers[0].state.weights,
        servers[1].state.weights,
        atol=update_error(1, 1.0) + 1e-7,
        rtol=0,
    )
    for participant in secure.participants.values():
        assert read_card(participant.agent.folder / "device.json").summed == 1


@pytest.mark.parametrize("step", ["ready", *wire.STEPS])
def test_a_drop_out_at_any_step_of_a_secure_round_is_survived(site_of, step):
    site = site_of(4, values(**SECURE))
    site.transport.lost = {(site.nodes[2], step)}
    late = step in (wire.SURVIVORS, wire.UNMASK)
    server = site.server()
    assert server.attempt()["clients"] == (4 if late else 3)
    site.transport.lost = set()
    assert server.attempt()["clients"] == 4


def test_a_private_round_takes_a_turn_of_each_device(site_of):
    given = values(population=4, min_reach=0.0) | {"privacy": PRIVATE, "clients_per_round": 4}
    site = site_of(4, given, secure_only=False)
    assert site.server().attempt()["clients"] == 4
    for participant in site.participants.values():
        account = read_card(participant.agent.folder / "device.json").private
        assert (account.taken, account.last) == (1, 1)


def test_a_private_secure_round_takes_a_turn_of_each_device(site_of):
    given = values(**SECURE, population=4, min_reach=0.0)
    given |= {"privacy": PRIVATE, "clients_per_round": 4}
    site = site_of(4, given)
    assert site.server().attempt()["clients"] == 4
    for participant in site.participants.values():
        card = read_card(participant.agent.folder / "device.json")
        assert (card.private.taken, card.private.last, card.summed) == (1, 1, 1)


def test_a_gate_judges_before_a_model_goes_out(site_of):
    given = values(min_reports=3) | {"deploy_every": 1}
    given["gate"] = {"confidence": 0.5, "limit": 10.0}
    site = site_of(5, given, secure_only=False)
    verdict = site.server().attempt()["gate"]
    assert (verdict["devices"], verdict["refused"]) == (5, {})


def test_an_acting_server_is_refused_over_every_transport(site_of, caplog):
    """The full set of attacks is in `test_acting_server.py`."""
    site = site_of(5, values(**SECURE))
    victim = site.nodes[0]

    def send(request):
        if (request.node, step_of(request)) == (victim, wire.VECTOR):
            return replace(request, facts={**request.facts, "clip_norm": 1e6})
        return request

    site.transport.change = send
    assert site.server().attempt()["clients"] == 4
    assert "the task is not the one that the devices of this sum have signed" in caplog.text


def test_both_transports_come_to_the_same_models(tmp_path):
    pytest.importorskip("flwr")
    states = [
        made(tmp_path / str(number), 3, values(), secure_only=False).server().run()
        for number, made in enumerate(SITES.values())
    ]
    np.testing.assert_array_equal(states[0].weights, states[1].weights)
    assert states[0].deployed.keys() == states[1].deployed.keys()


def test_nothing_outside_its_adaptor_knows_of_flower():
    from pathlib import Path

    import fedbandit.deploy

    folder = Path(fedbandit.deploy.__file__).parent
    files = [
        path for path in folder.rglob("*.py") if "flower" not in path.relative_to(folder).parts
    ]
    assert len(files) > 20  # the scan has seen the package
    assert [path for path in files if "flower" in path.read_text().lower()] == []


def test_a_nodes_own_configuration_raises_the_minimum_cohort(tmp_path, caplog):
    """As `deploy client --min-cohort` writes it; no server has a say in it."""
    pytest.importorskip("flwr")
    site = over_flower(tmp_path, 4, values(**SECURE))
    contexts = site.transport.carrier._grid.contexts
    contexts[site.nodes[0]].node_config["min-cohort"] = 5
    assert site.server().attempt()["clients"] == 3
    assert "4 devices are too few to hide among: this device asks for at least 5" in caplog.text
