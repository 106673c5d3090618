"""Many devices and a server as processes that are killed at random; then every event and reward is accounted for.

    python scripts/soak.py --devices 50 --minutes 10

Apps and server are real processes and die by kill -9. Messages between server and devices are carried inside the
server's process, which loses and doubles some of them. Exits with code 1 if anything was lost or counted twice.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedbandit.deploy import Agent, Outcome, Retention
from fedbandit.deploy.messages import Reply, Request
from fedbandit.federated.state import Version

if TYPE_CHECKING:
    from fedbandit.deploy.server.deployment import Deployment

WORDS, ACTIONS = 8, 4  # texts: their learner starts fast, and servers are killed often
KEEP_ALL = Retention(
    max_events=1_000_000
)  # so that whatever was logged can still be counted at the end


def deployment_in(folder: Path) -> "Deployment":
    from fedbandit.deploy.server.deployment import (
        build_deployment,  # apps, which start often, need none of it
    )

    (folder / "words.txt").write_text("\n".join(f"word{i}" for i in range(WORDS)), encoding="utf-8")
    values = {
        "rounds": 1_000_000,
        "deploy_every": 5,
        "clients_per_round": 1_000_000,
        "server": {"optimizer": "sgd", "learning_rate": 1.0},
        "clipping": {"norm": 1.0},
        "policy": {"name": "softmax", "beta": 0.2},
        "deployment": {
            "state": "server",
            "actions": [f"action {i}" for i in range(ACTIONS)],
            "vocabulary": "words.txt",
            "round_seconds": 1.0,
            "install_seconds": 1.0,
            "poll_seconds": 0.05,
        },
    }
    return build_deployment(values, folder)


def app(folder: Path, pause: float) -> None:
    """An app that uses its agent for ever, and writes down what it was told before it goes on."""
    chance = np.random.default_rng()
    waiting: list[str] = []
    with (
        Agent(folder, retention=KEEP_ALL) as agent,
        open(folder / "told.txt", "a", encoding="utf-8") as told,
    ):
        while True:
            decision = agent.choose((np.arange(WORDS), chance.random(WORDS)))
            print("made", decision.event_id, file=told, flush=True)
            if decision.event_id is not None:
                waiting.append(decision.event_id)
            while len(waiting) > 3 or (waiting and chance.random() < 0.5):
                event = waiting.pop(int(chance.integers(len(waiting))))
                for _ in range(
                    1 + int(chance.integers(2))
                ):  # often twice: the second must not count
                    print(
                        agent.reward(event, float(chance.integers(2))).name,
                        event,
                        file=told,
                        flush=True,
                    )
            time.sleep(pause * chance.random())


class Carrier:
    """Hands requests to the devices' participants; a lossy one loses and doubles some of the answers."""

    def __init__(self, folders: list[Path], lossy: bool) -> None:
        from fedbandit.deploy.device.participant import Participant

        self._participants = {i: Participant(Agent(folder)) for i, folder in enumerate(folders)}
        self._lossy, self._waiting, self._sent = lossy, [], 0

    def nodes(self) -> list[int]:
        return list(self._participants)

    def send(self, requests: list[Request]) -> list[str]:
        tickets = []
        for request in requests:
            self._sent += 1
            tickets.append(f"t{self._sent}")
            answer = self._participants[request.node].answer(
                request.kind, request.facts, request.arrays
            )
            copies = random.choices([0, 1, 2], [0.1, 0.8, 0.1])[0] if self._lossy else 1
            self._waiting += [Reply(tickets[-1], *answer)] * copies
        return tickets

    def receive(self, tickets: list[str]) -> list[Reply]:
        there = [reply for reply in self._waiting if reply.ticket in tickets]
        self._waiting = [reply for reply in self._waiting if reply.ticket not in tickets]
        return there


def serve(folder: Path, lossy: bool = True, attempts: int | None = None) -> None:
    from fedbandit.deploy.server.rounds import Coordinator
    from fedbandit.deploy.server.store import Store

    deployment = deployment_in(folder)
    store = Store(deployment.folder)
    carrier = Carrier(sorted(folder.glob("device-*")), lossy)
    Coordinator(deployment, store, carrier, select=lambda _, nodes, __: list(nodes)).run(attempts)
    store.close()


def soak(
    folder: Path,
    devices: int,
    seconds: float,
    pause: float,
    kill_every: float,
    kill_server_every: float,
) -> bool:
    """Run it all and say what became of every event; whether nothing was lost or doubled."""
    folders = [folder / f"device-{i}" for i in range(devices)]
    deployment = deployment_in(folder)
    for device in folders:
        with Agent(device, retention=KEEP_ALL) as agent:
            agent.install(deployment.device_model(Version(deployment.initial), 0))
        (device / "told.txt").touch()
    commands = [["app", str(device), str(pause)] for device in folders] + [["serve", str(folder)]]
    running = [_start(command) for command in commands]
    server = len(commands) - 1
    kills, server_kills, deadline = 0, 0, time.monotonic() + seconds
    server_dies = time.monotonic() + random.random() * 2 * kill_server_every
    try:
        while time.monotonic() < deadline:
            time.sleep(random.random() * 2 * kill_every)
            victim = random.randrange(devices)
            if time.monotonic() >= server_dies:
                victim, server_dies = (
                    server,
                    time.monotonic() + random.random() * 2 * kill_server_every,
                )
            running[victim].send_signal(signal.SIGKILL)
            running[victim].wait()
            running[victim] = _start(commands[victim])
            kills += 1
            server_kills += victim == server
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()
    serve(
        folder, lossy=False, attempts=2
    )  # the first tells devices what was counted, the second counts the rest
    return _account(folder, folders, kills, server_kills)


def _account(folder: Path, folders: list[Path], kills: int, server_kills: int) -> bool:
    made = told_rewarded = logged = rewarded = 0
    for device in folders:
        told = [
            line.split() for line in (device / "told.txt").read_text(encoding="utf-8").splitlines()
        ]
        made += sum(words[0] == "made" for words in told)
        once = [words[1] for words in told if words[0] == Outcome.RECORDED.name]
        told_rewarded += len(once)
        assert len(once) == len(set(once)), f"{device}: a reward was recorded twice"
        with Agent(device) as agent:
            totals = agent.totals()
        logged, rewarded = logged + totals.logged, rewarded + totals.rewarded
    lines = [
        json.loads(line) for line in (folder / "server" / "metrics.jsonl").read_text().splitlines()
    ]
    counted = sum(line["events"] for line in lines)
    rounds = [line["round"] for line in lines]
    print(f"kills                {kills}, of which {server_kills} of the server")
    print(f"events made          {made} (apps were told so)")
    print(f"events logged        {logged}")
    print(f"rewards matched      {rewarded} (apps were told of {told_rewarded})")
    print(f"rewards counted      {counted} by the server")
    print(f"rounds done          {len(rounds)}")
    # A process killed between the write and the word of it leaves one event or reward that no app was told of.
    sound = {
        "no event lost": made <= logged <= made + kills + len(folders),
        "no reward lost": told_rewarded <= rewarded <= told_rewarded + kills + len(folders),
        "each reward counted once": counted == rewarded,
        "each round once": rounds == list(range(1, len(rounds) + 1)),
    }
    for claim, holds in sound.items():
        print(f"{'yes' if holds else 'NO '}  {claim}")
    return all(sound.values())


def _start(command: list[str]) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, __file__, *command], stderr=subprocess.DEVNULL)


def main() -> None:
    if sys.argv[1:2] == ["app"]:
        return app(Path(sys.argv[2]), float(sys.argv[3]))
    if sys.argv[1:2] == ["serve"]:
        return serve(Path(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument(
        "--pause",
        type=float,
        default=0.5,
        help="longest pause of an app between two decisions, seconds",
    )
    parser.add_argument(
        "--kill-every", type=float, default=1.0, help="mean time between two kills, seconds"
    )
    parser.add_argument(
        "--kill-server-every",
        type=float,
        default=30.0,
        help="mean time between two kills of the server, seconds",
    )
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fedbandit-soak-") as folder:
        times = (60 * chosen.minutes, chosen.pause, chosen.kill_every, chosen.kill_server_every)
        sys.exit(0 if soak(Path(folder), chosen.devices, *times) else 1)


if __name__ == "__main__":
    main()
