"""What devices were told was counted, against what the server's state says: kills, delays, duplicates, jumps of clocks.

Each seed is one history. A server dies between any two of its operations on files, and now and then its newest state
rots while it is down. Whatever happened: what was acknowledged stays, and each reward is counted once.
"""

import json
import time
from collections import Counter, defaultdict

import numpy as np
import pytest
from network_builders import Network, a_deployment, coordinator, devices, live, settle, values
from server_faults import Faults, Killed

from fedbandit.deploy.messages import Reply
from fedbandit.deploy.server.database import Database
from fedbandit.deploy.server.status import read_status
from fedbandit.deploy.server.store import Store

DEVICES = 4


class History:
    """One seed's deployment, with all that devices were told."""

    def __init__(self, folder, seed, monkeypatch, rots=False):
        self.rng, self.rots = np.random.default_rng(seed), rots
        given = {**values(round_seconds=10, max_events=5), "rounds": 10_000, "deploy_every": 3}
        self.deployment = a_deployment(folder, given)
        self.network = Network(devices(folder, DEVICES))
        settle(self.deployment, self.network.participants)
        self.people = list(self.network.participants.values())
        self.told = defaultdict(list)  # device -> marks, as they were told
        self.before = defaultdict(list)  # node -> replies that it has given
        self.faults = Faults(self.deployment.folder)
        self.kills = self.rotten = 0
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + self.wall)
        self.wall = 0.0
        for person in self.people:
            self._listen(person)

    def _listen(self, person):
        """Write down what the device is told."""
        answer = person.answer

        def heard(kind, facts, arrays):
            said, sent = answer(kind, facts, arrays)
            if kind == "train" and facts["counted"] is not None and "device" in said:
                self.told[said["device"]].append((facts["counted"], said["since"]))
            return said, sent

        person.answer = heard

    def name(self, person):
        return person.answer(
            "ready", {"token": "t", "round": 1, "space": self.deployment.space}, {}
        )[0]["device"]

    def run(self, attempts):
        """Attempts at rounds under everything that can go wrong, over as many servers as it takes."""
        self.left = attempts
        while self.left:
            self.faults.dead = False
            self.faults.at = self.faults.count + int(self.rng.integers(1, 90))
            with self.faults.installed():
                self._one_server()
            self._settled_so_far()
            self._rot()

    def _one_server(self):
        store = None
        try:
            store = Store(self.deployment.folder)
            server = coordinator(self.deployment, self.network, store)
            while self.left:
                self.left -= 1
                self._disturb()
                server.attempt()
        except Killed:
            self.kills += 1
        finally:
            if store is not None:
                store.close()

    def _disturb(self):
        rng, network = self.rng, self.network
        for person in rng.choice(DEVICES, 2, replace=False):
            live(self.people[person], events=int(rng.integers(0, 4)), seed=int(rng.integers(1000)))
        network.time.now += float(rng.choice([0.0, 0.0, 7.0, 1e6]))
        self.wall += float(rng.choice([0.0, -1e8, 1e8]))
        if rng.random() < 0.15:  # a device comes back as another node
            node = int(rng.choice(list(network.participants)))
            network.participants[node + 1000] = network.participants.pop(node)
        nodes = list(network.participants)
        kinds = [self._honest, self._lost, self._doubled, self._replayed, self._failing]
        network.faults = {
            node: kinds[rng.choice(5, p=[0.5, 0.1, 0.15, 0.15, 0.1])] for node in nodes
        }
        network.slow = {int(rng.choice(nodes)): float(rng.choice([0.0, 5.0, 15.0]))}

    def _honest(self, request, reply):
        self.before[request.node].append(reply)
        return [reply]

    def _lost(self, request, reply):
        return []

    def _doubled(self, request, reply):
        return [reply, Reply(reply.ticket, reply.facts, reply.arrays)]

    def _replayed(self, request, reply):
        """An old answer, of an earlier round or of a server that is gone, under the ticket of this one."""
        old = self.before[request.node]
        return [Reply(reply.ticket, old[0].facts, old[0].arrays)] if old else [reply]

    def _failing(self, request, reply):
        return [Reply(reply.ticket, error="the node has left")]

    def _rot(self):
        if not self.rots or self.rng.random() < 0.7:
            return
        path = self.deployment.folder / "server.sqlite"
        if path.exists() and len(generations := Database(path).generations()) == 2:
            newest = self.deployment.folder / f"state-{generations[0].number}.safetensors"
            if newest.exists():  # unless a server was killed when it had just set it aside
                payload = bytearray(newest.read_bytes())
                payload[int(self.rng.integers(len(payload)))] ^= 1
                newest.write_bytes(payload)
                self.rotten += 1

    def _settled_so_far(self):
        """Between two servers: what was acknowledged is in the state, and the state counts what its marks say."""
        path = self.deployment.folder / "server.sqlite"
        if not path.exists():
            return
        database = Database(path)
        names = [self.name(person) for person in self.people]
        marks = database.marks(names)
        counted = 0
        for person, name in zip(self.people, names, strict=True):
            settled = person.agent.events().settled
            mark = marks[name].counted if name in marks else 0
            counted += int((settled <= mark).sum())
            claims = [told for told, _ in self.told[name]]
            assert claims == sorted(claims), f"{name} was told less than before"
            assert max(claims, default=0) <= mark, f"{name} was told of more than is kept"
        assert database.generations()[0].facts["events"] == counted

    def finish(self):
        """Everybody is well again: within a few rounds each reward is counted, once, and for who earned it."""
        self.network.faults, self.network.slow, self.wall = {}, {}, 0.0
        store = Store(self.deployment.folder)
        server = coordinator(self.deployment, self.network, store)
        idle = 0
        while idle < 2:
            idle = idle + 1 if server.attempt()["events"] == 0 else 0
        store.close()
        self._settled_so_far()
        lines = [
            json.loads(line)
            for line in (self.deployment.folder / "metrics.jsonl").read_text().splitlines()
        ]
        assert [line["round"] for line in lines] == list(range(1, len(lines) + 1))
        logged = [person.agent.events().events for person in self.people]
        assert sum(line["events"] for line in lines) == sum(len(events) for events in logged)
        earned = sum(float(events.rewards.sum()) for events in logged)
        counted = sum(line["reward_reported"] * line["events"] for line in lines if line["events"])
        assert counted == pytest.approx(earned)
        chosen = Counter(int(version) for events in logged for version in events.versions)
        credited: Counter[int] = Counter()
        for line in lines:
            by_version = line.get("events_by_version", {})
            credited.update({int(version): events for version, events in by_version.items()})
        assert credited == chosen
        assert read_status(self.deployment.folder)["devices"] == DEVICES


def test_a_short_history(tmp_path, monkeypatch):
    history = History(tmp_path, 3, monkeypatch, rots=True)
    history.run(12)
    history.finish()
    assert history.kills > 2
    assert any(history.told.values())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_long_history(tmp_path, monkeypatch, seed):
    history = History(tmp_path, seed, monkeypatch, rots=seed % 2 == 0)
    history.run(60)
    history.finish()
    assert history.kills > 10
    assert (history.rotten > 0) == history.rots
