"""Requests that a device cannot follow: it says so, and nothing is raised in the app that carries the answer."""

import json
import re

import pytest
from network_builders import Network, a_deployment, coordinator, devices, settle


@pytest.fixture
def asked(tmp_path):
    """A participant, and the request for training that it has just followed."""
    network, deployment = Network(devices(tmp_path, 1)), a_deployment(tmp_path)
    settle(deployment, network.participants)
    assert coordinator(deployment, network).attempt()["clients"] == 1
    return next(iter(network.participants.values())), network.sent[-1]


@pytest.mark.parametrize(
    ("learning", "said"),
    [
        ({"objective_parameters": {"sharpness": 3}}, "objective.sharpness: unknown key"),
        ({"client": {"learning_rate": "much"}}, "much|str"),
        ({"dtype": "float31"}, "float31"),
        ({"objective": "my_package:mine"}, "does not trust"),
    ],
)
def test_what_cannot_be_done_is_said(asked, learning, said):
    participant, request = asked
    facts = {**request.facts, "learning": {**request.facts["learning"], **learning}}
    answered, arrays = participant.answer("train", facts, request.arrays)
    assert arrays == {}
    assert answered == {"protocol": 2, "token": facts["token"], "problem": answered["problem"]}
    assert re.search(said, answered["problem"])


@pytest.mark.parametrize("missing", ["space", "learning", "clip_norm", "counted"])
def test_a_request_that_lacks_something_is_answered(asked, missing):
    participant, request = asked
    facts = {key: value for key, value in request.facts.items() if key != missing}
    assert missing in participant.answer("train", facts, request.arrays)[0]["problem"]


@pytest.mark.parametrize("kind", ["judge", "ready", "train"])
@pytest.mark.parametrize("change", [{"space": None}, {"version": 1.5}, {"token": float("nan")}, {}])
def test_what_any_request_lacks_is_named_and_never_a_traceback(asked, caplog, kind, change):
    participant, request = asked
    for facts in (
        {**request.facts, **change},
        {k: v for k, v in request.facts.items() if k not in change},
    ):
        answered, _ = participant.answer(kind, {"version": 0, **facts}, {})
        json.dumps(answered, allow_nan=False)  # it has to travel
        assert "problem" in answered or kind == "ready"
    assert not [record for record in caplog.records if record.exc_info]
