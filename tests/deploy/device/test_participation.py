"""A device's own limits in private rounds: it holds a server to the plan that it agreed to, whatever dies and when."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from network_builders import Network, a_deployment, changed, coordinator, devices, settle, values

from fedbandit.core.errors import DataError
from fedbandit.deploy import Agent
from fedbandit.deploy.device import participant as participants
from fedbandit.deploy.device.device_identity import (
    LaterRoundSeen,
    Limits,
    MostAgreed,
    Terms,
    Turns,
    read_card,
)
from fedbandit.deploy.device.participant import Participant
from fedbandit.deploy.server.store import Store

TERMS = {"rounds": 9, "separation": 3, "turns": 3, "epsilon": 4.0, "delta": 1e-6}


def private(folder, rounds=9, more=None, **privacy):
    given = {
        "mechanism": "dp-ftrl",
        "noise_multiplier": 1.0,
        "sampling": "min-separation",
        "separation": 3,
        **privacy,
    }
    chosen = {"rounds": rounds, "clients_per_round": 2, "privacy": given}
    return a_deployment(folder, values(population=6, min_reach=0.0, **(more or {})) | chosen)


@pytest.fixture
def asked(tmp_path):
    """A participant that has had its turn in round 1, and the request that it followed."""
    deployment, network = private(tmp_path), Network(devices(tmp_path, 1))
    settle(deployment, network.participants)
    assert coordinator(deployment, network).attempt()["clients"] == 1
    return network.participants[100], network.sent[-1]


def ask(participant, request, number, token="t", **terms):
    facts = {**request.facts, "round": number, "token": token}
    facts["privacy"] = {**request.facts["privacy"], **terms}
    return participant.answer("train", facts, request.arrays)


def after_a_restart(participant):
    return Participant(Agent(participant.agent.folder))


def card_of(participant):
    return read_card(participant.agent.folder / "device.json")


def test_a_server_says_what_devices_may_hold_it_to(tmp_path, asked):
    _, request = asked
    ledger = private(tmp_path / "again").ledger
    epsilon = pytest.approx(ledger.epsilon(9))
    assert request.facts["privacy"] == {
        "rounds": 9,
        "separation": 3,
        "turns": 3,
        "epsilon": epsilon,
        "delta": 1e-6,
    }


@pytest.mark.parametrize("again", [lambda part: part, after_a_restart])
def test_a_device_has_its_turns_and_no_others(asked, again):
    participant, request = asked
    said = {}
    for number in (2, 3, 4, 4, 5, 6, 7, 8, 9, 10, 13):
        participant = again(participant)
        said[number] = ask(participant, request, number)[0].get("problem", "trained")
    assert said[4] == "this device has had its turn in round 4"  # the second time
    assert said[7] == "trained"
    assert {said[number] for number in (2, 3)} == {
        "not this device's turn: its last was in round 1, and they come every 3 rounds"
    }
    assert said[10] == "round 10 is beyond the 9 that this device agreed to"
    assert card_of(participant).private == Turns(Terms(**request.facts["privacy"]), 7, 3, 7)


def test_turns_are_counted_where_they_may_come_in_any_round():
    turns = Turns(Terms(100, 1, 2, 4.0, 1e-6))
    turns = turns.after(3, turns.agreed).after(5, turns.agreed)
    with pytest.raises(DataError, match="has had all of the 2 turns"):
        turns.after(6, turns.agreed)


@pytest.mark.parametrize(
    ("terms", "problem"),
    [
        ({"rounds": 10}, "rounds 10, agreed were 9"),
        ({"turns": 4}, "turns 4, agreed were 3"),
        ({"separation": 2}, "turns every 2 rounds, agreed was every 3"),
        ({"epsilon": 1e9}, "epsilon 1e.09, agreed was"),
        ({"epsilon": None}, "epsilon infinite, agreed was"),
        ({"delta": 1e-3}, "delta 0.001, agreed were 1e-06"),
    ],
)
def test_a_later_larger_plan_is_refused_in_one_line(asked, terms, problem):
    participant, request = asked
    before = card_of(participant)
    said, arrays = ask(participant, request, 4, **terms)
    with pytest.raises(
        DataError, match=f"^the server asks for more than this device agreed to: {problem}"
    ):
        raise DataError(said["problem"])
    assert "\n" not in said["problem"]
    assert (arrays, card_of(participant)) == ({}, before)
    smaller = {"rounds": 7, "turns": 2, "delta": 1e-9}
    assert ask(participant, request, 4, **smaller)[0]["trained"]


def test_a_server_that_drops_privacy_is_refused(asked):
    participant, request = asked
    facts = {name: value for name, value in request.facts.items() if name != "privacy"}
    for kind in ("train", "judge"):
        answered, arrays = participant.answer(kind, {**facts, "round": 4}, request.arrays)
        assert "without privacy, and this device agreed to a private plan" in answered["problem"]
        assert arrays == {}


def test_an_app_agrees_to_no_more_than_it_says(tmp_path):
    deployment = private(tmp_path)
    said = deployment.terms["privacy"]
    for name, most in (("epsilon", said["epsilon"] / 2), ("turns", 2), ("rounds", 8)):
        network = Network(devices(tmp_path / name, 1))
        settle(deployment, network.participants)
        agent = network.participants[100].agent
        network.participants[100] = Participant(
            agent, limits=Limits(private=MostAgreed(**{name: most}))
        )
        metrics = coordinator(private(tmp_path / name), network).attempt()
        assert (metrics["clients"], metrics["refused"]) == (0, {"could not train": 1})
        assert f"privacy.{name}" in network.received[-1].facts["problem"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("remembered", [False, True])
def test_a_device_killed_around_remembering_never_has_a_turn_twice(asked, monkeypatch, remembered):
    participant, request = asked

    def dying(path, card):
        if remembered:
            write(path, card)
        raise Killed

    write = participants.write_card
    with monkeypatch.context() as patch:
        patch.setattr(participants, "write_card", dying)
        with pytest.raises(Killed):
            ask(participant, request, 4)
    participant = after_a_restart(participant)
    answered, arrays = ask(participant, request, 4, token="another attempt")
    if remembered:  # nothing was sent, and it is over all the same
        assert answered["problem"] == "this device has had its turn in round 4"
        assert arrays == {}
    else:  # nothing can have been sent
        assert answered["trained"]
    assert card_of(participant).private.last == 4
    assert ask(participant, request, 7)[0]["trained"]


def test_what_a_log_does_to_training_is_not_told(asked, monkeypatch, caplog):
    participant, request = asked

    def failing(task, arrays, since):
        raise DataError("the update is not finite")

    monkeypatch.setattr(participant, "_fit", failing)
    answered, arrays = ask(participant, request, 4)
    assert (answered["trained"], arrays) == (False, {})
    assert "problem" not in answered
    assert "this device answers as with an empty log: the update is not finite" in caplog.text
    assert card_of(participant).private.last == 4


def test_requests_at_once_have_one_turn_between_them(asked):
    participant, request = asked
    several = [after_a_restart(participant) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        said = [answer[0] for answer in pool.map(lambda part: ask(part, request, 4), several)]
    assert sorted("trained" in answer for answer in said) == [False] * 7 + [True]
    assert card_of(participant).private.taken == 2


def test_without_room_to_remember_a_device_does_not_take_part(asked, monkeypatch):
    participant, request = asked

    def full(path, card):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(participants, "write_card", full)
        answered, arrays = ask(participant, request, 4)
    assert "No space left" in answered["problem"]
    assert arrays == {}
    assert ask(participant, request, 4)[0]["trained"]


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"privacy": wrong}
            for wrong in ([], "x", {}, {**TERMS, "rounds": 0}, {**TERMS, "turns": 1.5})
        ),
        *({"privacy": {**TERMS, "epsilon": wrong}} for wrong in (-1.0, float("nan"), "4", True)),
        *({"privacy": {**TERMS, "delta": wrong}} for wrong in (0, 1.0, None)),
        *({"round": wrong} for wrong in (None, -1, 2.0, "4", 2**40)),
        {"weights": None},
        {"space": "another"},
    ],
)
def test_a_malformed_request_costs_no_turn(asked, change):
    participant, request = asked
    path = participant.agent.folder / "device.json"
    before = path.read_bytes()
    arrays = {} if "weights" in change else request.arrays
    answered, sent = participant.answer("train", {**request.facts, "round": 4, **change}, arrays)
    assert answered["problem"]
    assert (sent, path.read_bytes()) == ({}, before)


@pytest.mark.parametrize(
    "private",
    [
        [],
        {},
        {"agreed": {}},
        {"agreed": TERMS},
        {"agreed": TERMS, "least": "1", "taken": 0},
        {"agreed": TERMS, "least": 1, "taken": -1},
        {"agreed": TERMS, "least": 1, "taken": 0, "last": 1.5},
        {"agreed": {**TERMS, "separation": None}, "least": 1, "taken": 0},
    ],
)
def test_a_damaged_account_is_refused_and_left_as_it_is(asked, private):
    participant, request = asked
    path = participant.agent.folder / "device.json"
    path.write_text(json.dumps({"device": "d", "counted": 0, "private": private}))
    before = path.read_bytes()
    assert "device.json: damaged" in ask(participant, request, 4)[0]["problem"]
    assert path.read_bytes() == before


# ---- a server that was restored from an old copy


def a_world(folder, number=3, **more):
    deployment = private(folder, sampling="fixed", separation=None, **more)
    network = Network(devices(folder, number))
    settle(deployment, network.participants)
    return deployment, network


def run(deployment, network, attempts):
    store = Store(deployment.folder)
    try:
        return coordinator(deployment, network, store).run(attempts)
    finally:
        store.close()


def restored(deployment, copy):
    shutil.rmtree(deployment.folder)
    shutil.copytree(copy, deployment.folder)


def test_a_server_restored_with_its_ledger_is_stopped_by_what_devices_have_seen(tmp_path):
    """Nothing in the folder could tell: state, metrics and ledger are all of the same old day."""
    deployment, network = a_world(tmp_path)
    run(deployment, network, 2)
    shutil.copytree(deployment.folder, tmp_path / "copy")
    run(deployment, network, 3)
    restored(deployment, tmp_path / "copy")
    before = len(network.sent)
    with pytest.raises(
        DataError, match="older than what devices have seen: 3 devices have seen round 5"
    ) as raised:
        run(deployment, network, 1)
    assert "\n" not in str(raised.value)
    assert not [reply for reply in network.received[before:] if reply.arrays]
    # and stays so, whoever would be drawn next
    with pytest.raises(
        DataError, match="round 4 was released, and the state is of round 2: an old copy"
    ):
        run(deployment, network, 1)


def test_devices_that_were_only_sent_a_model_know_as_well(tmp_path):
    deployment, network = a_world(tmp_path)
    run(deployment, network, 1)
    shutil.copytree(deployment.folder, tmp_path / "copy")
    store = Store(deployment.folder)
    server = coordinator(deployment, network, store, select=lambda deployment, nodes, number: [])
    server.run(3)  # a model is deployed after rounds 2 and 4
    store.close()
    restored(deployment, tmp_path / "copy")
    with pytest.raises(
        DataError, match="older than what devices have seen: 3 devices have seen round 3"
    ):
        run(deployment, network, 1)


def test_one_device_alone_cannot_stop_a_server(tmp_path):
    deployment, network = a_world(tmp_path)
    network.faults = {100: changed(problem="old!", seen=10**6)}
    state = run(deployment, network, 2)
    assert state.round == 2
    with pytest.raises(LaterRoundSeen):
        Turns(Terms(**TERMS), least=5).after(4, Terms(**TERMS))
