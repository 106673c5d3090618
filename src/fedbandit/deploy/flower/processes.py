"""Flower's programs as processes of ours: started under a guard, reached, asked and ended. Knows no deployment.

Whatever is started here ends with the command that started it, or is found and ended by the next.
"""

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from fedbandit.core.errors import ConfigError, FedbanditError, MissingExtra, needing
from fedbandit.core.files import last_lines, object_in

with needing("a deployment over Flower"):
    from fedbandit.deploy.flower.guard import MARK, PATIENCE, end_all, kill_all

_GUARD = str(Path(__file__).with_name("guard.py"))

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
    """Start one of Flower's programs for the folder `home`, under a guard that ends it when this process ends."""
    home.mkdir(parents=True, exist_ok=True)
    guard = [
        sys.executable,
        "-P",
        _GUARD,
        str(os.getpid()),
        str(log),
        _program(command[0]),
        *command[1:],
    ]
    return subprocess.Popen(
        guard,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**_environment(home), MARK: str(home.resolve())},
        start_new_session=True,
    )


def stop(process: subprocess.Popen[bytes], home: Path, patience: float = PATIENCE + 4.0) -> None:
    """Ask a program that was started for `home` to end, and after a while end it and everything it has started."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    kill_all(home.resolve())
    process.wait()


@contextmanager
def alone(home: Path, what: str) -> Iterator[None]:
    """For the only process of its kind in a folder; the system lets go of the folder when it ends, however it ends."""
    home.mkdir(parents=True, exist_ok=True)
    held = os.open(home / "running.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{home.parent}: another `{what}` is running for this folder"
            ) from None
        yield
    finally:
        os.close(held)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and a closed terminal end the block as Ctrl-C does: what was started is ended in order.

    While that goes on, no further signal interrupts it.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A block that signals do not interrupt; for ending what was started."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_leftovers(home: Path, say: Callable[[str], None], patience: float = 5.0) -> None:
    """End what a process that was killed has left running for this folder."""
    if left := end_all(home.resolve(), patience):
        say(f"ended what an earlier start had left behind: {', '.join(left)}")


def start_superlink(
    home: Path, host: str, port: int, security: Security, database: Path | None = None
) -> subprocess.Popen[bytes]:
    """A SuperLink on one port; with a database it knows its nodes again after a restart."""
    kept = [] if database is None else ["--database", str(database)]
    command = [
        "flower-superlink",
        *security.superlink_options(),
        "--host",
        host,
        "--port",
        str(port),
        *kept,
    ]
    return start(command, home, home.parent / "superlink.log")


def start_supernode(
    home: Path, superlink: str, agent: Path, security: Security, log: Path, config: str = ""
) -> subprocess.Popen[bytes]:
    """A SuperNode that trains on the agent's folder."""
    settings = f'agent-dir="{agent.resolve()}" {config}'.strip()
    own = ["--host", "127.0.0.1", "--port", str(free_port())]
    command = [
        "flower-supernode",
        *security.node_options(),
        "--superlink",
        superlink,
        *own,
        "--node-config",
        settings,
    ]
    return start(command, home, log)


def wait_for_port(
    host: str, port: int, process: subprocess.Popen[bytes], log: Path, seconds: float = 90.0
) -> None:
    """Return when the port is open; raise if the process ends before, or it takes too long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            code = process.returncode
            raise FedbanditError(
                f"the process for {host}:{port} ended with code {code}: {reason_in(log)}"
            )
        with suppress(OSError), socket.create_connection((host, port), timeout=1.0):
            return
        time.sleep(0.2)
    raise FedbanditError(f"nothing listens on {host}:{port} after {seconds:.0f} s; see {log}")


def write_connection(home: Path, address: str, security: Security) -> None:
    """What `flwr` needs to know about the SuperLink."""
    home.mkdir(parents=True, exist_ok=True)
    trust = (
        "insecure = true"
        if security.ca is None
        else f"root-certificates = {json.dumps(str(security.ca.resolve()))}"
    )
    text = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{address}"\n{trust}\n'
    (home / "config.toml").write_text(text, encoding="utf-8")


def submit(bundle: Path, home: Path, deployment: Path) -> int:
    """Start a run of the apps; its id."""
    settings = f"deployment={json.dumps(str(deployment.resolve()))}"
    return int(
        _flwr(home, "run", str(bundle), CONNECTION, "-c", settings, "--format", "json")["run-id"]
    )


def run_status(home: Path, run_id: int) -> str:
    """`running`, `finished:completed`, `finished:failed`, ..."""
    runs = _flwr(home, "list", CONNECTION, "--run-id", str(run_id), "--format", "json").get(
        "runs", []
    )
    return str(runs[0]["status"]) if runs else "unknown"


def _flwr(home: Path, *arguments: str) -> dict[str, Any]:
    done = _ask_flwr(home, f"flwr {arguments[0]}", *arguments)
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


_ADDRESS = re.compile(
    r"(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<name>[^\s:\[\]/]+)):(?P<port>[0-9]{1,5})"
)


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`; an IPv6 address stands in brackets."""
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found["port"]) < 65536:
        raise ConfigError(f"--server: {text!r} is not HOST:PORT, as in server.example.org:8000")
    return found["six"] or found["name"], int(found["port"])


def why_unreachable(host: str, port: int) -> str | None:
    """None if something listens there, else the reason why nothing answers."""
    try:
        with socket.create_connection((host, port), timeout=5.0):
            return None
    except OSError as error:
        return error.strerror or str(error)


def reason_in(log: Path) -> str:
    """The last complaint in a program's log, and where to read more."""
    try:
        lines = [object_in(line) for line in last_lines(log, 1 << 14)]
    except (OSError, ValueError):
        return f"see {log}"
    complaints = [line for line in lines if line.get("level") in ("error", "critical")]
    said = [str(line.get("message", "")) for line in complaints or lines]
    return f"{said[-1][:200]} (see {log})" if said else f"see {log}"


def manage_node(home: Path, problem: str, *arguments: str) -> str:
    """Have the SuperLink register or unregister a node, and what it says to that; an error starts with `problem`."""
    done = _ask_flwr(home, problem, "supernode", *arguments)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise FedbanditError(f"{problem}: {said[-300:]}")
    return done.stdout


def _ask_flwr(home: Path, problem: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [_program("flwr"), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=_environment(home),
            check=False,
            timeout=120,
        )
    except subprocess.TimeoutExpired:
        raise FedbanditError(f"{problem}: the SuperLink does not answer") from None
