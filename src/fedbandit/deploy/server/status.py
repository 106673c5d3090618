"""A deployment seen from outside, while it runs or after: lines for a terminal, a table of nodes, a page for monitors.

`/metrics` speaks Prometheus's language; `/healthz` answers 200, or 503 with the reasons. Reads files, changes none.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from socketserver import ThreadingMixIn
from statistics import median
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from fedbandit.core.errors import DataError, FedbanditError, needing
from fedbandit.deploy.server.operator import Wishes, read_wishes, shown_wishes
from fedbandit.deploy.server.server_status import in_words, read_live, warnings_of
from fedbandit.deploy.server.store import in_lines, read_status

_LISTED = 5  # nodes that the status names
_UNHEALTHY = (
    "silent",
    "stalled",
)  # what is worth waking somebody for; the other warnings are for the day


def full_status(folder: Path, now: float | None = None) -> dict[str, Any]:
    """What is kept of a deployment, what its server does right now, and what is wrong with it."""
    now = time.time() if now is None else now
    live = read_live(folder)
    found = {
        **read_status(folder),
        "operator": read_wishes(folder).to_json(),
        "live": None,
        "warnings": {},
    }
    if live is None:
        return found
    warnings = warnings_of(live, now)
    seconds = [
        line["seconds"] for line in live["recent"] if isinstance(line.get("seconds"), int | float)
    ]
    last = live["recent"][-1] if live["recent"] else {}
    found["live"] = {
        "running": "silent" not in warnings and live["phase"] not in ("done", "stopped"),
        "doing": live["doing"],
        "since": live["since"],
        "heard_of": live["time"],
        "rounds": live.get("rounds"),
        "in_reach": live["in_reach"],
        "needed": live.get("needed"),
        "nodes": nodes_of(live),
        "last_round_ended": last.get("time"),
        "round_seconds": {"last": seconds[-1], "median": median(seconds), "longest": max(seconds)}
        if seconds
        else None,
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
        if node.isdigit() and isinstance(about, dict)
    ]
    return sorted(nodes, key=lambda node: (not node["in_reach"], node["node"]))


def status_lines(status: Mapping[str, Any], now: float | None = None) -> list[str]:
    """The status as lines for a terminal."""
    now, live = time.time() if now is None else now, status["live"]
    lines = (
        _live_lines(live, now)
        if live is not None
        else ["server         has not run yet, or not since an update"]
    )
    lines += in_lines(dict(status))
    wishes = status["operator"]
    lines += shown_wishes(Wishes(wishes["paused"], wishes["pinned"], tuple(wishes["revoked"])))
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
    if live["round_seconds"] is not None:
        took = live["round_seconds"]
        lines.append(
            f"rounds take    {in_words(took['last'])} (the last), {in_words(took['median'])} (median of the recent),"
            f" {in_words(took['longest'])} (the longest); the last ended {_ago(live['last_round_ended'], now)}"
        )
    return lines


def nodes_table(folder: Path, now: float | None = None) -> list[str]:
    """The nodes of a deployment with when they were last seen and last answered, as lines."""
    now, live = time.time() if now is None else now, read_live(folder)
    revoked = set(read_wishes(folder).revoked)
    if live is None:
        raise DataError(f"{folder}: no server has run here yet")
    lines = [f"{'node':<20}  {'device':<32}  {'model':>5}  {'seen':>12}  {'answered':>12}  state"]
    for node in nodes_of(live):
        gone = {str(node["node"]), node["device"]} & revoked
        state = "revoked" if gone else "in reach" if node["in_reach"] else "away"
        problem = "" if node["problem"] is None else f": {node['problem']}"
        version = "-" if node["version"] is None else node["version"]
        lines.append(
            f"{node['node']:<20}  {node['device'] or '-':<32}  {version:>5}  {_ago(node['last_seen'], now):>12}"
            f"  {_ago(node['last_answer'], now):>12}  {state}{problem}"
        )
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


class PrometheusCollector:
    """What Prometheus collects: everything in the server's own words at the moment it asks."""

    def __init__(self, folder: Path, now: Callable[[], float] = time.time) -> None:
        self._folder, self._now = folder, now

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        live = read_live(self._folder)
        warnings = {} if live is None else warnings_of(live, self._now())
        running = live is not None and "silent" not in warnings
        yield GaugeMetricFamily(
            "fedbandit_up", "Whether the server app is heard of", float(running)
        )
        if live is None:
            return
        last, totals = (live["recent"] or [{}])[-1], live["totals"]
        gauges = {
            "round": ("The last round that has ended", last.get("round", 0)),
            "rounds_planned": ("Rounds of the deployment", live.get("rounds")),
            "nodes_in_reach": ("Nodes in reach", live["in_reach"]),
            "nodes_needed": ("Nodes that a round needs in reach", live.get("needed")),
            "last_round_seconds": ("How long the last round took", last.get("seconds")),
            "last_round_timestamp_seconds": ("When the last round ended", last.get("time")),
            "waiting_seconds": (
                "How long no round has run, 0 while one does",
                self._now() - live["since"] if live["phase"] in ("waiting", "paused") else 0.0,
            ),
            "paused": (
                "Whether the operator has paused the rounds",
                float(live["phase"] == "paused"),
            ),
            "model_version": (
                "The model that the last round's devices were to act with",
                last.get("model_version"),
            ),
            "epsilon": ("Epsilon spent (RDP)", last.get("epsilon")),
        }
        for name, (what, value) in gauges.items():
            if isinstance(value, int | float):
                yield GaugeMetricFamily(f"fedbandit_{name}", what, value)
        counters = {
            "asked": "Requests to train, since the server started",
            "clients": "Reports that entered a model, since the server started",
            "events": "Rewarded events reported, since the server started",
            "empty": "Rounds that heard from no device, since the server started",
        }
        if not live.get("private"):  # nothing there counts the devices or events of a round
            for name, what in counters.items():
                yield CounterMetricFamily(f"fedbandit_{name}", what, totals.get(name, 0))
            refused = CounterMetricFamily(
                "fedbandit_refused", "Answers left out, since the server started", labels=["kind"]
            )
            for kind, number in totals.get("refused", {}).items():
                refused.add_metric([kind], number)
            yield refused
        warning = GaugeMetricFamily(
            "fedbandit_warning", "1 for each warning in force", labels=["kind"]
        )
        for kind in warnings:
            warning.add_metric([kind], 1.0)
        yield warning


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """A line for every scrape says nothing."""


@contextmanager
def monitoring_page(folder: Path, port: int | None) -> Iterator[int | None]:
    """Serve `/metrics` and `/healthz` on this machine while the block runs; the port (0 takes any), None for none."""
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
        fine, reasons = health(folder)
        code = (
            "404 Not Found"
            if where != "/healthz"
            else "200 OK"
            if fine
            else "503 Service Unavailable"
        )
        lines = (
            ["ok" if fine else "not ok", *reasons]
            if where == "/healthz"
            else ["/metrics and /healthz"]
        )
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
