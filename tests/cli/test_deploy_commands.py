"""`fedbandit deploy`: what an operator sees, and what is refused before anything starts."""

import json
import sys

import pytest
from network_builders import Network, a_deployment, coordinator, devices, settle

from fedbandit.cli.app import main
from fedbandit.core.errors import ConfigError, DataError
from fedbandit.deploy.flower.processes import Security
from fedbandit.deploy.server.store import read_rollback


@pytest.fixture
def state(tmp_path):
    """The folder of a deployment after three rounds, in one of which a device failed."""
    deployment = a_deployment(tmp_path)
    network = Network(devices(tmp_path, 3))
    settle(deployment, network.participants)
    server = coordinator(deployment, network)
    server.run(attempts=2)
    network.faults = {101: lambda request, reply: []}
    server.run(attempts=1)
    return deployment.folder


def run(*arguments):
    from typer.testing import CliRunner

    from fedbandit.cli.deploy import app

    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_status_shows_what_happened(state):
    shown = run("status", state)
    assert "round          3" in shown
    assert "devices seen   3" in shown
    assert "8 reports of 9 asked in the last 3 rounds" in shown
    assert "no differential privacy" in shown
    assert "version 1; kept: 0, 1" in shown
    assert "version 1    after round 2" in shown


def test_status_as_json(state):
    found = json.loads(run("status", state, "--json"))
    assert (found["round"], found["model_version"], found["privacy"]) == (3, 1, None)
    assert found["participation"]["reported"] == 8
    assert [entry["round"] for entry in found["versions"]] == [0, 2]


def test_rollback_is_asked_for_and_shown(state):
    run("rollback", state, "0")
    assert read_rollback(state) == 0
    assert "going back to model 0" in run("status", state)
    with pytest.raises(DataError, match="version 9 is not kept"):
        run("rollback", state, "9")


def test_a_folder_without_a_deployment(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fedbandit", "deploy", "status", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "not the state folder of a deployment" in said
    assert said.count("\n") == 1


def test_no_tls_must_be_asked_for(tmp_path):
    with pytest.raises(ConfigError, match="--ca: missing; use --insecure"):
        run("client", tmp_path, "--server", "127.0.0.1:1")
    (tmp_path / "ca").touch()
    (tmp_path / "actions.txt").write_text("a\nb\n")
    (tmp_path / "d.toml").write_text('[deployment]\nstate = "server"\nactions = "actions.txt"\nshape = [2]\n')
    with pytest.raises(ConfigError, match="--certificate: missing"):
        run("server", tmp_path / "d.toml", "--ca", tmp_path / "ca")
    with pytest.raises(ConfigError, match="cannot be combined"):
        run("client", tmp_path, "--server", "127.0.0.1:1", "--ca", tmp_path / "ca", "--insecure")


def test_a_wrong_file_is_refused_before_anything_starts(tmp_path):
    path = tmp_path / "d.toml"
    path.write_text("rounds = 0\n")
    with pytest.raises(ConfigError, match=r"d.toml: rounds"):
        run("server", path, "--insecure")


def test_what_flower_is_told_about_keys(tmp_path):
    names = {name: tmp_path / name for name in ("ca", "certificate", "key")}
    assert "--enable-supernode-auth" in Security(**names).superlink_options()
    options = Security(ca=tmp_path / "ca", node_key=tmp_path / "n0").node_options()
    assert options == ["--root-certificates", f"{tmp_path}/ca", "--auth-supernode-private-key", f"{tmp_path}/n0"]
