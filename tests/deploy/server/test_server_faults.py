"""Every file operation of the server fails once: a restart goes on, and ends as an undisturbed deployment does."""

import json
import shutil

import pytest
from network_builders import Network, a_deployment, devices, live, settle, values
from server_faults import Faults, serve
from test_private_deployment import private

from fedbandit.deploy.device.device_identity import read_card
from fedbandit.deploy.server.database import Database
from fedbandit.deploy.server.operator import ask_rollback
from fedbandit.deploy.server.store import read_ledger

ROUNDS = 4


class World:
    """A deployment with two devices, lived through in the same way every time."""

    def __init__(self, folder, make=a_deployment, given=None):
        self.deployment = make(folder, given) if given else make(folder)
        self.network = Network(devices(folder, 2))
        settle(self.deployment, self.network.participants)
        self._lived, self.folder = set(), self.deployment.folder

    def before_round(self, number):
        """What happens outside the server, once."""
        if number in self._lived:
            return
        self._lived.add(number)
        live(self.network.participants[100 + number % 2], events=2, seed=number)
        if number == 4:
            ask_rollback(self.folder, 0)

    def run(self, at=None, kind="kill"):
        self.faults = Faults(self.folder, at, kind)
        server, starts = serve(self.deployment, self.network, self.faults, self.before_round)
        return server, starts, self.faults

    def outcome(self, server):
        """All that a deployment comes to; names of devices differ from world to world."""
        metrics = [
            json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()
        ]
        names = [read_card(part._card).device for part in self.network.participants.values()]
        marks = Database(self.folder / "server.sqlite").marks(names)
        models = {path.name: path.read_bytes() for path in (self.folder / "models").iterdir()}
        extra = server.state.extra
        return {
            "weights": server.state.weights.tobytes(),
            "metrics": metrics,
            "marks": [marks[name] for name in names],
            "models": models,
            "versions": extra["versions"],
            "events": server.state.events,
        }


def plain_world(folder):
    return World(folder, given={**values(), "rounds": ROUNDS})


def check_plain(tmp_path, step, kinds):
    undisturbed = plain_world(tmp_path / "undisturbed")
    server, starts, faults = undisturbed.run()
    expected = undisturbed.outcome(server)
    assert starts == 1
    assert [line["events"] for line in expected["metrics"]] == [14, 2, 2, 2]
    failed = set()
    for at in range(1, faults.count + 1, step):
        for kind in kinds:
            world = plain_world(tmp_path / f"{kind}-{at}")
            server, starts, met = world.run(at, kind)
            failed.add(met.log[at - 1].split()[0])
            found = world.outcome(server)
            assert found == expected, (at, kind, met.log[at - 1])
            left = [path.name for path in world.folder.rglob(".*")]
            assert left == [], (at, kind, met.log[at - 1])
            shutil.rmtree(tmp_path / f"{kind}-{at}")
    return failed


def test_some_operations_fail(tmp_path):
    assert check_plain(tmp_path, step=23, kinds=["kill"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "error"])
def test_each_operation_fails(tmp_path, kind):
    failed = check_plain(tmp_path, step=1, kinds=[kind])
    assert failed == {
        "open",
        "write",
        "fsync",
        "rename",
        "remove",
        "connect",
        "before",
        "after",
        "truncate",
    }


# ---- private: what anybody may have seen was charged, and nobody has seen two noises of one round


def private_world(folder, gated):
    """With a gate, devices see candidates too, before it is known whether they go out."""
    plan = {"population": 4, "mechanism": "dp-ftrl", "sampling": "fixed"}
    if not gated:
        return World(folder, lambda f: private(f, rounds=ROUNDS, **plan))
    shares, gate = {"figures_share": 0.1, "gate_share": 0.1}, {"confidence": 0.5, "limit": 10.0}
    given = values(population=4, min_reach=0.0) | {
        "rounds": ROUNDS,
        "clients_per_round": 2,
        "gate": gate,
    }
    del plan["population"]
    return World(folder, given=given | {"privacy": {"noise_multiplier": 1.0, **plan, **shares}})


def check_private(tmp_path, at, kind, gated=False):
    world = private_world(tmp_path / f"{kind}-{at}", gated)
    charged = world.folder / "ledger.jsonl"
    seen, judged, send = {}, {}, world.network.send

    def seeing(requests):
        world.faults.elsewhere = True
        for request in requests:
            if request.kind == "train":
                number = request.facts["round"]
                spent = read_ledger(charged)
                assert number == 1 or spent.released >= number - 1
                seen.setdefault(number, set()).add(request.arrays["weights"].tobytes())
            if request.kind == "judge":
                number = request.facts["round"]
                assert read_ledger(charged).released >= number
                judged.setdefault(number, set()).add(request.arrays["weights"].tobytes())
        world.faults.elsewhere = False
        return send(requests)

    world.network.send = seeing
    server, _, faults = world.run(at, kind)
    assert server.state.round == ROUNDS
    assert all(len(weights) == 1 for weights in (*seen.values(), *judged.values())), (
        at,
        kind,
        faults.log[at - 1],
    )
    assert set(judged) <= ({2, 4} if gated else set())
    assert read_ledger(charged).released == ROUNDS
    metrics = world.outcome(server)["metrics"]
    assert [line["round"] for line in metrics] == list(range(1, ROUNDS + 1))
    assert metrics[-1]["epsilon"] == pytest.approx(world.deployment.ledger.epsilon(ROUNDS))
    return faults


def test_some_operations_of_a_private_server_fail(tmp_path):
    for at in (34, 39):  # half a line of the ledger, and right after the commit
        check_private(tmp_path, at, "kill")
    for at in (74, 79, 84, 89, 94):  # around the commit before the gate, and the one after it
        check_private(tmp_path / "gated", at, "kill", gated=True)


@pytest.mark.slow
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["kill", "error"])
def test_each_operation_of_a_private_server_fails(tmp_path, kind, gated):
    at, faults = 1, None
    while faults is None or at <= faults.count:
        faults = check_private(tmp_path, at, kind, gated)
        at += 1
    assert at > 100
