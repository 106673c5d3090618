"""What an operator sees of a running server: what it waits for, who is in reach, what took how long, what is wrong."""

import json
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from network_builders import Network, a_deployment, coordinator, devices, settle, values

from fedbandit.core.errors import DataError, FedbanditError
from fedbandit.deploy.flower.operate import Seen
from fedbandit.deploy.messages import Reply
from fedbandit.deploy.server.server_status import (
    Watch,
    facts_of,
    in_words,
    noting_the_end,
    read_live,
    warnings_of,
)
from fedbandit.deploy.server.status import (
    full_status,
    health,
    monitoring_page,
    nodes_table,
    status_lines,
)
from fedbandit.deploy.server.store import Store
from fedbandit.privacy.reporting import in_one_line, summary

START = 1_800_000_000.0


class World:
    """A deployment whose wall clock is moved by the same hand as its steady one."""

    def __init__(self, folder, given=None, number=3):
        self.deployment = a_deployment(folder, given)
        self.network = Network(devices(folder, number))
        settle(self.deployment, self.network.participants)
        self.store = Store(self.deployment.folder)
        self.folder = self.deployment.folder
        self.start()

    def start(self):
        watch = Watch(self.folder, facts_of(self.deployment), now=self.now)
        self.server = coordinator(self.deployment, self.network, self.store, watch=watch)

    def now(self):
        return START + self.network.time.now

    def warnings(self, later=0.0):
        return warnings_of(read_live(self.folder), self.now() + later)

    def status(self, later=0.0):
        now = self.now() + later
        return "\n".join(status_lines(full_status(self.folder, now), now))


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    world.store.close()


def private_world(folder, population=4, **rules):
    privacy = {"privacy": {"mechanism": "dp-fedavg", "noise_multiplier": 1.0, "delta": 1e-5}}
    return World(
        folder,
        values(population=population, **rules) | {"clients_per_round": 2} | privacy,
        number=4,
    )


def test_status_says_what_the_server_waits_for(world):
    world.network.unreachable = {100, 101, 102}
    assert world.server.attempt() is None
    world.network.time.now += 20
    shown = world.status()
    assert "server         running, last heard of 20 s ago" in shown
    assert "doing          waiting for nodes: 0 in reach, 1 needed, for 20 s" in shown
    assert "in reach       0 nodes; a round needs 1" in shown


def test_rounds_have_times_durations_and_reach(world):
    world.network.slow = {101: 30.0}
    metrics = world.server.attempt()
    assert (metrics["in_reach"], metrics["time"]) == (3, world.now())
    assert 30 <= metrics["seconds"] <= 31
    kept = json.loads((world.folder / "metrics.jsonl").read_text())
    assert (kept["time"], kept["seconds"]) == (metrics["time"], metrics["seconds"])
    assert (
        "rounds take    30 s (the last), 30 s (median of the recent), 30 s (the longest); the last ended 5.0 s ago"
        in (world.status(later=5))
    )


def test_nodes_are_listed_with_when_they_were_last_seen(world):
    world.server.attempt()
    world.network.unreachable = {102}
    world.network.time.now += 600
    world.server.attempt()
    table = nodes_table(world.folder, world.now())
    assert table[0].split() == ["node", "device", "model", "seen", "answered", "state"]
    first, _, last = table[1:]
    assert (first.split()[0], last.split()[0]) == ("100", "102")
    assert first.endswith("in reach")
    assert last.endswith("away")
    assert last.split()[3:8] == ["10", "min", "ago", "10", "min"]
    shown = world.status(later=5)
    assert "  node 100                   seen 5.0 s ago, answered 5.0 s ago\n" in shown
    assert "  node 102                   seen 10 min ago, answered 10 min ago; away\n" in shown
    device = world.server._gathering.devices[102]
    assert device in last
    (world.folder / "operator.json").write_text(
        json.dumps({"paused": False, "pinned": None, "revoked": [device]})
    )
    assert nodes_table(world.folder, world.now())[-1].endswith("revoked")


def test_who_was_seen_is_known_after_a_restart(world):
    world.server.attempt()
    world.network.unreachable = {102}
    world.network.time.now += 60
    world.start()
    world.server.attempt()
    seen = read_live(world.folder)["nodes"]["102"]
    assert (seen["in_reach"], seen["seen"]) == (False, START)


def test_a_node_with_a_problem_is_shown_with_it(world):
    world.server.attempt()
    watch = Watch(world.folder, now=world.now)
    watch.heard(101, Reply("t", {"problem": "disk full"}))
    watch.waiting("nothing")
    assert "disk full" in "\n".join(nodes_table(world.folder, world.now()))


def test_a_server_that_is_gone_is_silent(world):
    world.server.attempt()
    assert "silent" not in world.warnings(later=20)
    assert world.warnings(later=200)["silent"] == "the server app has not been heard of for 3 min"
    assert "server         not running, last heard of 3 min ago" in world.status(later=200)
    assert health(world.folder, world.now() + 20) == (
        True,
        ["3 nodes in reach, far fewer than the 100 that a round asks"],
    )
    assert not health(world.folder, world.now() + 200)[0]


def test_a_server_that_was_stopped_is_not_running_and_needs_nothing(world):
    with noting_the_end(world.folder):
        world.server.attempt()
    assert world.warnings(later=1e6) == {}
    assert "server         not running" in world.status()
    assert "doing          stopped" in world.status()


def test_a_line_of_metrics_that_is_no_rounds_does_not_stop_the_console(world):
    world.server.attempt()
    said = []
    with open(world.folder / "metrics.jsonl", "a") as file:
        file.write('garbage\n[]\n{"round": 2}\nhalf a line')
    Seen(world.folder, said.append).look()
    assert said[0].startswith("round 1: ")
    assert sum("a line that is no round's" in line for line in said) == 3


def test_a_server_that_is_done_needs_nothing(world):
    world.server.run()
    assert world.warnings(later=1e6) == {}
    assert "doing          all rounds are done" in world.status()


def test_rounds_that_do_not_end_are_stalled_and_named_once(world, caplog):
    world.network.unreachable = {100, 101, 102}
    while world.network.time.now < 700:
        assert world.server.attempt() is None
        world.network.time.now += 1
    assert "no round has ended for 9 min: waiting for nodes: 0 in reach, 1 needed" in caplog.text
    assert caplog.text.count("no round has ended") == 1
    assert not health(world.folder, world.now())[0]
    world.network.unreachable = set()
    world.server.attempt()
    assert "stalled" not in world.warnings()


def test_a_paused_server_is_not_stalled(world):
    (world.folder / "operator.json").write_text(
        json.dumps({"paused": True, "pinned": 0, "revoked": ["7"]})
    )
    for _ in range(3):
        world.server.attempt()
        world.network.time.now += 1000
    world.server.attempt()
    assert "stalled" not in world.warnings()
    shown = world.status()
    assert "paused         no round begins until" in shown
    assert "pinned         to model 0" in shown
    assert "revoked        7" in shown


def test_a_private_deployment_shows_its_epsilon_with_all_that_it_means(tmp_path):
    """In the one form that all commands have; by PLD only where a model went out, since that takes a while."""
    world = private_world(tmp_path)
    assert "privacy        epsilon 0.00 (RDP) at delta 1e-05 after 0 rounds" in world.status()
    for number, tight in ((1, False), (2, True)):
        world.server.attempt()
        found = summary(world.deployment.ledger, number, deployed=True, tight=tight)
        assert full_status(world.folder)["privacy"] == found
        assert f"privacy        {in_one_line(found)}\n" in world.status()
        assert (found["epsilon_pld"] is not None) == tight
        assert found["covers"].startswith("covers the released models; ")
    assert "(PLD) at delta 1e-05 after 2 rounds" in world.status()
    assert (
        "[one client with all its data; one client is added or removed; Poisson: in each of 4"
        in world.status()
    )
    world.store.close()


def test_epsilon_spent_on_nobody_and_low_reach_are_warned_of(tmp_path, caplog):
    world = private_world(tmp_path, population=9, min_reach=0.1)
    world.server._select = lambda deployment, nodes, number: []
    world.server.attempt()
    assert world.warnings() == {
        "low reach": "4 nodes in reach, far fewer than the population of 9",
    }
    assert "round 1: spent epsilon and heard from no device" in caplog.text
    world.store.close()


def test_the_console_says_rounds_waiting_and_warnings_once_each(world):
    said = []
    seen = Seen(world.folder, said.append)
    world.network.unreachable = {100, 101, 102}
    for _ in range(3):
        world.server.attempt()
        seen.look()
    world.network.unreachable = set()
    reward = world.server.attempt()["reward"]
    for _ in range(3):
        seen.look()
    assert [line for line in said if not line.startswith("warning: ")] == [
        "waiting for nodes: 0 in reach, 1 needed",
        f"round 1: 3 of 3 devices, reward {reward:.4f}, 0.0 s",
    ]
    assert len(set(said)) == len(said)


def test_the_console_does_not_repeat_what_an_earlier_start_was_waiting_for(world, monkeypatch):
    world.network.unreachable = {100, 101, 102}
    world.server.attempt()
    said = []
    seen = Seen(world.folder, said.append)
    monkeypatch.setattr("fedbandit.deploy.flower.operate.time.time", lambda: world.now() + 1)
    seen.forget()
    seen.look()
    assert said == []
    world.network.time.now += 3
    world.server.attempt()
    seen.look()
    assert "waiting for nodes: 0 in reach, 1 needed" in said


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"time": "x"}', "\x00"])
def test_a_damaged_view_is_no_view(world, content):
    world.server.attempt()
    (world.folder / "live.json").write_text(content)
    assert read_live(world.folder) is None
    assert "has not run yet" in world.status()
    with pytest.raises(DataError, match="no server has run here yet"):
        nodes_table(world.folder)
    world.start()
    assert world.server.attempt()["round"] == 2


def test_a_full_disk_hides_the_view_and_stops_nothing(world, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    assert world.server.attempt()["round"] == 1


def get(port, path):
    with urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        return answer.read().decode()


def test_who_is_revoked_is_not_in_reach(world):
    world.server.attempt()
    (world.folder / "operator.json").write_text(
        json.dumps({"paused": False, "pinned": None, "revoked": ["102"]})
    )
    world.network.time.now += 10
    assert world.server.attempt()["in_reach"] == 2
    assert "in reach       2 nodes; a round needs 1" in world.status()


def test_a_page_for_monitors(tmp_path):
    world = World(tmp_path)
    with monitoring_page(world.folder, 0) as port:
        with pytest.raises(HTTPError) as refused:
            get(port, "/healthz")
        assert (refused.value.code, refused.value.read()) == (
            503,
            b"not ok\nthe server app has not started yet\n",
        )
        assert "fedbandit_up 0.0" in get(port, "/metrics")
        world.network.faults = {101: lambda request, reply: [Reply(reply.ticket, error="broken")]}
        world.server.attempt()
        found = get(port, "/metrics")
        for line in (
            "fedbandit_round 1.0",
            "fedbandit_nodes_in_reach 3.0",
            "fedbandit_model_version 0.0",
            "fedbandit_paused 0.0",
            "fedbandit_asked_total 3.0",
            "fedbandit_clients_total 2.0",
            'fedbandit_refused_total{kind="failed"} 1.0',
            'fedbandit_warning{kind="low reach"} 1.0',
        ):
            assert line in found.splitlines()
        with pytest.raises(HTTPError) as refused:
            get(port, "/elsewhere")
        assert refused.value.code == 404
        refused.value.close()
    world.store.close()


def test_a_page_is_off_unless_asked_for_and_a_port_in_use_is_one_line(tmp_path):
    with monitoring_page(tmp_path, None) as port:
        assert port is None
    with monitoring_page(tmp_path, 0) as port:
        second = monitoring_page(tmp_path, port)
        with pytest.raises(FedbanditError, match=f"--metrics-port: {port}: "):
            second.__enter__()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.41, "0.4 s"), (35, "35 s"), (720, "12 min"), (4 * 3600, "4 h"), (3 * 86400, "3 days")],
)
def test_durations_in_words(seconds, words):
    assert in_words(seconds) == words
