"""A page that shows the reward rising from model to model, made from the server's folder."""

from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fedbandit import DataError
from fedbandit.deploy.server.status import in_lines, read_status

_STYLE = (
    ":root{color-scheme:light dark}body{font:16px system-ui;margin:2em auto;max-width:46em;padding:0 1em}"
    "pre{overflow-x:auto}svg{max-width:100%;height:auto;fill:currentColor}rect{fill:#2a7fb5}"
)


def render(state: Path) -> str:
    """The page as HTML; it loads itself again every few seconds."""
    try:
        status = read_status(state)
        body = (
            _bars(status["reward"]["by_version"])
            + f"<pre>{escape(chr(10).join(in_lines(status)))}</pre>"
        )
    except DataError:
        body = "<p>Waiting for the first round.</p>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><meta http-equiv="refresh" content="3">'
        f"<title>Tag suggestions</title><style>{_STYLE}</style></head>"
        f"<body><h1>Tag suggestions</h1>{body}</body></html>"
    )


def _bars(rewards: dict[int, float | None]) -> str:
    """Share of suggestions that were used, by the model in use when they were reported."""
    known = {version: reward for version, reward in rewards.items() if reward is not None}
    if not known:
        return "<p>No rewards yet.</p>"
    bars = []
    for i, (version, reward) in enumerate(known.items()):
        height, x = 180 * max(0.0, min(1.0, reward)), 20 + 50 * i
        bars.append(
            f'<rect x="{x}" y="{200 - height:.0f}" width="36" height="{height:.0f}"/>'
            f'<text x="{x + 18}" y="{193 - height:.0f}" text-anchor="middle" font-size="12">{reward:.2f}</text>'
            f'<text x="{x + 18}" y="216" text-anchor="middle" font-size="12">{version}</text>'
        )
    width = 40 + 50 * len(known)
    title = "Share of suggestions that were used, by model version"
    drawn = f'<svg viewBox="0 0 {width} 225" width="{width}" role="img" aria-label="{title}">{"".join(bars)}</svg>'
    return f"<p>{title}</p>{drawn}"


def make_page(state: Path, port: int = 0) -> ThreadingHTTPServer:
    """Serve the page on loopback; port 0 for any free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            payload = render(state).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: object) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)
