"""Running a deployment from the command line: the app bundle, the server, a device, registering a node."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from fedbandit.core.errors import FedbanditError
from fedbandit.core.files import read_lines
from fedbandit.deploy.flower import processes
from fedbandit.deploy.flower.processes import Security

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
    link = processes.start_superlink(home, host, port, security, deployment.folder / "superlink.db")
    log, metrics = deployment.folder / "superlink.log", deployment.folder / "metrics.jsonl"
    try:
        reached = "127.0.0.1" if host == "0.0.0.0" else host
        processes.wait_for_port(reached, port, link, log)
        processes.write_connection(home, f"{reached}:{port}", security)
        run = processes.submit(bundle, home, toml)
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
            status = processes.run_status(home, run)
            if status == "finished:completed":
                _show_new_rounds(metrics, shown, say)
                return
            if status.startswith("finished"):
                say(f"the server app has ended ({status}); starting it again")
                run = processes.submit(bundle, home, toml)
    finally:
        processes.stop(link)


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
        node = processes.start_supernode(agent / "flower", superlink, agent, security, agent / "node.log", own)
        say(f"taking part with {agent} at {superlink}")
        try:
            node.wait()
        finally:
            processes.stop(node)
        delay = 1.0 if time.monotonic() - started > _PATIENCE else min(2 * delay, _PATIENCE)
        say(f"the node ended with code {node.returncode} (see {agent / 'node.log'}); again in {delay:.0f} s")
        time.sleep(delay)


def register_node(home: Path, public_key: Path, name: str) -> None:
    """Let the node with that key take part, on a SuperLink that asks nodes for theirs."""
    command = ["flwr", "supernode", "register", str(public_key), processes.CONNECTION, "--name", name]
    node = processes.start(command, home, home / "register.log")
    try:
        code = node.wait(timeout=120)
    except subprocess.TimeoutExpired:
        processes.stop(node)
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
