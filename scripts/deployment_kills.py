"""A deployment over Flower whose processes are killed at random; then every event, reward and step is recounted.

    python scripts/deployment_kills.py WORK --histories 5 --out scripts/results/deployment_kills.json

One history is a `fedbandit deploy server`, a `fedbandit deploy client` and an app for each device,
all of them real processes over a real SuperLink. Again and again one of them, or one of the
processes that they started (SuperLink, server app, SuperNode, client app, guard), is killed with
SIGKILL at a random moment; a command that was killed is started again. Each history lives in a
folder of WORK with a list of its kills: an interrupted script continues where it was, and
histories that the result holds already are not run again.

The server combines updates with `Journal`, a rule that writes down the reports it is given: from
these alone the model is computed once more, and has to be the server's, bit for bit.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from soak import ACTIONS, KEEP_ALL, WORDS

from fedbandit.core.files import last_lines, read_json, read_lines, write_bytes, write_json
from fedbandit.deploy import Agent, Outcome

PATIENCE = 1800.0  # seconds in which a deployment has to run a round again, on a busy machine too
VICTIMS = ("app", "client", "of client", "server", "of server")
TOML = """
rounds = 1000000
deploy_every = 5
clients_per_round = 100
[server]
optimizer = "sgd"
learning_rate = 1.0
[clipping]
norm = 1.0
[policy]
name = "softmax"
beta = 0.2
[aggregation]
name = "deployment_kills:Journal"
folder = {folder}
[deployment]
state = "server"
actions = {actions}
vocabulary = "words.txt"
"""


@dataclass(frozen=True)
class Journal:
    """The mean of updates, which keeps the updates of each round as `accepted/ROUND.bin`: [n, P].

    A round that was not kept is run again, and its new reports replace the old ones.
    """

    folder: str

    def combine(self, updates: np.ndarray) -> np.ndarray:
        """Their mean [P]; the trial that every rule is put to at the start is not kept."""
        if updates.shape[1] == WORDS * ACTIONS + ACTIONS:
            metrics = Path(self.folder) / "server" / "metrics.jsonl"
            lines = last_lines(metrics) if metrics.exists() else []
            number = 1 + (json.loads(lines[-1])["round"] if lines else 0)
            path = Path(self.folder) / "accepted" / f"{number}.bin"
            path.parent.mkdir(exist_ok=True)
            write_bytes(path, np.ascontiguousarray(updates).tobytes())
        return updates.mean(axis=0)


class Site:
    """The folders of a server and its devices, and the commands that run in them."""

    def __init__(self, folder: Path, devices: int) -> None:
        from fedbandit.deploy.flower.processes import free_port
        from fedbandit.deploy.server.deployment import read_deployment

        self.folder, self.state, self.port = folder, folder / "server", free_port()
        self.devices = [folder / f"device-{i}" for i in range(devices)]
        actions = json.dumps([f"action {i}" for i in range(ACTIONS)])
        text = TOML.format(actions=actions, folder=json.dumps(str(folder)))
        (folder / "words.txt").write_text("\n".join(f"word{i}" for i in range(WORDS)))
        (folder / "deployment.toml").write_text(text)
        self.deployment = read_deployment(folder / "deployment.toml")
        first = self.deployment.start().deployed[0]
        for device in self.devices:
            if not (device / "told.txt").exists():
                with Agent(device, retention=KEEP_ALL) as agent:
                    agent.install(self.deployment.device_model(first, 0))
                (device / "told.txt").touch()
        self.running: dict[tuple[str, int], subprocess.Popen[bytes]] = {}

    def start(self, kind: str, number: int = 0) -> None:
        """Start an app, a client or the server, in place of one that was killed."""
        deploy = [sys.executable, "-m", "fedbandit", "deploy"]
        device = str(self.devices[number])
        command = {
            "app": [sys.executable, str(Path(__file__).with_name("soak.py")), "app", device, "1.0"],
            "client": [*deploy, "client", device, "--server", f"127.0.0.1:{self.port}"],
            "server": [*deploy, "server", str(self.folder / "deployment.toml"), "--port"],
        }[kind]
        if kind == "server":
            command.append(str(self.port))
        command += ["--insecure"] * (kind != "app")
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with open(self.folder / f"{kind}-{number}.out", "ab") as said:
            self.running[kind, number] = subprocess.Popen(
                command, stdout=said, stderr=said, start_new_session=True, env=environment
            )

    def kill(self, what: str, number: int, chance: random.Random) -> str:
        """Kill a command, or one of the processes that it has started; its name."""
        from fedbandit.deploy.flower.processes import marked

        kind = what.removeprefix("of ")
        home = (self.state if kind == "server" else self.devices[number]) / "flower"
        there = sorted(marked(home.resolve()), key=lambda process: process.pid)
        if kind == what or not there:
            process = self.running[kind, number]
            process.kill()
            process.wait()
            time.sleep(3.0 * chance.random())
            self.start(kind, number)
            return kind
        victim = chance.choice(there)
        words = [Path(word).name for word in victim.cmdline()]
        names = [word for word in words if word.startswith(("flower", "flwr", "processes"))]
        victim.kill()
        return names[0] if names else "unnamed"

    def rounds(self) -> list[dict[str, Any]]:
        """The metrics of all rounds so far."""
        path = self.state / "metrics.jsonl"
        return read_lines(path) if path.exists() else []

    def next_round(self) -> None:
        """Wait until a round has ended in which a device took part."""
        there = len(self.rounds())
        ended = lambda: any(line["clients"] for line in self.rounds()[there:])  # noqa: E731
        wait_until(ended, f"round {there + 1} does not end; see {self.folder}")

    def end(self) -> None:
        """End the commands, and all that they have started."""
        from fedbandit.deploy.flower.processes import end_leftovers

        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        for process in self.running.values():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for folder in (self.state, *self.devices):
            end_leftovers(folder / "flower", print, patience=0.1)


def wait_until(holds: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(otherwise)
        time.sleep(0.5)


def history(folder: Path, seed: int, kills: int, devices: int) -> dict[str, Any]:
    """Run a deployment through some kills, or the rest of them; what became of it."""
    site, progress = Site(folder, devices), folder / "progress.json"
    starts, killed = read_json(progress).values() if progress.exists() else (0, [])
    starts += len(killed) < kills
    try:
        site.start("server")
        for number in range(devices):
            site.start("client", number)
            if len(killed) < kills:
                site.start("app", number)
        site.next_round()
        while len(killed) < kills:
            chance = random.Random(f"{seed} {len(killed)}")
            time.sleep(8.0 * chance.random())
            what = chance.choice(VICTIMS)
            number = 0 if "server" in what else chance.randrange(devices)
            killed.append(site.kill(what, number, chance))
            write_json(progress, {"starts": starts, "killed": killed})
            print(f"history {seed}, kill {len(killed)}: {killed[-1]} {number}", flush=True)
            site.next_round()
        for (kind, _), process in site.running.items():
            if kind == "app":  # no more events: what was logged has to be counted now
                process.kill()
        wait_until(lambda: counted(site) >= rewarded(site), "rewards are not counted")
        site.next_round()
    finally:
        site.end()
    counts = dict(sorted(Counter(killed).items()))
    # A killed app may not have heard of its last event or reward.
    return {"seed": seed, "kills": counts, **recount(site, killed.count("app") + starts * devices)}


def counted(site: Site) -> int:
    """The rewards that are in the server's metrics."""
    return sum(line["events"] for line in site.rounds())


def rewarded(site: Site) -> int:
    """The rewards that are in the devices' logs."""
    found = 0
    for device in site.devices:
        with Agent(device) as agent:
            found += agent.totals().rewarded
    return found


def recount(site: Site, unheard: int) -> dict[str, Any]:
    """What apps, devices and the server say of one history, and whether each claim holds."""
    lines, made, told, logged, rows = site.rounds(), 0, list[str](), 0, list[float]()
    for i, device in enumerate(site.devices):
        for word, event in map(str.split, (device / "told.txt").read_text().splitlines()):
            made += word == "made"
            told += [f"{i} {event}"] * (word == Outcome.RECORDED.name)
        with Agent(device) as agent:
            logged += agent.totals().logged
            rows += [row.reward for row in agent._log.read()]
    reported = sum(line.get("reward_reported", 0.0) * line["events"] for line in lines)
    claims = {
        "no event lost": made <= logged <= made + unheard,
        "no reward lost": len(told) <= len(rows) <= len(told) + unheard,
        "no event rewarded twice": len(told) == len(set(told)),
        "each reward counted once": counted(site) == len(rows) == rewarded(site),
        "rewards add up": abs(reported - sum(rows)) < 1e-6 * (1 + len(rows)),
        "each round once": [line["round"] for line in lines] == list(range(1, len(lines) + 1)),
        "model recomputed from accepted reports": recomputed(site, [c["clients"] for c in lines]),
    }
    counts = {"rounds": len(lines), "events": logged, "rewards": len(rows), "reward": sum(rows)}
    return {**counts, "counted": counted(site), "claims": claims}


def recomputed(site: Site, clients: list[int]) -> bool:
    """Whether the weights are those that the reports of all rounds lead to, bit for bit."""
    from fedbandit.deploy.server.store import Store

    weights = site.deployment.initial.copy()
    for number, devices in enumerate(clients, 1):
        payload = (site.folder / "accepted" / f"{number}.bin").read_bytes()
        updates = np.frombuffer(payload, weights.dtype).reshape(-1, weights.size)
        if len(updates) != devices:
            return False
        weights += updates.mean(axis=0)
    store = Store(site.state)
    kept = store.load()
    store.close()
    return kept is not None and np.array_equal(weights, kept.state.weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="folder of the histories that are being run")
    parser.add_argument("--histories", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first history")
    parser.add_argument("--kills", type=int, default=10, help="in each history")
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="what is done is kept here")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what was started
    done = {}
    if chosen.out is not None and chosen.out.exists():
        done = {found["seed"]: found for found in json.loads(chosen.out.read_text())["histories"]}
    for seed in range(chosen.first, chosen.first + chosen.histories):
        if seed not in done:
            folder = chosen.work.resolve() / f"history-{seed}"
            folder.mkdir(parents=True, exist_ok=True)
            done[seed] = history(folder, seed, chosen.kills, chosen.devices)
        found = [done[each] for each in sorted(done)]
        kills = sum(sum(one["kills"].values()) for one in found)
        sound = all(all(one["claims"].values()) for one in found)
        if chosen.out is not None:
            write_json(chosen.out, {"kills": kills, "sound": sound, "histories": found})
        print(f"{kills} kills in {len(found)} histories: {'sound' if sound else found}", flush=True)
    sys.exit(0 if all(all(one["claims"].values()) for one in done.values()) else 1)


if __name__ == "__main__":
    main()
