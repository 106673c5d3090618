"""The roster: who is registered stands on it, who is revoked does not, and what is no key is refused beforehand."""

import json
import subprocess

import pytest

pytest.importorskip("flwr")

from masked_round import node_key, public_line, roster_of

from fedbandit.core.errors import DataError, FedbanditError
from fedbandit.deploy.flower import operate
from fedbandit.deploy.server.operator import read_roster


@pytest.fixture
def superlink(tmp_path, monkeypatch):
    """A SuperLink that registers every node; its calls."""
    calls = []

    def flwr(command, **_):
        calls.append(command)
        said = "registered\n" + json.dumps({"success": True, "node-id": 1000 + len(calls)})
        return subprocess.CompletedProcess(command, 0, said, "")

    monkeypatch.setattr(subprocess, "run", flwr)
    (tmp_path / "flower").mkdir()
    (tmp_path / "flower" / "config.toml").write_text("root-certificates = 'ca'")
    return calls


def a_key(folder, name):
    key = node_key()
    (folder / name).write_bytes(public_line(key) + b" somebody\n")
    return key, folder / name


def test_registered_nodes_are_on_the_roster_until_they_are_revoked(tmp_path, superlink):
    assert read_roster(tmp_path) is None
    (one, first), (two, second) = a_key(tmp_path, "1.pub"), a_key(tmp_path, "2.pub")
    operate.register_node(tmp_path, first, "device 1")
    operate.register_node(tmp_path, second, "device 2")
    assert read_roster(tmp_path) == roster_of(one, two)
    lines = (tmp_path / "roster.pub").read_text().splitlines()
    assert [line.partition("device")[2] for line in lines] == [" 1 node=1001", " 2 node=1002"]
    assert operate.unregister_node(tmp_path, "1001")
    assert read_roster(tmp_path) == roster_of(two)
    operate.register_node(tmp_path, second, "device 2 again")
    assert len((tmp_path / "roster.pub").read_text().splitlines()) == 1
    assert operate.unregister_node(tmp_path, "1004")
    with pytest.raises(DataError, match="no public keys in it"):
        read_roster(tmp_path)


@pytest.mark.parametrize("content", [None, b"", b"ssh-rsa AAAA x"])
def test_what_is_no_key_is_not_registered(tmp_path, superlink, content):
    path = tmp_path / "node.pub"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"node\.pub: "):
        operate.register_node(tmp_path, path, "device")
    assert superlink == []
    assert not (tmp_path / "roster.pub").exists()


def test_an_answer_without_a_node_is_an_error(tmp_path, monkeypatch, superlink):
    said = subprocess.CompletedProcess([], 0, "who knows", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: said)
    with pytest.raises(FedbanditError, match="not registered: who knows"):
        operate.register_node(tmp_path, a_key(tmp_path, "1.pub")[1], "device")
