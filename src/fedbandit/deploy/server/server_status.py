"""A running server's view for operators, in one small file: its work, nodes and warnings.

`live.json` is rewritten every second or so and holds nothing that has to survive. Rounds do not
depend on it.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedbandit.core.files import read_json, read_lines
from fedbandit.deploy.messages import Observer, Reply, Request
from fedbandit.deploy.server.deployment import Deployment
from fedbandit.deploy.server.operator import is_open

_logger = logging.getLogger("fedbandit.deploy.server")
_RECENT = 20  # rounds whose times are kept at hand
_MOST_NODES = 10_000  # that are listed; the longest gone are forgotten first
_SILENT = 30.0  # seconds without a word from the server app after which it counts as gone
_LOW = 0.5  # of the devices that rounds are made for
_MUCH = 0.2  # of a round's events, by one device
_KEPT = (
    *("round", "time", "seconds", "asked", "clients", "in_reach", "epsilon", "model_version"),
    *("largest_share", "events", "reward", "running_reward", "reward_median"),
)
_DOING = {
    "install": "bringing model {version} to {nodes}",
    "ready": "asking {nodes} whether they are ready",
    "train": "round {round}: {nodes} train",
    "secure": "round {round}: a secure sum over {nodes}",
    "judge": "round {round}: {nodes} judge the new model",
}
Warnings = dict[str, str]
"""Kind -> what exactly."""


def facts_of(deployment: Deployment) -> dict[str, Any]:
    """The facts of a deployment that its view is judged by."""
    rules, ledger = deployment.rules, deployment.ledger
    longest = rules.install_seconds + rules.round_seconds * (
        1 if deployment.config.gate.confidence is None else 2
    )
    if rules.secure_aggregation:
        longest += 4 * rules.secure_seconds
    return {
        "rounds": deployment.rounds,
        "longest_round": longest,
        "needed": rules.least_reach(ledger is not None),
        "wanted": deployment.config.clients_per_round if ledger is None else ledger.plan.population,
        "private": ledger is not None,
        "open": is_open(deployment),
    }


def sums_of(line: Mapping[str, Any]) -> tuple[float, float]:
    """Events and rewards of a round; of a private one as they were released, with noise."""
    events = line.get("events") or 0
    return events, line.get("reward_sum", (line.get("reward") or 0.0) * events)


class RewardTotals:
    """Events and rewards of all rounds, in total and by the version that chose the actions.

    Where devices hide which version that was, it is the one in use while they reported.

    Examples:
        >>> RewardTotals([{"events": 4, "reward": 0.5, "model_version": 1}]).to_json()
        {'events': 4.0, 'rewards': 2.0, 'by_version': {'1': [4, 2.0]}}
    """

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self.events, self.rewards = 0.0, 0.0
        self.by_version: dict[int, list[float]] = {}
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        """Count one more round's metrics."""
        events, rewards = sums_of(line)
        self.events, self.rewards = self.events + events, self.rewards + rewards
        version = line["model_version"]
        self.by_version.setdefault(version, [0, 0.0])
        whole = {str(version): (events, rewards)}
        for key, row in (line.get("rewards_by_version") or whole).items():
            sums = self.by_version.setdefault(int(key), [0, 0.0])
            sums[0], sums[1] = sums[0] + row[0], sums[1] + row[1]

    def means(self) -> dict[int, float | None]:
        """The mean reward of each version; None where it has no events."""
        rows = self.by_version.items()
        return {version: row[1] / row[0] if row[0] > 0 else None for version, row in rows}

    def to_json(self) -> dict[str, Any]:
        """As `live.json` and `status --json` have it."""
        rows = {str(version): row for version, row in sorted(self.by_version.items())}
        return {"events": self.events, "rewards": self.rewards, "by_version": rows}


class Watch(Observer):
    """Told by the server what goes on, which it keeps in `live.json`; without a folder it only
    listens.

    The view has what the server does (`phase`, `doing`, `since`), nodes with when they were seen
    and answered, the recent rounds, rewards by version, and totals since the server started.
    Warnings go to the log when they begin and when they end.
    """

    def __init__(
        self,
        folder: Path | None = None,
        facts: Mapping[str, Any] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.now, self._path = now, None if folder is None else folder / "live.json"
        before = read_live(folder) if folder is not None else None
        nodes = {} if before is None else before["nodes"]
        self._nodes: dict[int, dict[str, Any]] = {int(node): nodes[node] for node in nodes}
        self._reach: set[int] = set()
        lines = [] if folder is None else _lines_in(folder / "metrics.jsonl")
        self._recent = [{key: line.get(key) for key in _KEPT} for line in lines[-_RECENT:]]
        self._rewards = RewardTotals(lines)
        self._facts = dict(facts or {})
        self._started = self._since = now()
        self._doing, self._phase, self._round = "starting", "starting", 0
        self._totals: dict[str, Any] = dict.fromkeys(("asked", "clients", "events", "empty"), 0)
        self._totals |= {"refused": {}, "bytes_sent": 0, "bytes_received": 0}
        self._written = 0.0
        self._warned: Warnings = {}

    @property
    def watches(self) -> bool:
        """Whether anybody can see what it is told."""
        return self._path is not None

    def waiting(self, why: str) -> None:
        """A round would begin, but for this."""
        self._does("paused" if why.startswith("paused") else "waiting", why)

    def reach(self, nodes: Collection[int]) -> None:
        """These nodes are in reach now; of others only devices that have answered are kept."""
        self._reach = set(nodes)
        for node in nodes:
            self._nodes.setdefault(node, {})["seen"] = self.now()
        kept = {n: a for n, a in self._nodes.items() if n in self._reach or "device" in a}
        newest = sorted(kept, key=lambda node: kept[node].get("seen", 0.0), reverse=True)
        self._nodes = {node: kept[node] for node in newest[:_MOST_NODES]}
        self.alive()

    def asked(self, request: Request, number: int) -> None:
        """Requests like this one have gone out to this many nodes."""
        facts, kind = request.facts, request.kind
        self._round = facts.get("round", self._round)
        private = self._facts.get("private", False)
        nodes = "nodes" if private and kind != "install" else f"{number} nodes"
        named = {"version": facts.get("version"), "round": self._round, "nodes": nodes}
        self._does("round", _DOING[kind].format(**named))

    def sent(self, size: int) -> None:
        """This many bytes have gone out."""
        self._totals["bytes_sent"] += size

    def heard(self, node: int, reply: Reply) -> None:
        """A node has answered. A device that comes from a new node leaves its old one behind."""
        self._totals["bytes_received"] += reply.size
        about = self._nodes.setdefault(node, {})
        about["answered"] = self.now()
        device, version = reply.facts.get("device"), reply.facts.get("version")
        problem = reply.error or reply.facts.get("problem")
        about["problem"] = None if problem is None else str(problem)[:200]
        if isinstance(device, str):
            about["device"] = device[:64]
            self._nodes = {
                n: a
                for n, a in self._nodes.items()
                if n in self._reach or n == node or a.get("device") != about["device"]
            }
        if type(version) is int:
            about["version"] = version

    def finished(self, metrics: Mapping[str, Any]) -> None:
        """A round has ended with these metrics."""
        self._recent = [*self._recent, {key: metrics.get(key) for key in _KEPT}][-_RECENT:]
        self._rewards.add(metrics)
        for key in ("asked", "clients", "events"):
            self._totals[key] += metrics[key] or 0
        self._totals["empty"] += metrics["clients"] == 0
        for kind, number in (metrics["refused"] or {}).items():
            self._totals["refused"][kind] = self._totals["refused"].get(kind, 0) + number
        self._does("between", f"round {metrics['round']} has ended")

    def ended(self) -> None:
        """All rounds are done."""
        self._does("done", "all rounds are done")

    def alive(self) -> None:
        """The server is there; write it down if the last time is a while ago."""
        if self.now() - self._written >= max(1.0, len(self._nodes) / 500):
            self._write()

    def view(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "time": self.now(),
            "pid": os.getpid(),
            "started": self._started,
            "phase": self._phase,
            "doing": self._doing,
            "since": self._since,
            "in_reach": len(self._reach),
            "totals": self._totals,
            "rewards": self._rewards.to_json(),
            "recent": self._recent,
            "nodes": {
                str(node): {**about, "in_reach": node in self._reach}
                for node, about in sorted(self._nodes.items())
            },
            **self._facts,
        }

    def _does(self, phase: str, what: str) -> None:
        if what != self._doing:
            if phase != self._phase:
                self._since = self.now()
            self._phase, self._doing = phase, what
            self._write()
        self.alive()

    def _write(self) -> None:
        self._written = self.now()
        if self._path is None:
            return
        view = self.view()
        found = warnings_of(view, self.now())
        for kind, text in found.items():
            if kind not in self._warned:
                _logger.warning("%s", text, extra={"facts": {"warning": kind}})
        for kind in self._warned.keys() - found.keys():
            _logger.info("no longer: %s", kind)
        self._warned = found
        _show(self._path, view)


def read_live(folder: Path) -> dict[str, Any] | None:
    """The server's last view of itself; None if it never ran, or if that cannot be read."""
    found = read_json(folder / "live.json")
    expected: dict[str, type | tuple[type, ...]] = {
        **dict.fromkeys(("time", "started", "since"), (int, float)),
        **dict.fromkeys(("phase", "doing"), str),
        **dict.fromkeys(("nodes", "totals"), dict),
        "in_reach": int,
        "recent": list,
    }
    if found is None or not all(isinstance(found.get(key), kind) for key, kind in expected.items()):
        return None
    nodes = found["nodes"].items()
    found["nodes"] = {n: about for n, about in nodes if n.isdigit() and isinstance(about, dict)}
    return found


@contextmanager
def noting_the_end(folder: Path) -> Iterator[None]:
    """Say in the view that the server has been stopped when the block ends, unless its rounds are
    done.
    """
    try:
        yield
    finally:
        view = read_live(folder)
        if view is not None and view["phase"] != "done":
            _show(
                folder / "live.json",
                {**view, "phase": "stopped", "doing": "stopped", "since": time.time()},
            )


def _show(path: Path, view: Mapping[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    with suppress(OSError):  # a full disk hides the view, it does not stop the rounds
        temporary.write_text(json.dumps(view), encoding="utf-8")
        temporary.replace(path)


def warnings_of(view: Mapping[str, Any], now: float) -> Warnings:
    """The warnings in force, by kind."""
    found: Warnings = {}
    if view["phase"] in ("done", "stopped"):
        return found
    if (silent := now - view["time"]) > _SILENT:
        found["silent"] = f"the server app has not been heard of for {in_words(silent)}"
    recent = view["recent"]
    began = max(
        [view["started"], *(line["time"] for line in recent[-1:] if line.get("time") is not None)]
    )
    patience = 3 * view.get("longest_round", 180.0)
    if view["phase"] != "paused" and now - began > patience:
        found["stalled"] = f"no round has ended for {in_words(now - began)}: {view['doing']}"
    wanted, private = view.get("wanted", 0), view.get("private", False)
    if view["phase"] != "starting" and view["in_reach"] < _LOW * wanted:
        made_for = f"the population of {wanted}" if private else f"the {wanted} that a round asks"
        found["low reach"] = f"{view['in_reach']} nodes in reach, far fewer than {made_for}"
    last = recent[-1] if recent else {}
    share, devices = last.get("largest_share"), last.get("clients") or 0
    if share is not None and devices and share > max(_MUCH, 1.5 / devices):
        found["one device"] = (
            f"one device has reported {share:.0%} of the {last['events']} events of round"
            f" {last['round']}"
        )
    return found


def in_words(seconds: float) -> str:
    """A duration to one or two digits.

    Examples:
        >>> in_words(0.42), in_words(35), in_words(725), in_words(11_000), in_words(2e5)
        ('0.4 s', '35 s', '12 min', '3 h', '2 days')
    """
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = seconds / 60
    if minutes < 120:
        return f"{minutes:.0f} min"
    return f"{minutes / 60:.0f} h" if minutes < 48 * 60 else f"{minutes / 60 / 24:.0f} days"


def _lines_in(metrics: Path) -> list[dict[str, Any]]:
    """The metrics of all rounds; none where they cannot be read, which the server itself says."""
    try:
        return [line for line in read_lines(metrics) if type(line.get("model_version")) is int]
    except (OSError, ValueError):
        return []
