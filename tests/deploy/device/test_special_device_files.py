"""Pipes, devices, links and terabytes in the place of a device's files: one line at once, no traceback."""

import logging

import pytest
from device_builders import text_model
from fuzz_mutations import SPECIAL

from fedbandit.core.errors import DataError
from fedbandit.deploy import Agent, LogUnavailable
from fedbandit.deploy.device.device_identity import name_user, read_card
from fedbandit.deploy.device.secure_round import Identity, SecureRounds
from fedbandit.deploy.secure_sums import SecureMinimum

KINDS = [pytest.param(special, id=special.name) for special in SPECIAL]


pytestmark = pytest.mark.usefixtures("no_wait")


@pytest.fixture
def device(tmp_path):
    folder = tmp_path / "agent"
    with Agent(folder) as agent:
        agent.install(text_model(1))
        agent.install(text_model(2, seed=1))
        agent.choose("the cat sat")
    read_card(folder / "device.json")
    return folder


def replaced(path, special):
    path.unlink(missing_ok=True)
    special.make(path)
    return path


@pytest.mark.parametrize("special", KINDS)
def test_the_pointer_to_the_model_in_use_is_refused_by_name_and_mended_by_an_install(
    device, special
):
    replaced(device / "models" / "current.json", special)
    with Agent(device) as agent:
        said = "no model yet" if special.name == "link to nothing" else "current.json: damaged"
        with pytest.raises(DataError, match=said):
            agent.choose("the cat")
        if special.name != "folder":
            assert agent.install(text_model(3))
            assert agent.choose("the cat").model_version == 3


@pytest.mark.parametrize("special", KINDS)
def test_a_model_that_is_no_file_leaves_the_one_before_in_use(device, special, caplog):
    path = replaced(device / "models" / "model-2.safetensors", special)
    with caplog.at_level(logging.WARNING), Agent(device) as agent:
        assert agent.choose("the cat").model_version == 1
        with pytest.raises(DataError, match=path.name):
            agent.use(2)
        assert agent.events().left_out == 0
        if special.name != "folder":
            assert agent.install(text_model(2, seed=1))
            assert agent.choose("the cat").model_version == 2
    assert "model-2.safetensors" in caplog.text


@pytest.mark.parametrize("special", KINDS)
def test_only_a_file_is_installed(device, tmp_path, special):
    path = replaced(tmp_path / "given.safetensors", special)
    with Agent(device) as agent, pytest.raises(DataError, match=path.name):
        agent.install(path)


@pytest.mark.parametrize("special", KINDS)
def test_a_card_that_is_no_file_is_refused_by_name(device, special):
    path = replaced(device / "device.json", special)
    if special.name == "link to nothing":
        name_user(device, "u1")
        assert read_card(path).user == "u1"
        return
    with pytest.raises(DataError, match=r"device\.json: damaged"):
        read_card(path)
    with pytest.raises(DataError, match=r"device\.json: damaged"):
        name_user(device, "u1")


@pytest.mark.parametrize("special", KINDS)
def test_a_memory_that_is_no_file_does_not_keep_a_device_from_acting(device, special, caplog):
    replaced(device / "memory.safetensors", special)
    with caplog.at_level(logging.WARNING), Agent(device) as agent:
        assert agent.choose("the cat").model_version == 2
    if special.name != "link to nothing":
        assert "memory.safetensors: damaged" in caplog.text


@pytest.mark.parametrize("special", KINDS)
@pytest.mark.parametrize("name", ["events.sqlite", "events.sqlite-wal"])
def test_a_log_that_is_no_file_is_refused_or_not_written(device, name, special):
    replaced(device / name, special)
    said = None
    try:
        with Agent(device, timeout=0.2) as agent:
            said = agent.choose("the cat").problem
    except (DataError, LogUnavailable) as problem:
        said = str(problem)
    assert said is None or "events.sqlite" in said
    if name == "events.sqlite":
        assert said is not None


@pytest.mark.parametrize("special", KINDS)
@pytest.mark.parametrize("name", ["roster", "node", "node-cert.pub"])
def test_keys_and_rosters_are_files(tmp_path, name, special):
    for other in ("roster", "node"):
        (tmp_path / other).write_text("ecdsa-sha2-nistp384 AAAA\n")
    path = replaced(tmp_path / name, special)
    with pytest.raises(DataError):
        Identity(tmp_path / "roster", tmp_path / "node").read()
    if name == "roster":
        with pytest.raises(DataError, match=path.name):
            Identity(path, tmp_path / "node").read()


@pytest.mark.parametrize("special", KINDS)
def test_what_is_kept_for_a_step_of_a_secure_sum_is_a_file(tmp_path, special):
    rounds = SecureRounds(tmp_path, 7, Identity(unsigned=True), SecureMinimum())
    rounds.announce("round-1")
    (kept,) = tmp_path.glob("secure-*.json")
    replaced(kept, special)
    with pytest.raises(DataError, match="step of a secure sum"):
        rounds.step("round-1", {}, {}, {"step": "shares"}, device=None)
