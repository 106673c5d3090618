"""A deployment seen from outside, while it runs or after: lines, a table of nodes, a monitors'
page.

`/metrics` speaks Prometheus's language; `/healthz` answers 200, or 503 with the reasons. Reads
files, changes none.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from socketserver import ThreadingMixIn
from statistics import median
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from fedbandit.core.errors import DataError, FedbanditError, needing
from fedbandit.core.files import read_lines
from fedbandit.deploy.server.operator import OPEN, OperatorRequests, pending, read_requests
from fedbandit.deploy.server.server_status import (
    RewardTotals,
    in_words,
    read_live,
    sums_of,
    warnings_of,
)
from fedbandit.deploy.server.store import is_private, read_facts, read_rollback, reading
from fedbandit.privacy.reporting import in_one_line

_LISTED = 5  # nodes that the status names
_RECENT = 10  # rounds that "lately" looks at
_UNHEALTHY = ("silent", "stalled")  # worth waking somebody for; other warnings are for the day


def read_status(folder: Path) -> dict[str, Any]:
    """The deployment's state as plain values; the server may be running meanwhile."""
    facts = read_facts(folder)
    extra, deployed = facts["extra"], sorted(facts["deployed"])
    private, lines = is_private(extra), _metrics(folder)
    recent, last = lines[-_RECENT:], lines[-1] if lines else {}
    refused: Counter[str] = Counter()
    for line in () if private else lines:
        refused.update(line["refused"])
    idle = [line["idle"] for line in recent]
    rounds, totals = facts["rewarded_rounds"], RewardTotals(lines)
    running = facts["reward_total"] / rounds if rounds else None
    lately = [sum(column) for column in zip(*map(sums_of, recent), strict=True)] or [0, 0.0]
    return {
        "round": facts["round"],
        "devices": None if private else facts["devices"],
        "participation": None
        if private
        else {
            "rounds": len(recent),
            "asked": sum(line["asked"] for line in recent),
            "reported": sum(line["clients"] for line in recent),
            "idle": None if None in idle else sum(idle),
            "refused": sum(sum(line["refused"].values()) for line in recent),
        },
        "refused": dict(sorted(refused.items())),
        "reward": {
            "running": last.get("running_reward") if private else running,
            "figures": _figures(extra),
            "lately": lately[1] / lately[0] if lately[0] > 0 else None,
            "median": last.get("reward_median"),
            "total": {"events": totals.events, "rewards": totals.rewards},
            "by_version": totals.means(),
        },
        "privacy": (extra.get("privacy") or "no round since an update") if private else None,
        "gate": _gate(lines),
        "secure_aggregation": bool(extra.get("promises", {}).get("secure aggregation")),
        "clip_norm": facts["clip_norm"],
        "model_version": max(deployed),
        "kept_versions": deployed,
        "versions": extra.get("versions", []),
        "rollback_asked": read_rollback(folder),
        "pending": pending(folder),
    }


def full_status(folder: Path, now: float | None = None) -> dict[str, Any]:
    """The state of a deployment, its server's view of itself, and warnings, as plain values."""
    now = time.time() if now is None else now
    live = read_live(folder)
    found = {**read_status(folder), "operator": read_requests(folder).to_json()}
    if live is None:
        return {**found, "live": None, "warnings": {}}
    warnings, ended = warnings_of(live, now), live["phase"] in ("done", "stopped")
    running = "silent" not in warnings and not ended
    if live["phase"] == "stopped":
        ago = in_words(max(0.0, now - live["since"]))
        warnings["stopped"] = f"the server was stopped {ago} ago; nobody is in reach of it"
    if live.get("open") and not ended:
        warnings["open"] = OPEN
    times = [line.get("seconds") for line in live["recent"]]
    seconds = [took for took in times if isinstance(took, int | float)]
    last = live["recent"][-1] if live["recent"] else {}
    totals = live["totals"]
    found["live"] = {
        "running": running,
        "doing": live["doing"],
        "since": live["since"],
        "heard_of": live["time"],
        "rounds": live.get("rounds"),
        "in_reach": live["in_reach"] if running else 0,
        "needed": live.get("needed"),
        "nodes": [{**node, "in_reach": node["in_reach"] and running} for node in nodes_of(live)],
        "last_round_ended": last.get("time"),
        "round_seconds": {"last": seconds[-1], "median": median(seconds), "longest": max(seconds)}
        if seconds
        else None,
        "bytes": {name: totals.get(f"bytes_{name}", 0) for name in ("sent", "received")},
    }
    return {**found, "warnings": warnings}


def nodes_of(live: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The nodes that the server knows of, those in reach first."""
    nodes = [
        {
            "node": int(node),
            "device": about.get("device"),
            "in_reach": bool(about.get("in_reach")),
            "last_seen": about.get("seen"),
            "last_answer": about.get("answered"),
            "version": about.get("version"),
            "problem": about.get("problem"),
        }
        for node, about in live["nodes"].items()
    ]
    return sorted(nodes, key=lambda node: (not node["in_reach"], node["node"]))


def status_lines(status: Mapping[str, Any], now: float | None = None) -> list[str]:
    """The status as lines for a terminal."""
    now, live = time.time() if now is None else now, status["live"]
    lines = ["server         has not run yet, or not since an update"]
    if live is not None:
        lines = _live_lines(live, now)
    requests = OperatorRequests(**status["operator"])
    lines += in_lines(status) + requests.in_lines()
    return lines + [f"warning        {text}" for text in status["warnings"].values()]


def _live_lines(live: Mapping[str, Any], now: float) -> list[str]:
    running = "running" if live["running"] else "not running"
    lines = [
        f"server         {running}, last heard of {_ago(live['heard_of'], now)}",
        f"doing          {live['doing']}, for {in_words(now - live['since'])}",
        f"in reach       {live['in_reach']} nodes; a round needs {live['needed']}",
    ]
    for node in live["nodes"][:_LISTED]:
        seen, answered = _ago(node["last_seen"], now), _ago(node["last_answer"], now)
        away = "" if node["in_reach"] else "; away"
        lines.append(f"  node {node['node']:<20}  seen {seen}, answered {answered}{away}")
    if len(live["nodes"]) > _LISTED:
        lines.append(f"  and {len(live['nodes']) - _LISTED} more: see `fedbandit deploy nodes`")
    if (took := live["round_seconds"]) is not None:
        last, middle, longest = (in_words(took[k]) for k in ("last", "median", "longest"))
        lines.append(
            f"rounds take    {last} (the last), {middle} (median of the recent), {longest}"
            f" (the longest); the last ended {_ago(live['last_round_ended'], now)}"
        )
    sent, received = (f"{live['bytes'][name] / 1e6:.1f} MB" for name in ("sent", "received"))
    return [*lines, f"traffic        {sent} sent, {received} received since the server started"]


def in_lines(status: Mapping[str, Any]) -> list[str]:
    """The kept state of a deployment as lines for a terminal."""
    reward, part = status["reward"], status["participation"]
    spent = status["privacy"] or {"mechanism": "none"}
    seen = ["participation  not said: epsilon holds for those who do not know how many took part"]
    if part is not None:
        idle = "" if part["idle"] is None else f" {part['idle']} had nothing to train on,"
        seen = [
            f"devices seen   {status['devices']}",
            f"participation  {part['reported']} reports of {part['asked']} asked in the last"
            f" {part['rounds']} rounds;{idle} {part['refused']} were refused",
        ]
    aggregation = ("plain: each report is seen here", "secure: only sums are seen here")
    kept = ", ".join(map(str, status["kept_versions"]))
    lines = [
        f"round          {status['round']}",
        *seen,
        f"reward         {_rewards(reward)}",
        f"privacy        {spent if isinstance(spent, str) else in_one_line(spent)}",
        f"aggregation    {aggregation[status['secure_aggregation']]}",
        f"clip norm      {status['clip_norm']:.4g}",
        f"model          version {status['model_version']}; kept: {kept}",
    ]
    if (gate := status["gate"]) is not None:
        done = "let the model pass" if gate["passes"] else "held the model back"
        lines.append(
            f"gate           {done} after round {gate['round']}: gain {_shown(gate['gain'])},"
            f" at least {_shown(gate['lower'])}, by {gate['devices']} devices;"
            f" {gate['held_back']} of {gate['judged']} held back so far"
        )
    lines += [
        f"  version {entry['version']:<4} after round {entry['round']:<5}"
        f" reward {_shown(reward['by_version'].get(entry['version']))}  {entry['why']}"
        for entry in status["versions"][-_RECENT:]
    ]
    if status["refused"]:
        kinds = ", ".join(f"{kind} {count}" for kind, count in status["refused"].items())
        lines.append(f"refused        {kinds}")
    return lines + [f"pending        {text}" for text in status["pending"]]


def _figures(extra: Mapping[str, Any]) -> str:
    """The kind of a deployment's reward figures."""
    if not is_private(extra):
        return "exact"
    share = (extra["promises"].get("private figures") or {}).get("figures_share")
    return "noised" if share else "not reported"


def _metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of all rounds; one that is not a round's is refused."""
    path = folder / "metrics.jsonl"
    lines: list[dict[str, Any]] = []
    with reading(path, "remove the line that is not that of a round"), suppress(FileNotFoundError):
        lines = read_lines(path)
    for number, line in enumerate(lines, start=1):
        counts = [line.get(name) for name in ("round", "model_version")]
        told = [line.get(name, "missing") for name in ("asked", "clients", "idle", "events")]
        counts += [count for count in told if count is not None]  # null in private rounds
        fine = all(type(count) is int for count in counts)
        if not fine or not isinstance(line.get("refused", "missing"), dict | None):
            raise DataError(f"{path}: line {number} is not that of a round; remove it")
    return lines


def _gate(lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The last verdict on a model, with its round, and how many there were; None without any."""
    judged = [line for line in lines if "gate" in line]
    if not judged:
        return None
    held_back = sum(not line["gate"]["passes"] for line in judged)
    counts = {"judged": len(judged), "held_back": held_back}
    return {"round": judged[-1]["round"], **judged[-1]["gate"], **counts}


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _rewards(reward: Mapping[str, Any]) -> str:
    if reward["figures"] == "not reported":
        return "not reported: no part of the privacy budget pays for it (privacy.figures_share)"
    said = f"{_shown(reward['running'])} over all rounds, {_shown(reward['lately'])} lately"
    if reward["figures"] == "noised":
        return f"{said}, with noise"
    if reward["median"] is not None:
        said += f"; the median device {_shown(reward['median'])}"
    total = reward["total"]
    return f"{said}; in all {total['rewards']:.6g} from {total['events']:g} events"


def nodes_table(folder: Path, now: float | None = None) -> list[str]:
    """The nodes of a deployment with when they were last seen and last answered, as lines."""
    now, live = time.time() if now is None else now, read_live(folder)
    revoked = set(read_requests(folder).revoked)
    if live is None:
        raise DataError(f"{folder}: no server has run here yet")
    lines = [f"{'node':<20}  {'device':<32}  {'model':>5}  {'seen':>12}  {'answered':>12}  state"]
    for node in nodes_of(live):
        gone = {str(node["node"]), node["device"]} & revoked
        state = "revoked" if gone else "in reach" if node["in_reach"] else "away"
        problem = "" if node["problem"] is None else f": {node['problem']}"
        version = "-" if node["version"] is None else node["version"]
        seen, answered = _ago(node["last_seen"], now), _ago(node["last_answer"], now)
        who = f"{node['node']:<20}  {node['device'] or '-':<32}  {version:>5}"
        lines.append(f"{who}  {seen:>12}  {answered:>12}  {state}{problem}")
    return lines


def _ago(when: float | None, now: float) -> str:
    return "never" if when is None else f"{in_words(max(0.0, now - when))} ago"


def health(folder: Path, now: float | None = None) -> tuple[bool, list[str]]:
    """Whether a deployment gets on, and what is wrong with it."""
    now, live = time.time() if now is None else now, read_live(folder)
    if live is None:
        return False, ["the server app has not started yet"]
    warnings = warnings_of(live, now)
    return not any(kind in warnings for kind in _UNHEALTHY), list(warnings.values())


_GAUGES = {
    "round": "The last round that has ended",
    "rounds_planned": "Rounds of the deployment",
    "nodes_in_reach": "Nodes in reach",
    "nodes_needed": "Nodes that a round needs in reach",
    "last_round_seconds": "How long the last round took",
    "last_round_timestamp_seconds": "When the last round ended",
    "waiting_seconds": "How long no round has run, 0 while one does",
    "paused": "Whether the operator has paused the rounds",
    "pending_decisions": "Decisions of the operator that no round has obeyed yet",
    "model_version": "The model that the last round's devices were to act with",
    "epsilon": "Epsilon spent (RDP)",
    "reward": "Mean reward of the last round that reported any",
    "reward_median": "Median over devices of the mean reward in the last round",
    "running_reward": "Mean reward over all rounds",
    "reward_total": "Rewards of all rounds",
    "events_rewarded": "Events of all rounds that were rewarded",
}
_COUNTERS = {
    "asked": "Requests to train, since the server started",
    "clients": "Reports that entered a model, since the server started",
    "events": "Rewarded events reported, since the server started",
    "empty": "Rounds that heard from no device, since the server started",
    "bytes_sent": "Bytes of models and weights sent, since the server started",
    "bytes_received": "Bytes of updates received, since the server started",
}
_LABELLED = {
    "refused": "Answers left out, since the server started",
    "version_reward": "Mean reward of the events that a version chose",
    "warning": "1 for each warning in force",
}


class PrometheusCollector:
    """Metrics for Prometheus, read from the server's folder whenever it asks."""

    def __init__(self, folder: Path, now: Callable[[], float] = time.time) -> None:
        self._folder, self._now = folder, now

    def collect(self) -> Iterable[Any]:
        """The families of metrics, for a registry of `prometheus_client`."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        live = read_live(self._folder)
        warnings = {} if live is None else warnings_of(live, self._now())
        ended = live is not None and live["phase"] in ("done", "stopped")
        running = live is not None and "silent" not in warnings
        yield GaugeMetricFamily(
            "fedbandit_up", "Whether the server app is heard of", float(running)
        )
        if live is None:
            return
        for name, value in self._values(live, running and not ended).items():
            if isinstance(value, int | float):
                yield GaugeMetricFamily(f"fedbandit_{name}", _GAUGES[name], value)
        # Nothing of a private deployment counts the devices or events of a round.
        totals = {} if live.get("private") else live["totals"]
        for name, what in _COUNTERS.items() if totals else ():
            yield CounterMetricFamily(f"fedbandit_{name}", what, totals.get(name, 0))
        versions = live.get("rewards", {}).get("by_version", {})
        labelled = {
            ("refused", "kind"): totals.get("refused", {}),
            ("version_reward", "version"): {
                v: r[1] / r[0] for v, r in versions.items() if r[0] > 0
            },
            ("warning", "kind"): dict.fromkeys(warnings, 1.0),
        }
        for (name, label), values in labelled.items():
            kind = CounterMetricFamily if name == "refused" else GaugeMetricFamily
            family = kind(f"fedbandit_{name}", _LABELLED[name], labels=[label])
            for value, number in values.items():
                family.add_metric([value], number)
            yield from [family] * bool(values)

    def _values(self, live: Mapping[str, Any], running: bool) -> dict[str, Any]:
        """The gauges' values; what is not a number is left out."""
        last, sums = (live["recent"] or [{}])[-1], live.get("rewards", {})
        waits = live["phase"] in ("waiting", "paused")
        rewards = [line["reward"] for line in live["recent"] if line.get("reward") is not None]
        told = sums.get("events")
        return {
            "round": last.get("round", 0),
            "rounds_planned": live.get("rounds"),
            "nodes_in_reach": live["in_reach"] if running else 0,
            "nodes_needed": live.get("needed"),
            "last_round_seconds": last.get("seconds"),
            "last_round_timestamp_seconds": last.get("time"),
            "waiting_seconds": self._now() - live["since"] if waits else 0.0,
            "paused": float(live["phase"] == "paused"),
            "pending_decisions": float((self._folder / "rollback.json").exists()),
            "model_version": last.get("model_version"),
            "epsilon": last.get("epsilon"),
            "reward": rewards[-1] if rewards else None,
            "reward_median": last.get("reward_median"),
            "running_reward": last.get("running_reward"),
            "reward_total": sums.get("rewards") if told else None,
            "events_rewarded": told or None,
        }


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """A line for every scrape says nothing."""


@contextmanager
def monitoring_page(folder: Path, port: int | None) -> Iterator[int | None]:
    """Serve `/metrics` and `/healthz` on this machine while the block runs; the port (0 takes any),
    None for none.
    """
    if port is None:
        yield None
        return
    with needing("--metrics-port"):
        from prometheus_client import CollectorRegistry, make_wsgi_app
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PrometheusCollector(folder))
    metrics = make_wsgi_app(registry)

    def page(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        where = environ.get("PATH_INFO", "/")
        if where == "/metrics":
            return metrics(environ, start_response)  # type: ignore[no-any-return]
        code, lines = "404 Not Found", ["/metrics and /healthz"]
        if where == "/healthz":
            fine, reasons = health(folder)
            code = "200 OK" if fine else "503 Service Unavailable"
            lines = ["ok" if fine else "not ok", *reasons]
        start_response(code, [("Content-Type", "text/plain; charset=utf-8")])
        return ["".join(f"{line}\n" for line in lines).encode()]

    try:
        server = make_server("127.0.0.1", port, page, _Server, _Silent)
    except OSError as error:
        raise FedbanditError(f"--metrics-port: {port}: {error.strerror}") from None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def round_in_words(line: Mapping[str, Any]) -> str:
    """A round's metrics as one line."""
    unknown = "no new rewards" if line["events"] == 0 else "no reward to report"
    reward = unknown if line["reward"] is None else f"reward {line['reward']:.4f}"
    took = f", {in_words(line['seconds'])}" if isinstance(line.get("seconds"), int | float) else ""
    held_back = "" if line.get("gate", {}).get("passes", True) else "; the new model was held back"
    devices = "" if line["asked"] is None else f"{line['clients']} of {line['asked']} devices, "
    return f"round {line['round']}: {devices}{reward}{took}{held_back}"
