"""Running a deployment from the command line: the app bundle, the server, a device, registering a node."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbandit.core.errors import FedbanditError, MissingExtra
from fedbandit.core.files import read_lines

_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


CONNECTION = "fedbandit"


@dataclass(frozen=True)
class Security:
    """Certificates of a SuperLink and keys of its nodes; none of them for plain connections on loopback."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None  # of the SuperLink
    node_key: Path | None = None  # of a node, in OpenSSH's format

    def superlink_options(self) -> list[str]:
        if self.ca is None:
            return ["--insecure"]
        return [
            *("--ssl-ca-certfile", str(self.ca), "--ssl-certfile", str(self.certificate)),
            *("--ssl-keyfile", str(self.key), "--enable-supernode-auth"),
        ]

    def node_options(self) -> list[str]:
        if self.ca is None:
            return ["--insecure"]
        own = [] if self.node_key is None else ["--auth-supernode-private-key", str(self.node_key)]
        return ["--root-certificates", str(self.ca), *own]


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def start(command: Sequence[str], home: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start one of Flower's programs in a process group of its own, writing to a log file."""
    home.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as file:
        return subprocess.Popen(
            [_program(command[0]), *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=_environment(home),
            start_new_session=True,
        )


def stop(process: subprocess.Popen[bytes], patience: float = 15.0) -> None:
    """Ask a process to end, and after a while end it and everything it has started."""
    groups = {process.pid, *_groups_below(process.pid)}  # while it still knows its children
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    process.wait()


def _groups_below(pid: int) -> set[int]:
    """The process groups of all that a process has started: Flower gives some of them sessions of their own."""
    try:
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,pgid="], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return set()
    below, groups = {pid}, set()
    rows = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]
    while found := [row for row in rows if row[1] in below and row[0] not in below]:
        below |= {row[0] for row in found}
        groups |= {row[2] for row in found}
    return groups - {os.getpgrp()}


def start_superlink(
    home: Path, host: str, port: int, security: Security, database: Path | None = None
) -> subprocess.Popen[bytes]:
    """A SuperLink on one port; with a database it knows its nodes again after a restart."""
    kept = [] if database is None else ["--database", str(database)]
    command = ["flower-superlink", *security.superlink_options(), "--host", host, "--port", str(port), *kept]
    return start(command, home, home.parent / "superlink.log")


def start_supernode(
    home: Path, superlink: str, agent: Path, security: Security, log: Path, config: str = ""
) -> subprocess.Popen[bytes]:
    """A SuperNode that trains on the agent's folder."""
    settings = f'agent-dir="{agent.resolve()}" {config}'.strip()
    own = ["--host", "127.0.0.1", "--port", str(free_port())]
    command = ["flower-supernode", *security.node_options(), "--superlink", superlink, *own, "--node-config", settings]
    return start(command, home, log)


def wait_for_port(host: str, port: int, process: subprocess.Popen[bytes], log: Path, seconds: float = 90.0) -> None:
    """Return when the port is open; raise if the process ends before, or it takes too long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((host, port), timeout=1.0):
            return
        if process.poll() is not None:
            raise FedbanditError(f"the process for {host}:{port} ended with code {process.returncode}; see {log}")
        time.sleep(0.2)
    raise FedbanditError(f"nothing listens on {host}:{port} after {seconds:.0f} s; see {log}")


def write_connection(home: Path, address: str, security: Security) -> None:
    """What `flwr` needs to know about the SuperLink."""
    home.mkdir(parents=True, exist_ok=True)
    trust = (
        "insecure = true" if security.ca is None else f"root-certificates = {json.dumps(str(security.ca.resolve()))}"
    )
    text = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{address}"\n{trust}\n'
    (home / "config.toml").write_text(text, encoding="utf-8")


def submit(bundle: Path, home: Path, deployment: Path) -> int:
    """Start a run of the apps; its id."""
    settings = f"deployment={json.dumps(str(deployment.resolve()))}"
    return int(_flwr(home, "run", str(bundle), CONNECTION, "-c", settings, "--format", "json")["run-id"])


def run_status(home: Path, run_id: int) -> str:
    """`running`, `finished:completed`, `finished:failed`, ..."""
    runs = _flwr(home, "list", CONNECTION, "--run-id", str(run_id), "--format", "json").get("runs", [])
    return str(runs[0]["status"]) if runs else "unknown"


def _flwr(home: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [_program("flwr"), *arguments],
        capture_output=True,
        text=True,
        env=_environment(home),
        check=False,
        timeout=180,
    )
    start = done.stdout.find("{")
    try:
        found: dict[str, Any] = json.loads(done.stdout[start:])
    except ValueError:
        found = {}
    if done.returncode or found.get("success") is False or not found:
        said = found.get("error-message") or done.stderr or done.stdout
        raise FedbanditError(f"flwr {arguments[0]}: {said.strip()[-500:]}")
    return found


def _environment(home: Path) -> dict[str, str]:
    """Flower's programs start each other by name, so they must be found where this Python is."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, **_QUIET, "FLWR_HOME": str(home), "PATH": path}


def _program(name: str) -> str:
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise MissingExtra(f"{name} needs fedbandit[flower]: pip install 'fedbandit[flower]'")
    return str(path)


SERVER = 'from fedbandit.deploy.flower.server_app import app\n\n__all__ = ["app"]\n'


CLIENT = 'from fedbandit.deploy.flower.client_app import app\n\n__all__ = ["app"]\n'


_PROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedbandit-apps"
version = "1.0.0"
description = "Federated contextual bandits on devices"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedbandit"

[tool.flwr.app.components]
serverapp = "fedbandit_apps.server:app"
clientapp = "fedbandit_apps.client:app"

[tool.flwr.app.config]
deployment = ""
"""


def write_bundle(folder: Path, *, client: str = CLIENT, server: str = SERVER) -> Path:
    """Write the bundle; `client` is the text of a module with a client app of your own."""
    package = folder / "fedbandit_apps"
    package.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(_PROJECT, encoding="utf-8")
    (package / "__init__.py").write_text('"""Apps for Flower."""\n', encoding="utf-8")
    (package / "server.py").write_text(server, encoding="utf-8")
    (package / "client.py").write_text(client, encoding="utf-8")
    return folder


_WATCH = 2.0  # seconds between two looks at what is running


_ASK = 15.0  # seconds between two questions to the SuperLink, each of which costs a process


_PATIENCE = 60.0  # seconds that a node waits at most before it tries again


def serve(toml: Path, host: str, port: int, security: Security, say: Callable[[str], None] = print) -> None:
    """Run a SuperLink and the rounds of a deployment; a server app that dies is restarted and resumes."""
    from fedbandit.deploy.server.deployment import read_deployment  # a device's node needs none of it

    deployment = read_deployment(toml)
    home = deployment.folder / "flower"
    home.mkdir(parents=True, exist_ok=True)
    bundle = write_bundle(deployment.folder / "app")
    link = start_superlink(home, host, port, security, deployment.folder / "superlink.db")
    log, metrics = deployment.folder / "superlink.log", deployment.folder / "metrics.jsonl"
    try:
        reached = "127.0.0.1" if host == "0.0.0.0" else host
        wait_for_port(reached, port, link, log)
        write_connection(home, f"{reached}:{port}", security)
        run = submit(bundle, home, toml)
        say(f"listening at {host}:{port}; {deployment.rounds} rounds, state in {deployment.folder}")
        shown, asked = _show_new_rounds(metrics, 0, lambda _: None), time.monotonic()
        while True:
            time.sleep(_WATCH)
            shown = _show_new_rounds(metrics, shown, say)
            if link.poll() is not None:
                raise FedbanditError(f"the SuperLink ended with code {link.returncode}; see {log}; run it again")
            if time.monotonic() - asked < _ASK:
                continue
            asked = time.monotonic()
            status = run_status(home, run)
            if status == "finished:completed":
                _show_new_rounds(metrics, shown, say)
                return
            if status.startswith("finished"):
                say(f"the server app has ended ({status}); starting it again")
                run = submit(bundle, home, toml)
    finally:
        stop(link)


def take_part(
    agent: Path, superlink: str, security: Security, sums_only: bool = False, say: Callable[[str], None] = print
) -> None:
    """Keep a node running for a device; after a crash it may be refused for a minute, so it tries again and again.

    With `sums_only` the device's updates leave it only inside secure sums, whatever the server asks for.
    """
    own = "secure-aggregation=true" if sums_only else ""
    agent.mkdir(parents=True, exist_ok=True)
    delay = 1.0
    while True:
        started = time.monotonic()
        node = start_supernode(agent / "flower", superlink, agent, security, agent / "node.log", own)
        say(f"taking part with {agent} at {superlink}")
        try:
            node.wait()
        finally:
            stop(node)
        delay = 1.0 if time.monotonic() - started > _PATIENCE else min(2 * delay, _PATIENCE)
        say(f"the node ended with code {node.returncode} (see {agent / 'node.log'}); again in {delay:.0f} s")
        time.sleep(delay)


def register_node(home: Path, public_key: Path, name: str) -> None:
    """Let the node with that key take part, on a SuperLink that asks nodes for theirs."""
    command = ["flwr", "supernode", "register", str(public_key), CONNECTION, "--name", name]
    node = start(command, home, home / "register.log")
    try:
        code = node.wait(timeout=120)
    except subprocess.TimeoutExpired:
        stop(node)
        raise FedbanditError(f"the SuperLink does not answer; see {home / 'register.log'}") from None
    if code:
        raise FedbanditError(f"{public_key}: not registered; see {home / 'register.log'}")


def _show_new_rounds(path: Path, shown: int, say: Callable[[str], None]) -> int:
    """Say what happened in the rounds after the first `shown`; how many there are now."""
    if not path.exists():
        return shown
    rounds = read_lines(path)
    for found in rounds[shown:]:
        reward = "no new rewards" if found["reward"] is None else f"reward {found['reward']:.4f}"
        held_back = "" if found.get("gate", {}).get("passes", True) else "; the new model was held back"
        say(f"round {found['round']}: {found['clients']} of {found['asked']} devices, {reward}{held_back}")
    return len(rounds)
