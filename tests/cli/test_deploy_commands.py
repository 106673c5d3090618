"""`fedbandit deploy`: what an operator sees, and what is refused before anything starts."""

import json
import socket
import sys

import pytest
from command_line import fails_with_one_line, in_this_process
from network_builders import Network, a_deployment, coordinator, devices, settle

from fedbandit.cli.app import main
from fedbandit.core.errors import ConfigError, DataError
from fedbandit.deploy.device.device_identity import name_user
from fedbandit.deploy.flower.operate import take_part
from fedbandit.deploy.flower.processes import Security, parse_address
from fedbandit.deploy.server.operator import OperatorRequests, read_requests
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


def test_pause_pin_and_revoke_are_kept_and_shown(state):
    assert run("pause", state) == "no new round begins until `fedbandit deploy resume`\n"
    assert run("revoke", state, "101") == "101 is not asked any more\n"
    assert (
        run("pin", state, "1")
        == "nothing newer than model 1 is deployed until `fedbandit deploy unpin`\n"
    )
    assert read_requests(state) == OperatorRequests(True, 1, ("101",))
    shown = run("status", state)
    assert "paused         no round begins until `fedbandit deploy resume`" in shown
    assert (
        "pinned         to model 1: nothing newer is deployed until `fedbandit deploy unpin`"
        in shown
    )
    assert "revoked        101" in shown
    run("resume", state)
    run("unpin", state)
    run("revoke", state, "101", "--undo")
    assert read_requests(state) == OperatorRequests()


def test_a_pin_of_another_version_rolls_back_to_it(state):
    assert (
        "the server will roll back to model 0 at its next round; nothing newer than model 0"
        in run("pin", state, 0)
    )
    assert (read_rollback(state), read_requests(state).pinned) == (0, 0)
    with pytest.raises(DataError, match="model 0 is pinned; unpin it first, or pin 1 instead"):
        run("rollback", state, 1)


@pytest.mark.parametrize("command", ["pause", "resume", "unpin", "nodes"])
def test_commands_for_a_mistyped_folder_are_refused_and_create_nothing(tmp_path, command):
    with pytest.raises(DataError):
        run(command, tmp_path / "no-such")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "host:", "host:port", ":8000", "host:0", "host:99999",
                                     "http://host:8000", "::1:8000"])  # fmt: skip
def test_a_server_without_a_port_is_refused_at_once(tmp_path, address):
    fails_with_one_line(
        in_this_process("deploy", "client", tmp_path, "--server", address, "--insecure"),
        repr(address),
        "HOST:PORT",
    )
    assert list(tmp_path.iterdir()) == []


def test_addresses():
    assert parse_address("server.example.org:8000") == ("server.example.org", 8000)
    assert parse_address("[::1]:65535") == ("::1", 65535)


def test_a_mistyped_folder_of_a_device_is_refused_and_not_created(tmp_path):
    folder = tmp_path / "divice"
    done = in_this_process("deploy", "client", folder, "--server", "127.0.0.1:8000", "--insecure")
    fails_with_one_line(done, str(folder), "no agent's folder", "--create")
    assert not folder.exists()


class Enough(Exception):
    pass


@pytest.mark.parametrize("create", [True, False])
def test_a_device_says_that_it_cannot_reach_the_server_and_tries_less_and_less_often(
    tmp_path, monkeypatch, create
):
    slept, said = [], []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 8:
            raise Enough

    monkeypatch.setattr("fedbandit.deploy.flower.operate.time.sleep", sleep)
    if not create:
        (tmp_path / "device").mkdir()
        (tmp_path / "device" / "events.sqlite").touch()
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # taken, and nobody listens
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(Enough):
            take_part(tmp_path / "device", address, Security(), say=said.append, create=create)
    assert slept == [2, 4, 8, 16, 32, 60, 60, 60]
    assert (
        said[0] == f"cannot reach the server at {address}: Connection refused; trying again in 2 s"
    )
    assert len(said) == 8


def test_a_port_that_is_taken_is_refused_before_anything_starts(tmp_path):
    """Otherwise the rounds would be given to a SuperLink of somebody else."""
    (tmp_path / "d.toml").write_text(
        '[deployment]\nstate = "server"\nactions = ["a", "b"]\nshape = [2]\n'
    )
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port: {port}: another program listens there"):
            run("server", tmp_path / "d.toml", "--insecure", "--port", port)
    assert not (tmp_path / "server" / "superlink.log").exists()


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
    (tmp_path / "d.toml").write_text(
        '[deployment]\nstate = "server"\nactions = "actions.txt"\nshape = [2]\n'
    )
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
    assert options == [
        "--root-certificates",
        f"{tmp_path}/ca",
        "--auth-supernode-private-key",
        f"{tmp_path}/n0",
    ]


def test_a_device_of_one_user_is_not_taken_for_anothers(tmp_path):
    name_user(tmp_path, "ann")
    client = (
        "deploy",
        "client",
        tmp_path,
        "--server",
        "127.0.0.1:1",
        "--insecure",
        "--create",
        "--user",
    )
    fails_with_one_line(in_this_process(*client, "bob"), "device.json: a device of user ann")
    fails_with_one_line(in_this_process(*client, ""), "user: not a name of 1 to 64 characters")


def test_secure_aggregation_needs_a_roster_and_a_key_or_to_be_told_to_do_without(tmp_path):
    device, keys = (
        tmp_path / "device",
        {"ca": tmp_path / "ca", "key": tmp_path / "key", "roster": tmp_path / "roster"},
    )
    for path in keys.values():
        path.touch()
    joins = ("client", device, "--server", "127.0.0.1:1", "--create", "--secure-aggregation")
    for more, why in (
        (("--insecure",), "--roster: missing; --secure-aggregation needs it, or --unsigned-keys"),
        (("--insecure", "--roster", keys["roster"]), "--roster: needs --key"),
        (
            ("--insecure", "--roster", keys["roster"], "--unsigned-keys"),
            "--unsigned-keys: cannot be combined",
        ),
        (
            ("--ca", keys["ca"], "--key", keys["key"], "--roster", tmp_path / "none"),
            "--roster: .*none: no such file",
        ),
    ):
        with pytest.raises(ConfigError, match=why):
            run(*joins, *more)
    assert not device.exists()


@pytest.mark.parametrize("signed", [True, False])
def test_a_node_is_told_of_its_key_and_roster(tmp_path, monkeypatch, signed):
    told, said = [], []

    def start(home, superlink, agent, security, log, config):
        told.append(config)
        raise Enough

    monkeypatch.setattr("fedbandit.deploy.flower.operate.start_supernode", start)
    monkeypatch.setattr("fedbandit.deploy.flower.operate.why_unreachable", lambda *_: None)
    roster, key = tmp_path / "roster.pub", tmp_path / "node"
    roster.touch()
    security = Security(ca=tmp_path / "ca", node_key=key) if signed else Security()
    given = {"roster": roster, "min_cohort": 20} if signed else {"unsigned": True}
    with pytest.raises(Enough):
        take_part(tmp_path / "device", "127.0.0.1:1", security, True, said.append, True, **given)
    signature = f'roster="{roster}" node-key="{key}" secure-aggregation=true min-cohort=20'
    assert told == [signature if signed else "secure-aggregation=true unsigned-keys=true"]
    assert (
        "unsigned keys: the server could pose as all other devices" in "".join(said)
    ) is not signed
