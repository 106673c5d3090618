"""What a device does for a server has limits of its own; and servers and devices of other versions get on."""

import numpy as np
import pytest
from network_builders import Network, a_deployment, changed, coordinator, devices, settle

from fedbandit.deploy.device.device_identity import Limits
from fedbandit.deploy.device.participant import Participant
from fedbandit.deploy.messages import PROTOCOL


@pytest.fixture
def asked(tmp_path):
    """A participant, and the request for training that it has just followed."""
    network, deployment = Network(devices(tmp_path, 1)), a_deployment(tmp_path)
    settle(deployment, network.participants)
    assert coordinator(deployment, network).attempt()["clients"] == 1
    return next(iter(network.participants.values())), network.sent[-1]


def told(request, **client):
    learning = request.facts["learning"]
    return {**request.facts, "learning": {**learning, "client": {**learning["client"], **client}}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("epochs", value) for value in (10**9, 0, -1, 1.5, "1", True, None)),
        *(("batch_size", value) for value in (10**12, 0, -4, 2.0, [])),
        *(
            ("learning_rate", value)
            for value in (1e30, float("inf"), float("nan"), 0, -0.1, "0.1", True)
        ),
    ],
)
def test_absurd_settings_are_refused_by_name(asked, name, value):
    participant, request = asked
    answered, arrays = participant.answer("train", told(request, **{name: value}), request.arrays)
    assert f"learning.client.{name}" in answered["problem"]
    assert arrays == {}


@pytest.mark.parametrize(
    "value", [float("inf"), float("nan"), -1, 0, 1e300, 10**400, "1", None, True]
)
def test_absurd_clip_norms_are_refused_by_name(asked, value):
    participant, request = asked
    answered, arrays = participant.answer(
        "train", {**request.facts, "clip_norm": value}, request.arrays
    )
    assert "clip_norm" in answered["problem"]
    assert arrays == {}


@pytest.mark.parametrize(
    ("bounds", "name"),
    [
        ({"events": 0, "reward": 1.0}, "bounds.events"),
        ({"events": 2**62, "reward": 1.0}, "bounds.events"),
        ({"events": 10, "reward": float("inf")}, "bounds.reward"),
        ({"events": 10}, "bounds.reward"),
        ([], "bounds"),
    ],
)
def test_absurd_bounds_are_refused_by_name(asked, bounds, name):
    participant, request = asked
    assert (
        name
        in participant.answer("train", {**request.facts, "bounds": bounds}, request.arrays)[0][
            "problem"
        ]
    )


def test_an_app_sets_limits_of_its_own(asked):
    participant, request = asked
    strict = Participant(participant.agent, limits=Limits(epochs=2, clip_norm=1.5))
    assert strict.answer("train", told(request, epochs=2), request.arrays)[0]["trained"]
    assert "epochs" in strict.answer("train", told(request, epochs=3), request.arrays)[0]["problem"]
    assert (
        "clip_norm"
        in strict.answer("train", {**request.facts, "clip_norm": 2}, request.arrays)[0]["problem"]
    )


@pytest.mark.parametrize(
    "change",
    [
        {"learning": 5},
        {"learning": {"client": 3}},
        {"space": []},
        {"required": 1},
        {"token": {}},
        {"bounds": 1},
    ],
)
@pytest.mark.parametrize("kind", ["train", "judge", "ready", "install"])
def test_whatever_a_message_holds_is_answered(asked, kind, change):
    participant, request = asked
    for arrays in (
        {},
        {"weights": "none", "model": np.zeros((2, 2))},
        {"weights": np.full(24, np.nan, np.float32)},
    ):
        answered, sent = participant.answer(kind, {**request.facts, **change}, arrays)
        assert "problem" in answered or kind == "ready"
        assert sent == {}


# Versions


def test_every_message_says_its_protocol(tmp_path):
    network, deployment = Network(devices(tmp_path, 2)), a_deployment(tmp_path)
    settle(deployment, network.participants)
    coordinator(deployment, network).attempt()
    assert {request.kind for request in network.sent} == {"install", "train"}
    assert {request.facts["protocol"] for request in network.sent} == {PROTOCOL}
    assert {reply.facts["protocol"] for reply in network.received} == {PROTOCOL}


@pytest.mark.parametrize("kind", ["distil", "", "TRAIN", "secure"])
def test_an_unknown_kind_of_request_is_named_and_not_trained_on(asked, kind):
    participant, request = asked
    answered, arrays = participant.answer(kind, request.facts, request.arrays)
    assert answered["problem"].startswith(
        f"this device does not know requests of the kind {kind!r}"
    )
    assert arrays == {}


def newer(facts):
    """As a later version may say it: more facts and more settings."""
    learning = {**facts["learning"], "schedule": "cosine"}
    learning["client"] = {**learning["client"], "patience": 2}
    return {
        **facts,
        "protocol": PROTOCOL + 1,
        "weather": "fine",
        "learning": learning,
        "required": ["clip_norm"],
    }


def test_a_device_follows_a_newer_server(asked):
    participant, request = asked
    expected, update = participant.answer("train", request.facts, request.arrays)
    answered, arrays = participant.answer("train", newer(request.facts), request.arrays)
    assert answered == expected
    np.testing.assert_array_equal(arrays["update"], update["update"])


@pytest.mark.parametrize("name", ["weather", "learning.client.patience", "learning.schedule"])
def test_what_a_newer_server_requires_is_refused_by_name(asked, name):
    participant, request = asked
    answered, arrays = participant.answer(
        "train", {**newer(request.facts), "required": [name]}, request.arrays
    )
    assert name in answered["problem"]
    assert arrays == {}


@pytest.mark.parametrize("protocol", ["2", 2.5, 0, -1, None, True, 10**400, [2]])
def test_a_protocol_that_is_no_version_is_refused_on_both_sides(tmp_path, asked, protocol):
    participant, request = asked
    assert (
        "protocol"
        in participant.answer("train", {**request.facts, "protocol": protocol}, {})[0]["problem"]
    )

    network, deployment = (
        Network(devices(tmp_path / "others", 2)),
        a_deployment(tmp_path / "others"),
    )
    settle(deployment, network.participants)
    network.faults = {100: changed(protocol=protocol)}
    assert coordinator(deployment, network).attempt()["refused"] == {"garbage": 1}


def test_a_server_takes_reports_of_newer_devices(tmp_path):
    network, deployment = Network(devices(tmp_path, 3)), a_deployment(tmp_path)
    settle(deployment, network.participants)
    network.faults = {101: changed(protocol=PROTOCOL + 1, weather="fine")}
    metrics = coordinator(deployment, network).attempt()
    assert (metrics["clients"], metrics["refused"]) == (3, {})
