"""Everything on this machine with one command: a server, some devices with their users, a page.

Ctrl-C, SIGTERM and a closed terminal end all of it.

python examples/tag_suggestions/run.py
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from page import make_page
from users import TAGS, VOCABULARY

HERE = Path(__file__).parent
TOML = """rounds = {rounds}
deploy_every = 2
clients_per_round = {devices}

[policy]
name = "softmax"
beta = 0.1

[client]
learning_rate = 0.5
batch_size = 16

[server]
optimizer = "sgd"
learning_rate = 1.0

[clipping]
norm = 5.0

[deployment]
state = "server"
actions = {tags}
vocabulary = "words.txt"
min_reports = {devices}
"""


def write_files(folder: Path, rounds: int, devices: int) -> Path:
    """The deployment's TOML file and its vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "words.txt").write_text("\n".join(VOCABULARY), encoding="utf-8")
    toml = folder / "deployment.toml"
    toml.write_text(TOML.format(rounds=rounds, devices=devices, tags=list(TAGS)), encoding="utf-8")
    return toml


class Children:
    """Processes that are ended together, the last one first."""

    def __init__(self, logs: Path) -> None:
        self._logs, self._running = logs, []

    def start(self, name: str, *command: object) -> subprocess.Popen:
        with open(self._logs / f"{name}.log", "ab") as log:
            # Sessions of their own: Ctrl-C reaches this process alone, which then ends the others in order.
            child = subprocess.Popen(
                list(map(str, command)), stdout=log, stderr=log, start_new_session=True
            )
        self._running.append(child)
        return child

    def end(self) -> None:
        for child in reversed(self._running):
            if child.poll() is None:
                child.send_signal(signal.SIGINT)
        for child in reversed(self._running):
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def free_port() -> int:
    """A port that nothing listens on at this moment."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("tag_suggestions"), help="folder for everything"
    )
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--page-port", type=int, default=0, help="0: any free port")
    chosen = parser.parse_args()
    toml = write_files(chosen.out, chosen.rounds, chosen.devices)
    page = make_page(chosen.out / "server", chosen.page_port)
    threading.Thread(target=page.serve_forever, daemon=True).start()
    print(f"open http://127.0.0.1:{page.server_address[1]} and press Ctrl-C to end", flush=True)
    deploy, port = (sys.executable, "-m", "fedbandit", "deploy"), free_port()
    children = Children(chosen.out)
    for number in (signal.SIGTERM, signal.SIGHUP):  # `finally` ends the others, as with Ctrl-C
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        server = children.start("server", *deploy, "server", toml, "--insecure", "--port", port)
        for number in range(chosen.devices):
            folder = chosen.out / f"device-{number}"
            children.start(
                f"app-{number}", sys.executable, HERE / "device.py", folder, "--user", number
            )
            joins = (
                "client",
                folder,
                "--create",
                "--server",
                f"127.0.0.1:{port}",
                "--insecure",
            )
            children.start(f"node-{number}", *deploy, *joins)
        while server.poll() is None:
            time.sleep(0.5)
        log = chosen.out / "server.log"
        print(f"the server has ended with code {server.returncode}; see {log}")
    except KeyboardInterrupt:
        print("ending", flush=True)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # a second one must not leave any behind
        children.end()
        page.shutdown()
        page.server_close()
    print(f"stopped; run the same command again to resume from {chosen.out}", flush=True)


if __name__ == "__main__":
    main()
