"""A page on this machine that follows the runs of a folder: a small read-only server and what it answers.

The standard library's server is enough for one person's browser on 127.0.0.1, so nothing has to be installed for it.
A request never names a path: the page receives what is there and cannot ask for anything else.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.core.errors import ConfigError
from fedbandit.core.files import object_in, to_json
from fedbandit.report.report import asset
from fedbandit.report.tables import Columns, chart, columns_of
from fedbandit.results.reading import require_folder
from fedbandit.runs.index import Run, RunGroup, find_runs, grouped

_RECENT = 50  # rounds whose pace predicts the time left
_MOST_CURVES = 12
_READ = ("config.toml", "environment.json", "summary.json", "error.json", "metrics.jsonl", "timings.jsonl")
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


@dataclass
class _Tail:
    """A file of one JSON line a round, of which only what is new is read."""

    offset: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)

    def follow(self, path: Path) -> list[dict[str, Any]]:
        try:
            with open(path, "rb") as file:
                if file.seek(0, 2) < self.offset:  # cut back: the run was resumed from an older checkpoint
                    self.offset, self.lines = 0, []
                file.seek(self.offset)
                new = file.read()
        except OSError:
            return self.lines
        complete = new[: new.rfind(b"\n") + 1]
        try:
            self.lines += [object_in(line) for line in complete.splitlines(keepends=True)]
        except ValueError:  # written while it was cut, or damaged: read anew the next time
            self.offset, self.lines = 0, []
            return []
        self.offset += len(complete)
        return self.lines


@dataclass
class Watcher:
    """What the runs below a folder look like now; remembers what it has read, so that asking often is cheap."""

    folder: Path
    _tails: dict[Path, _Tail] = field(default_factory=dict)
    _columns: dict[Path, tuple[int, Columns]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def now(self) -> dict[str, Any]:
        """Everything that the page shows."""
        with self._lock:
            runs = [run for run in find_runs([self.folder]) if self._inside(run)] if self.folder.is_dir() else []
            self._tails = {path: tail for path, tail in self._tails.items() if any(path.parent == r.path for r in runs)}
            self._columns = {run.path: self._read_columns(run) for run in runs}
            groups = grouped(runs)
            shown = self._worth_showing(groups)
            members = {g.label: [self._columns[run.path][1] for run in g.runs if run.rounds] for g in shown}
            empty = {"title": "no runs", "series": [], "marks": []}
            return {
                "folder": self.folder.resolve().name,
                "configurations": len(groups),
                "shown": len(shown),
                "runs": [self._row(run) for run in runs],
                "charts": {
                    "reward": chart("Running average reward", "running_reward", members) or empty,
                    "propensity": chart("Mean probability of the chosen action", "propensity", members) or empty,
                },
            }

    def _worth_showing(self, groups: list[RunGroup]) -> list[RunGroup]:
        """Those that run now and those that did best, where there are more than anybody can tell apart."""

        def rank(group: RunGroup) -> tuple[bool, float]:
            last = [self._columns[run.path][1]["running_reward"][-1:] for run in group.runs]
            return any(r.status == "running" for r in group.runs), max(
                (float(v[0]) for v in last if len(v)), default=0.0
            )

        best = sorted(groups, key=rank, reverse=True)[:_MOST_CURVES]
        return [group for group in groups if group in best]

    def _read_columns(self, run: Run) -> tuple[int, Columns]:
        lines, known = self._lines(run, "metrics.jsonl"), self._columns.get(run.path)
        return known if known is not None and known[0] == len(lines) else (len(lines), columns_of(lines))

    def _row(self, run: Run) -> dict[str, Any]:
        lines = self._lines(run, "metrics.jsonl")
        last: Mapping[str, Any] = lines[-1] if lines else {}
        return {
            "name": run.name,
            "status": run.status,
            "rounds": len(lines),
            "of": run.config.rounds,
            "reward": last.get("reward"),
            "running_reward": last.get("running_reward"),
            "seconds_left": self._seconds_left(run) if run.status == "running" else None,
            "error": None if run.summary is not None else run.error,
        }

    def _seconds_left(self, run: Run) -> float | None:
        timings = self._lines(run, "timings.jsonl")[-_RECENT:]
        if not timings:
            return None
        pace = float(np.mean([line["seconds"] for line in timings]))
        return pace * (run.config.rounds - int(timings[-1]["round"]))

    def _lines(self, run: Run, name: str) -> list[dict[str, Any]]:
        return self._tails.setdefault(run.path / name, _Tail()).follow(run.path / name)

    def _inside(self, run: Run) -> bool:
        """Whether all that would be read lies in the folder; a link may lead out of it."""
        root = self.folder.resolve()
        return all((run.path / name).resolve().is_relative_to(root) for name in _READ)


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, watcher: Watcher, *arguments: Any) -> None:
        self.watcher = watcher
        super().__init__(*arguments)

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rsplit(":", 1)[0]
        if host not in ("127.0.0.1", "localhost"):  # a foreign name that points here is a foreign site's doing
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "only for this machine")
        elif self.path == "/runs.json":
            self._answer(HTTPStatus.OK, "application/json", to_json(self.watcher.now()))
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
