"""Flower's programs as processes of ours: started under a guard, reached, asked and ended. Knows no
deployment.

Whatever is started here ends with the command that started it, or is found and ended by the next.
Run as a script, this file is the guard: a small process that is still there when the one that
started it is killed. All that a program starts carries a mark in its environment, so that nothing
else is ever ended.
"""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from fedbandit.core.errors import ConfigError, FedbanditError, MissingExtra, needing
from fedbandit.core.files import last_lines, object_in
from fedbandit.core.logs import rotating
from fedbandit.core.process import handling
from fedbandit.deploy.private_files import held_alone

with needing("a deployment over Flower"):
    import psutil

CONNECTION = "fedbandit"
MARK = "FEDBANDIT_PROCESSES_OF"  # in the environment of all that works for a folder: that folder
PATIENCE = 8.0  # seconds that a program has to end by itself
_LOOK = 0.2  # seconds between two looks at program and parent
_HELPER = "flower-superexec"  # runs the apps of a SuperLink or a SuperNode
_LOOK_FOR_HELPER = 2.0  # seconds between two looks for it, which see every process there is
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LEVEL = re.compile(r"^(?:\d\S*Z )?(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL)\b[ :]*")
_ROUTINE = re.compile(r'uvicorn\.access\].*" 200$')  # a line for every poll of every node


@dataclass(frozen=True)
class Security:
    """Certificates of a SuperLink and keys of its nodes; none of them for plain connections on
    loopback.

    With certificates the SuperLink asks each node for its key, so a node keeps its number over
    restarts. Without, a node that starts again is a new one.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None  # of the SuperLink
    node_key: Path | None = None  # of a node, in OpenSSH's format

    def superlink_options(self) -> list[str]:
        """Options of `flower-superlink`."""
        if self.ca is None:
            return ["--insecure"]
        return [
            *("--ssl-ca-certfile", str(self.ca), "--ssl-certfile", str(self.certificate)),
            *("--ssl-keyfile", str(self.key), "--enable-supernode-auth"),
        ]

    def node_options(self) -> list[str]:
        """Options of `flower-supernode`."""
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
    """Start one of Flower's programs for the folder `home`, under a guard that ends it when this
    process ends.
    """
    home.mkdir(parents=True, exist_ok=True)
    guard = [sys.executable, "-P", __file__, str(os.getpid()), str(log)]
    return subprocess.Popen(
        [*guard, _program(command[0]), *command[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**_environment(home), MARK: str(home.resolve())},
        start_new_session=True,
    )


def stop(process: subprocess.Popen[bytes], home: Path, patience: float = PATIENCE + 4.0) -> None:
    """Ask a program that was started for `home` to end, and after a while end it and everything it
    has started.
    """
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    kill_all(home.resolve())
    process.wait()


@contextmanager
def alone(home: Path, what: str) -> Iterator[None]:
    """For the only process of its kind in a folder; the system lets go of the folder when it ends,
    however it ends.
    """
    home.mkdir(parents=True, exist_ok=True)
    running = f"{home.parent}: another `{what}` is running for this folder"
    held = held_alone(home / "running.lock", running)
    try:
        yield
    finally:
        os.close(held)


def ended_by_signals() -> AbstractContextManager[None]:
    """SIGTERM and a closed terminal end the block as Ctrl-C does: what was started is ended."""

    def end(number: int) -> None:
        raise SystemExit(128 + number)

    return handling(end, (signal.SIGTERM, signal.SIGHUP))


def uninterrupted() -> AbstractContextManager[None]:
    """A block that signals do not interrupt; for ending what was started."""
    return handling(lambda number: None, (signal.SIGTERM, signal.SIGHUP, signal.SIGINT))


def end_leftovers(home: Path, say: Callable[[str], None], patience: float = 5.0) -> None:
    """End what a process that was killed has left running for this folder, gently at first."""
    there, names = marked(home.resolve()), []
    for process in there:
        with suppress(psutil.Error):
            names.append(f"{process.name()} ({process.pid})")
            process.terminate()
    psutil.wait_procs(there, timeout=patience)
    kill_all(home.resolve())
    if there:
        say(f"ended what an earlier start had left behind: {', '.join(names)}")


def marked(folder: Path) -> list[psutil.Process]:
    """All processes that work for the folder, other than this one."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended, or is somebody else's
            if process.pid != os.getpid() and process.environ().get(MARK) == str(folder):
                found.append(process)
    return found


def kill_all(folder: Path) -> None:
    """End whatever works for the folder, and what that starts meanwhile."""
    for _ in range(20):
        there = marked(folder)
        if not there:
            return
        for process in there:
            with suppress(psutil.Error):
                process.kill()  # works on frozen processes, too
        psutil.wait_procs(there, timeout=1.0)


def guard(parent: int, log: Path, command: list[str]) -> int:
    """Run the command until it ends, it is to end, or the parent is gone; its exit code.

    A SuperLink or SuperNode starts its helper once. Without it the program stays in reach and never
    runs an app again, so it is ended, and its starter starts it again.
    """
    folder, over = Path(os.environ[MARK]), threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        over.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    program = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert program.stdout is not None
    writing = threading.Thread(target=_write_log, args=(program.stdout, log), daemon=True)
    writing.start()
    helper, looked = None, time.monotonic()
    while program.poll() is None and os.getppid() == parent and not over.wait(_LOOK):
        if helper is None and time.monotonic() - looked > _LOOK_FOR_HELPER:
            helper, looked = _helper_of(program.pid), time.monotonic()
        elif helper is not None and not _is_alive(helper):
            what = f"{_HELPER} has ended, and without it no app would run: ending the program"
            logging.getLogger("fedbandit.program").error(what)
            break
    if program.poll() is None:
        program.terminate()
        with suppress(subprocess.TimeoutExpired):
            program.wait(PATIENCE)
    kill_all(folder)
    code = program.wait()
    writing.join(1.0)
    return code if code >= 0 else 128 - code


def _helper_of(program: int) -> psutil.Process | None:
    """The helper that a program has started; None before that."""
    with suppress(psutil.Error):
        for child in psutil.Process(program).children():
            if any(word.endswith(_HELPER) for word in child.cmdline()):
                return child
    return None


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _write_log(lines: IO[bytes], path: Path) -> None:
    logger = logging.getLogger("fedbandit.program")
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    logger.addHandler(rotating(path))
    for line in lines:
        text = _COLOURS.sub("", line.decode(errors="replace")).rstrip()
        level = _LEVEL.match(text)
        text = text[level.end() :] if level else text
        if text and not _ROUTINE.search(text):
            logger.log(
                logging.getLevelNamesMapping()[level[1]] if level else logging.INFO, "%s", text
            )


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
        if why_unreachable(host, port) is None:
            return
        time.sleep(0.2)
    raise FedbanditError(f"nothing listens on {host}:{port} after {seconds:.0f} s; see {log}")


def write_connection(home: Path, address: str, security: Security) -> None:
    """Tell `flwr`, in its own configuration, how to reach the SuperLink."""
    home.mkdir(parents=True, exist_ok=True)
    trust = (
        "insecure = true"
        if security.ca is None
        else f"root-certificates = {json.dumps(str(security.ca.resolve()))}"
    )
    text = (
        f'[superlink]\ndefault = "{CONNECTION}"\n\n'
        f'[superlink.{CONNECTION}]\naddress = "{address}"\n{trust}\n'
    )
    (home / "config.toml").write_text(text, encoding="utf-8")


def submit(bundle: Path, home: Path, deployment: Path) -> int:
    """Start a run of the apps; its id."""
    settings = f"deployment={json.dumps(str(deployment.resolve()))}"
    options = (CONNECTION, "-c", settings, "--format", "json")
    return int(ask_flwr(home, "flwr run", "run", str(bundle), *options)["run-id"])


def run_status(home: Path, run_id: int) -> str:
    """`running`, `finished:completed`, `finished:failed`, ..."""
    options = (CONNECTION, "--run-id", str(run_id), "--format", "json")
    runs = ask_flwr(home, "flwr list", "list", *options).get("runs", [])
    return str(runs[0]["status"]) if runs else "unknown"


def ask_flwr(home: Path, problem: str, *arguments: str) -> dict[str, Any]:
    """Run `flwr` and return its answer in JSON, empty if it gives none.

    An error is in its own words, behind `problem`.
    """
    try:
        done = subprocess.run(
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
    found: dict[str, Any] = {}
    with suppress(ValueError):
        found = json.loads(done.stdout[done.stdout.find("{") :])
    unanswered = "json" in arguments and not found
    if done.returncode or unanswered or found.get("success") is False:
        said = found.get("error-message") or done.stderr or done.stdout
        raise FedbanditError(f"{problem}: {' '.join(said.split())[-500:]}")
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
    """Host and port of `HOST:PORT`; an IPv6 address stands in brackets.

    Examples:
        >>> parse_address("server.example.org:8000"), parse_address("[::1]:8000")
        (('server.example.org', 8000), ('::1', 8000))
    """
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


if __name__ == "__main__":
    sys.exit(guard(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
