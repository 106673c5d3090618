"""Flower's programs as child processes: started with a home of their own, watched, and ended with all they started.

Telemetry, update checks and the installation of packages at run time are switched off.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbandit.core.errors import FedbanditError
from fedbandit.core.extras import MissingExtra

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
