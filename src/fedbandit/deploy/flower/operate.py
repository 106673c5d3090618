"""Running a deployment from the command line: the app bundle, the server, a device, registering a
node.
"""

import json
import subprocess
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from fedbandit.core.errors import ConfigError, FedbanditError
from fedbandit.core.files import lines_in, object_in, open_regular, read_small
from fedbandit.deploy.device.device_identity import name_user
from fedbandit.deploy.flower.processes import (
    CONNECTION,
    Security,
    alone,
    ask_flwr,
    end_leftovers,
    ended_by_signals,
    parse_address,
    reason_in,
    run_status,
    start_superlink,
    start_supernode,
    stop,
    submit,
    uninterrupted,
    wait_for_port,
    why_unreachable,
    write_connection,
)

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


def write_bundle(folder: Path, *, client: str = CLIENT) -> Path:
    """Write the bundle; `client` is the text of a module with a client app of your own."""
    package = folder / "fedbandit_apps"
    package.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(_PROJECT, encoding="utf-8")
    (package / "__init__.py").write_text('"""Apps for Flower."""\n', encoding="utf-8")
    (package / "server.py").write_text(SERVER, encoding="utf-8")
    (package / "client.py").write_text(client, encoding="utf-8")
    return folder


_WATCH = 0.5  # seconds between two looks at what is running
_ASK = 15.0  # seconds between two questions to the SuperLink, each of which costs a process
_PATIENCE = (
    60.0  # seconds between two tries at most, and of a run after which the next try comes at once
)
_QUICK_ENDS = 5  # a SuperLink that ends so often without ever having run for a while will not run


def serve(
    toml: Path,
    host: str,
    port: int,
    security: Security,
    say: Callable[[str], None] = print,
    metrics_port: int | None = None,
) -> None:
    """Run a SuperLink and the rounds of a deployment; both are restarted when they die, and rounds
    are resumed.
    """
    from fedbandit.deploy.server.deployment import (
        read_deployment,  # a device's node needs none of it
    )
    from fedbandit.deploy.server.operator import OPEN, is_open
    from fedbandit.deploy.server.server_status import noting_the_end
    from fedbandit.deploy.server.status import monitoring_page
    from fedbandit.deploy.server.store import Store

    deployment = read_deployment(toml)
    folder, home = deployment.folder, deployment.folder / "flower"
    reached = "127.0.0.1" if host == "0.0.0.0" else host
    with (
        ended_by_signals(),
        alone(home, "deploy server"),
        monitoring_page(folder, metrics_port) as page,
        noting_the_end(folder),
    ):
        if page is not None:
            say(f"http://127.0.0.1:{page}/metrics and /healthz say how it gets on")
        end_leftovers(home, say)
        with closing(
            Store(folder)
        ) as store:  # a state that cannot be resumed is refused before anything starts
            if (kept := store.load()) is not None:
                deployment.resumed(kept.state)
        if why_unreachable(reached, port) is None:
            raise ConfigError(
                f"--port: {port}: another program listens there; end it or choose another port"
            )
        if is_open(deployment):
            say(f"warning: {OPEN}")
        say("starting a SuperLink")
        bundle, seen = write_bundle(folder / "app"), Seen(folder, say)
        seen.skip()
        delay, quick = 1.0, 0
        while True:
            started = time.monotonic()
            link = start_superlink(home, host, port, security, folder / "superlink.db")
            try:
                wait_for_port(reached, port, link, folder / "superlink.log")
                write_connection(home, f"{reached}:{port}", security)
                seen.forget()
                run = submit(bundle, home, toml)
                say(f"listening at {host}:{port}; {deployment.rounds} rounds, state in {folder}")
                pause, since = 1.0, time.monotonic()
                while (ended := _end_of_run(link, home, run, seen)) is not None:
                    if ended == "finished:completed":
                        return
                    lived = time.monotonic() - since > 2 * _PATIENCE
                    pause = 1.0 if lived else min(2 * pause, _PATIENCE)
                    said = reason_in(folder / "server.log")
                    say(f"the server app has ended ({ended}): {said}; again in {pause:.0f} s")
                    time.sleep(pause)
                    seen.forget()
                    run, since = submit(bundle, home, toml), time.monotonic()
                said = reason_in(folder / "superlink.log")
                problem = f"the SuperLink ended with code {link.returncode}: {said}"
            except (
                FedbanditError
            ) as error:  # of a SuperLink that did not start, or ended before it took the run
                problem = str(error)
            finally:
                with uninterrupted():
                    stop(link, home)
            lived = time.monotonic() - started > _PATIENCE
            delay, quick = (1.0, 0) if lived else (min(2 * delay, _PATIENCE), quick + 1)
            if quick >= _QUICK_ENDS:
                raise FedbanditError(f"given up after {quick} tries: {problem}")
            say(f"{problem}; starting it again in {delay:.0f} s")
            time.sleep(delay)


def _end_of_run(link: subprocess.Popen[bytes], home: Path, run: int, seen: "Seen") -> str | None:
    """Say what happens until a run of the server app ends; its status, or None if the SuperLink has
    ended before.
    """
    asked, unanswered = time.monotonic(), 0
    while link.poll() is None:
        time.sleep(_WATCH)
        seen.look()
        if time.monotonic() - asked < _ASK or link.poll() is not None:
            continue
        try:
            asked, found, unanswered = time.monotonic(), run_status(home, run), 0
        except FedbanditError:  # a SuperLink with much to do may fail to answer once
            unanswered += 1
            if unanswered > 3:
                raise
            continue
        if found.startswith("finished"):
            seen.look()
            return found
    return None


class Seen:
    """Says on the console how a deployment goes: each round once, and what it waits for whenever
    that changes.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say
        self._offset, self._doing, self._since = 0, "", 0.0
        self._warned: frozenset[str] = frozenset()

    def skip(self) -> None:
        """Take all rounds so far for said."""
        with suppress(OSError):
            self._offset = (self._folder / "metrics.jsonl").stat().st_size

    def forget(self) -> None:
        """Take what the server said of itself so far for old: it has been started again."""
        self._since = time.time()

    def look(self) -> None:
        """Say what is new."""
        from fedbandit.deploy.server.server_status import read_live, warnings_of
        from fedbandit.deploy.server.status import round_in_words

        for line in self._new_lines():
            try:
                self._say(round_in_words(object_in(line)))
            except (ValueError, KeyError, TypeError, AttributeError):
                self._say(
                    f"{self._folder / 'metrics.jsonl'}: a line that is no round's: {line[:50]!r}"
                )
        live = read_live(self._folder)
        if live is None or live["time"] < self._since:
            return
        warnings = warnings_of(live, time.time())
        for kind in sorted(warnings.keys() - self._warned):
            self._say(f"warning: {warnings[kind]}")
        self._warned = frozenset(warnings)
        waits = live["phase"] in ("waiting", "paused")
        if waits and live["doing"] != self._doing:
            self._say(live["doing"])
        self._doing = live["doing"] if waits else ""

    def _new_lines(self) -> list[bytes]:
        lines = list[bytes]()
        with suppress(OSError, ValueError), open_regular(self._folder / "metrics.jsonl") as file:
            file.seek(self._offset)
            lines += lines_in(file)
        self._offset += sum(map(len, lines))
        return lines


def take_part(
    agent: Path,
    superlink: str,
    security: Security,
    sums_only: bool = False,
    say: Callable[[str], None] = print,
    create: bool = False,
    roster: Path | None = None,
    unsigned: bool = False,
    user: str | None = None,
    min_cohort: int | None = None,
) -> None:
    """Keep a node running for a device; after a crash it may be refused for a minute, so it tries
    again and again.

    With `sums_only` the device's updates leave it only inside secure sums, whatever the server asks
    for. In these it has to do with nodes on the `roster` alone (with `unsigned`, with those that
    the server names), and with at least `min_cohort` devices, itself included. `user` names whose
    device it is, where several belong to one person.
    """
    host, port = parse_address(superlink)
    own = _secure_settings(security, sums_only, roster, unsigned)
    if min_cohort is not None:
        own = f"{own} min-cohort={min_cohort}".strip()
    if not create and not (agent / "events.sqlite").exists():
        raise ConfigError(
            f"{agent}: no agent's folder (no events.sqlite); start the app first, or use --create"
        )
    if unsigned:
        say(
            "secure sums with unsigned keys: the server could pose as all other devices;"
            " beyond trials use --roster"
        )
    agent.mkdir(parents=True, exist_ok=True)
    if user is not None:
        name_user(agent, user)
    home, log, delay = agent / "flower", agent / "node.log", 1.0
    with ended_by_signals(), alone(home, "deploy client"):
        end_leftovers(home, say)
        while True:
            if (problem := why_unreachable(host, port)) is not None:
                delay = min(2 * delay, _PATIENCE)
                said = f"cannot reach the server at {superlink}: {problem}"
                say(f"{said}; trying again in {delay:.0f} s")
                time.sleep(delay)
                continue
            started = time.monotonic()
            node = start_supernode(home, superlink, agent, security, log, own)
            say(f"taking part with {agent} at {superlink}")
            try:
                _stay(node, lambda: why_unreachable(host, port), superlink, say)
            finally:
                with uninterrupted():
                    stop(node, home)
            delay = 1.0 if time.monotonic() - started > _PATIENCE else min(2 * delay, _PATIENCE)
            said = f"the node ended with code {node.returncode}: {reason_in(log)}"
            say(f"{said}; again in {delay:.0f} s")
            time.sleep(delay)


def _secure_settings(
    security: Security, sums_only: bool, roster: Path | None, unsigned: bool
) -> str:
    """The part of a node's configuration that is about secure sums, as `flower-supernode`
    takes it.
    """
    if unsigned and roster is not None:
        raise ConfigError("--unsigned-keys: cannot be combined with --roster")
    if sums_only and roster is None and not unsigned:
        raise ConfigError(
            "--roster: missing; --secure-aggregation needs it, or --unsigned-keys to try things out"
        )
    if roster is not None and security.node_key is None:
        raise ConfigError("--roster: needs --key: other devices ask for this node's signature")
    if roster is not None and not roster.is_file():
        raise ConfigError(f"--roster: {roster}: no such file")
    files = {"roster": roster, "node-key": security.node_key}
    settings = [
        f"{name}={json.dumps(str(path.resolve()))}"
        for name, path in files.items()
        if path is not None
    ]
    flags = {"secure-aggregation": sums_only, "unsigned-keys": unsigned}
    return " ".join([*settings, *(f"{name}=true" for name, given in flags.items() if given)])


def _stay(
    node: subprocess.Popen[bytes],
    reach: Callable[[], str | None],
    server: str,
    say: Callable[[str], None],
) -> None:
    """Until the node ends: say when the server goes out of reach, and when it is back."""
    lost = False
    while True:
        with suppress(subprocess.TimeoutExpired):
            node.wait(_PATIENCE / 2)
            return
        problem = reach()
        if problem is not None and not lost:
            say(f"cannot reach the server at {server}: {problem}; the node keeps trying")
        elif problem is None and lost:
            say(f"the server at {server} is in reach again")
        lost = problem is not None


def register_node(state: Path, public_key: Path, name: str) -> None:
    """Let the node with that key take part, on a SuperLink that asks nodes for theirs, and put it
    on the roster.
    """
    from fedbandit.deploy.server.operator import (  # a device's node needs none of it
        add_node,
        key_line,
    )

    key_line(public_key)  # what is no key is refused before anybody is asked
    problem = f"{public_key}: not registered"
    command = ("supernode", "register", str(public_key), CONNECTION, "--name", name)
    said = ask_flwr(state / "flower", problem, *command, "--format", "json")
    if "node-id" not in said:
        raise FedbanditError(f"{problem}: {str(said)[:300]}")
    add_node(state, key_line(public_key, f"{name} node={said['node-id']}"))


def unregister_node(state: Path, node: str) -> bool:
    """Take the key of a node from a SuperLink that asks nodes for theirs; whether there was one to
    take.

    Without keys there is nothing to take: anybody may connect, under a new number each time.
    """
    from fedbandit.deploy.server.operator import remove_node

    home, config = state / "flower", state / "flower" / "config.toml"
    if not node.isdigit() or not config.exists() or b"root-certificates" not in read_small(config):
        return False
    problem = f"{node}: is not asked any more, but not unregistered"
    ask_flwr(home, problem, "supernode", "unregister", node, CONNECTION)
    remove_node(state, node)
    return True
