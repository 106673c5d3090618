"""The file by which a device is known: a damaged one is refused by name, and no server's message can damage it."""

import json

import pytest
from network_builders import Network, a_deployment, coordinator, devices, settle

from fedbandit.core.errors import DataError
from fedbandit.deploy.device.device_identity import Card, read_card, write_card


@pytest.fixture
def asked(tmp_path):
    """A participant, and the request for training that it has just followed."""
    network, deployment = Network(devices(tmp_path, 1)), a_deployment(tmp_path)
    settle(deployment, network.participants)
    assert coordinator(deployment, network).attempt()["clients"] == 1
    return next(iter(network.participants.values())), network.sent[-1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{",
        "{}",
        "\xff",
        "[" * 100_000,
        json.dumps({"device": "", "counted": 0}),
        json.dumps({"device": "d" * 65, "counted": 0}),
        json.dumps({"device": 7, "counted": 0}),
        json.dumps({"device": "d", "counted": "x"}),
        json.dumps({"device": "d", "counted": -1}),
        json.dumps({"device": "d", "counted": 2**63}),
        json.dumps({"device": "d", "counted": 1.5}),
        json.dumps({"device": "d", "counted": True}),
        json.dumps({"device": "d", "counted": 0, "pending": []}),
        json.dumps({"device": "d", "counted": 0, "pending": {"t": "x"}}),
    ],
)
def test_a_damaged_card_is_named_in_one_line_and_left_as_it_is(tmp_path, asked, text):
    path = tmp_path / "device.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"device\.json: damaged") as error:
        read_card(path)
    assert "\n" not in str(error.value)

    participant, request = asked
    own = participant.agent.folder / "device.json"
    own.write_bytes(text.encode("latin-1"))
    answered, arrays = participant.answer("train", request.facts, request.arrays)
    assert "device.json: damaged" in answered["problem"]
    assert arrays == {}
    assert own.read_bytes() == text.encode("latin-1")


def test_a_card_comes_back_as_it_was_written(tmp_path):
    for card in (Card("d"), Card("d", 7, {"token": 9})):
        write_card(tmp_path / "device.json", card)
        assert read_card(tmp_path / "device.json") == card
    (tmp_path / "device.json").write_text(
        '{"device": "d", "counted": 3}'
    )  # as the first devices wrote it
    assert read_card(tmp_path / "device.json") == Card("d", 3)


@pytest.mark.parametrize(
    "change",
    [
        {"counted": "x"},
        {"counted": -1},
        {"counted": 2**70},
        {"counted": 1.5},
        {"counted": [1]},
        {"counted": 5, "learning": []},
        {"counted": 5, "clip_norm": "wide"},
        {"counted": 5, "token": {"a": 1}},
        {"counted": 5, "space": "another"},
        {"counted": 5, "protocol": "new"},
    ],
)
def test_a_malformed_message_changes_nothing_on_the_device(asked, change):
    participant, request = asked
    path = participant.agent.folder / "device.json"
    before = path.read_bytes()
    answered, arrays = participant.answer("train", {**request.facts, **change}, request.arrays)
    assert answered["problem"]
    assert arrays == {}
    assert path.read_bytes() == before
    assert participant.answer("train", request.facts, request.arrays)[0][
        "trained"
    ]  # and it takes part as before


@pytest.mark.parametrize(
    "change",
    [
        {"token": "t" * 65},
        {"token": None},
        {"clip_norm": -1},
        {"bounds": {}},
        {"settled": "t"},
        {"settled": [1]},
        {"round": None},
        {"model": "another"},
    ],
)
def test_nor_does_one_of_a_secure_round(asked, change):
    participant, request = asked
    path = participant.agent.folder / "device.json"
    before = path.read_bytes()
    model = participant.agent.model.untrained(())
    facts = {**request.facts, "settled": [], "model": model}
    with pytest.raises(DataError, match=next(iter(change))):
        participant.contribute({**facts, **change}, request.arrays)
    assert path.read_bytes() == before
    participant.contribute(facts, request.arrays)
