"""A page on this machine that follows the runs of a folder: a small read-only server and what it
answers.

The standard library's server is enough for one person's browser on 127.0.0.1, so nothing has to be
installed for it. A request never names a path: the page receives what is there and cannot ask for
anything else.
"""

import math
import os
import re
import threading
from collections.abc import Collection
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import numpy as np

from fedbandit.core.errors import ConfigError
from fedbandit.core.files import object_in, to_json
from fedbandit.core.identity import PRIVATE, last_rounds, owners
from fedbandit.report.report import asset
from fedbandit.results.plots import MOST_CURVES, chart
from fedbandit.results.reading import (
    Arrays,
    MetricsFile,
    differing,
    readable,
    require_folder,
    settings_of,
)
from fedbandit.runs.index import Problem, Run, RunGroup, grouped, read_runs

_MOST_BYTES = 16_000_000  # of metrics that one look reads; a page is answered in about a second
_EMPTY = {"title": "no runs", "series": [], "marks": []}
_RECENT = 50  # rounds whose pace predicts the time left
_MOST_SEEDS = 16  # that one curve is the mean of; a page shows curves, it does not settle anything
_MOST_COLUMNS = 40  # of parameters that differ; the page shows some, and can search all
_HASH = re.compile(r"-[0-9a-f]{10}(?=/|$)")  # ends the folder of a sweep's member
_READ = (
    "config.toml",
    "environment.json",
    "summary.json",
    "error.json",
    "metrics.jsonl",
    "timings.jsonl",
    *(PRIVATE, f"{PRIVATE}/metrics.jsonl", f"{PRIVATE}/summary.json"),
)
_ASSETS = {
    "/": ("watch.html", "text/html"),
    "/style.css": ("style.css", "text/css"),
    "/chart.js": ("chart.js", "text/javascript"),
    "/watch.js": ("watch.js", "text/javascript"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Watcher:
    """The state of all runs below a folder; remembers what it has read, so that asking often
    is cheap.

    The table needs the last line of each run; the curves need whole files, of which each call reads
    a limited part.
    """

    def __init__(self, folder: Path, most: int = _MOST_BYTES) -> None:
        self.folder, self._most = folder, most
        self._files: dict[Path, MetricsFile] = {}
        self._groups: tuple[list[object], list[list[int]], list[str]] = ([], [], [])
        self._parameters: list[str] = []
        self._common: list[str] = []
        self._values: dict[Path, list[Any]] = {}
        self._lock = threading.Lock()

    def now(self, chosen: Collection[str] = ()) -> dict[str, Any]:
        """Everything that the page shows; with the names of some runs, their curves and how they
        differ.
        """
        with self._lock:
            folders = [self.folder] if self.folder.is_dir() else []
            runs, problems = read_runs(folders, self._inside)
            groups = self._grouped(runs)
            picked = [run for run in runs if run.name in chosen][:MOST_CURVES]
            shown = [RunGroup(run.name, [run]) for run in picked] or _worth_showing(groups)
            members = self._members(shown)
            damaged = {
                path: file.problem for path, file in self._files.items() if file.problem is not None
            }
            problems += [
                Problem(run.name, damaged[run.path]) for run in runs if run.path in damaged
            ]
            labels = {run.path: group.label for group in groups for run in group.runs}
            return {
                "folder": self.folder.resolve().name,
                "configurations": len(groups),
                "shown": len(shown),
                "parameters": self._parameters,
                "common": self._common,
                "runs": [
                    {
                        **_row(run, labels[run.path]),
                        "values": self._values[run.path],
                    }
                    for run in runs
                    if run.path not in damaged
                ],
                "comparison": _comparison(picked),
                "problems": [{"name": one.name, "reason": one.reason} for one in problems],
                "charts": {
                    "reward": chart("Running average reward", "running_reward", members) or _EMPTY,
                    "propensity": chart(
                        "Mean probability of the chosen action", "propensity", members
                    )
                    or _EMPTY,
                },
            }

    def _members(self, groups: list[RunGroup]) -> dict[str, list[Arrays]]:
        """The columns of the runs that each curve is the mean of: the finished ones, or where none
        is, all.
        """
        chosen = {
            group.label: (group.finished or [run for run in group.apart if run.rounds])[
                :_MOST_SEEDS
            ]
            for group in groups
        }
        wanted = [run for runs in chosen.values() for run in runs]
        self._files = {
            run.path: self._files.get(run.path) or MetricsFile(owners(run.path / "metrics.jsonl"))
            for run in wanted
        }
        left = self._most
        for run in wanted:
            if left > 0:
                left -= self._files[run.path].follow(left)
        members: dict[str, list[Arrays]] = {}
        for label, runs in chosen.items():
            files = [self._files[run.path] for run in runs]
            read = [file for file in files if file.problem is None and file.rounds]
            whole = [
                file
                for file, run in zip(files, runs, strict=True)
                if file in read and file.rounds >= run.rounds
            ]
            members[label] = [
                file.columns for file in whole or read
            ]  # those not yet read to their end come later
        return members

    def _grouped(self, runs: list[Run]) -> list[RunGroup]:
        """The groups; which run is in which is worked out again only when there are other runs."""
        known = [(run.path, id(run.config), id(run.environment)) for run in runs]
        if known != self._groups[0]:
            groups, place = grouped(runs), {run.path: i for i, run in enumerate(runs)}
            members = [[place[run.path] for run in group.runs] for group in groups]
            self._groups = (list(known), members, [group.label for group in groups])
            self._tell_apart(runs)
        _, members, labels = self._groups
        return [
            RunGroup(label, [runs[i] for i in own])
            for label, own in zip(labels, members, strict=True)
        ]

    def _tell_apart(self, runs: list[Run]) -> None:
        """Which parameters differ, the rule first and then those with the most values, their values
        in each run, and the settings that all share, which a search finds, too.
        """
        settings = {run.path: settings_of(run.config.model_dump()) for run in runs}
        found = [key for key in differing(list(settings.values())) if key != "rounds"]
        kinds = {key: len({str(own.get(key)) for own in settings.values()}) for key in found}
        found.sort(key=lambda key: (key != "policy.name", -kinds[key]))
        self._parameters = found[:_MOST_COLUMNS]
        first = next(iter(settings.values()), {})
        shared = {key: value for key, value in first.items() if key not in kinds}
        self._common = [f"{key}={readable(key, value)}" for key, value in shared.items()]
        self._values = {
            path: [readable(key, own.get(key)) for key in self._parameters]
            for path, own in settings.items()
        }

    def _inside(self, path: Path) -> bool:
        """Whether all that would be read lies in the folder; a link may lead out of it."""
        linked = [path / name for name in _READ if (path / name).is_symlink()]
        root = self.folder.resolve() if linked else None
        # not `resolve`, which raises where a link leads to itself
        ends = [Path(os.path.realpath(link)) for link in linked]
        return all(end.is_relative_to(root) for end in ends if root is not None)


def _worth_showing(groups: list[RunGroup]) -> list[RunGroup]:
    """Those that run now and those that did best, where there are more than anybody can tell apart."""

    def rank(position: int) -> tuple[bool, float]:
        runs = groups[position].runs
        rewards = [float(run.last.get("running_reward") or 0.0) for run in runs]
        return any(run.status == "running" for run in runs), max(rewards, default=0.0)

    best = sorted(range(len(groups)), key=rank, reverse=True)[:MOST_CURVES]
    return [groups[i] for i in sorted(best)]


def _comparison(runs: list[Run]) -> dict[str, Any]:
    """Differences between the chosen runs: the keys, and each run's values."""
    settings = [settings_of(run.config.model_dump()) for run in runs]
    keys = differing(settings)
    rows = [
        {
            "name": run.name,
            "running_reward": run.last.get("running_reward"),
            "values": [readable(key, own.get(key)) for key in keys],
        }
        for run, own in zip(runs, settings, strict=True)
    ]
    return {"keys": keys, "rows": rows}


def _row(run: Run, label: str) -> dict[str, Any]:
    """A run's row of the table; where its folder's name is a digest, the title is what sets it
    apart.
    """
    hashed = _HASH.search(run.name) is not None
    return {
        "name": run.name,
        "title": f"{label}, seed {run.config.seed}" if hashed else run.name,
        "configuration": label,
        "status": run.status,
        "rounds": run.rounds,
        "of": run.config.rounds,
        "reward": run.last.get("reward"),
        "running_reward": run.last.get("running_reward"),
        "seconds_left": _seconds_left(run) if run.status == "running" else None,
        "error": None if run.summary is not None else run.error,
    }


def _seconds_left(run: Run) -> float | None:
    """By the pace of the last rounds; None where nothing sensible is known of it."""
    try:
        lines = [object_in(line) for line in last_rounds(run.path / "timings.jsonl")[-_RECENT:]]
        # The median: the first rounds compile, open files and take many times as long.
        pace = float(np.median([float(line["seconds"]) for line in lines])) if lines else math.nan
        left = pace * (run.config.rounds - run.rounds)
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return left if math.isfinite(left) else None


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, watcher: Watcher, *arguments: Any) -> None:
        self.watcher = watcher
        super().__init__(*arguments)

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rsplit(":", 1)[0]
        if host not in (
            "127.0.0.1",
            "localhost",
        ):  # a foreign name that points here is a foreign site's doing
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "only for this machine")
        elif self.path.partition("?")[0] == "/runs.json":
            chosen = parse_qs(self.path.partition("?")[2]).get(
                "run", []
            )  # names, which are only looked up
            self._answer(HTTPStatus.OK, "application/json", to_json(self.watcher.now(chosen)))
        elif self.path in _ASSETS:
            name, kind = _ASSETS[self.path]
            self._answer(HTTPStatus.OK, kind, asset(name))
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "nothing here")

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the page was closed meanwhile

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing; a page that asks every two seconds would fill the terminal."""


def make_server(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server on 127.0.0.1, not yet serving; port 0 takes any free one."""
    require_folder(folder)
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, Watcher(folder)))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", "a port is a number from 0 to 65535")
        raise ConfigError(f"--port: cannot listen on 127.0.0.1:{port}: {reason}") from None
    server.daemon_threads = True
    return server
