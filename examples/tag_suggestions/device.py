"""The app on one device: a small HTTP service around the agent. This is the part to copy.

POST /suggest  {"text": "..."}                      -> {"tag": "music", "event": "17-3fa2..."}
POST /feedback {"event": "17-3fa2...", "used": true} -> {"outcome": "recorded"}
"""

import argparse
import json
import random
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from users import User

from fedbandit import DataError
from fedbandit.deploy import Agent, Retention


def make_service(agent: Agent, port: int = 0) -> ThreadingHTTPServer:
    """An HTTP service on loopback that suggests tags and takes feedback; port 0 for any free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._reply(200, self._answer(asked))
            except DataError as problem:  # no model yet: the server has not been heard of
                self._reply(503, {"problem": str(problem)})
            except (KeyError, TypeError, ValueError) as problem:
                self._reply(400, {"problem": str(problem)})

        def _answer(self, asked: dict) -> dict:
            if self.path == "/suggest":
                decision = agent.choose(str(asked["text"]))
                return {
                    "tag": decision.name,
                    "event": decision.event_id,
                    "model": decision.model_version,
                }
            if self.path == "/feedback":
                return {"outcome": str(agent.reward(asked["event"], float(bool(asked["used"]))))}
            raise ValueError(f"{self.path}: nothing here")

        def _reply(self, code: int, answer: dict) -> None:
            payload = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: object) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def post(address: str, path: str, content: dict) -> dict:
    request = urllib.request.Request(address + path, json.dumps(content).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.loads(answer.read())


def write_once(address: str, user: User, chance: random.Random) -> bool:
    """A user writes a sentence, sees the suggestion and uses it or not."""
    text, right = user.write(chance)
    suggestion = post(address, "/suggest", {"text": text})
    used = suggestion["tag"] == right
    post(address, "/feedback", {"event": suggestion["event"], "used": used})
    return used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the agent's folder")
    parser.add_argument(
        "--user", type=int, required=True, help="number of the synthetic user of this device"
    )
    parser.add_argument("--pause", type=float, default=0.2, help="seconds between two sentences")
    chosen = parser.parse_args()
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, lambda *_: sys.exit(0))
    with Agent(chosen.folder, retention=Retention(max_events=400, reward_within=60)) as agent:
        service = make_service(agent)
        threading.Thread(target=service.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{service.server_address[1]}"
        print(f"user {chosen.user} at {address}", flush=True)
        user, chance = User(chosen.user), random.Random(chosen.user)
        try:
            while True:
                try:
                    write_once(address, user, chance)
                    time.sleep(chosen.pause)
                except urllib.error.HTTPError as problem:
                    if problem.code != 503:
                        raise
                    time.sleep(1.0)  # before the first model
        finally:
            service.shutdown()
            service.server_close()


if __name__ == "__main__":
    main()
