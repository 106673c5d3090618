"""Secure aggregation: each reward counts in one round, whoever is lost and whatever is killed."""

import numpy as np
import pytest
from network_builders import live

pytest.importorskip("flwr")

from flwr.app import RecordDict
from secure_builders import (
    FIRST,
    SHARES,
    TRAINING,
    UNMASKING,
    a_network,
    a_server,
    lines_of,
    secure_values,
)

from fedbandit.deploy.secure_sums import reward_error
from fedbandit.deploy.server.store import Store


def test_each_reward_is_counted_in_one_round_whoever_is_lost(tmp_path):
    """Aborted attempts and lost answers at every step; at the end each reward was counted exactly once."""
    deployment, grid, participants = a_network(tmp_path, given={**secure_values(), "rounds": 60})
    rng = np.random.default_rng(7)
    store = Store(deployment.folder)
    server = a_server(deployment, grid, store)
    made = 5 * 6
    for attempt in range(15):
        steps = ("ready", SHARES, TRAINING, UNMASKING)
        grid.lost = {
            (FIRST + int(rng.integers(5)), steps[rng.integers(4)]) for _ in range(rng.integers(5))
        }
        live(participants[attempt % 5], events=2, seed=attempt)
        made += 2
        server.attempt()
        if rng.random() < 0.3:
            store.close()
            store = Store(deployment.folder)
            server = a_server(deployment, grid, store)
    grid.lost = set()
    server.attempt()
    lines = lines_of(deployment)
    assert 3 < len(lines) < 16
    assert sum(line["events"] for line in lines) == made


@pytest.mark.parametrize("moment", ["checkpoint", "publish"])
def test_a_server_killed_around_its_checkpoint_counts_each_reward_once(
    tmp_path, monkeypatch, moment
):
    deployment, grid, participants = a_network(tmp_path)
    store = Store(deployment.folder)
    server = a_server(deployment, grid, store)
    server.attempt()
    live(participants[0], events=4, seed=1)

    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(store, moment, die)
        with pytest.raises(Killed):
            server.attempt()
    store.close()
    live(participants[1], events=3, seed=2)
    second = a_server(deployment, grid)
    second.run()
    assert [line["events"] for line in lines_of(deployment)] == [
        30,
        *([0, 7, 0] if moment == "checkpoint" else [4, 3, 0]),
    ]  # the round whose sum was lost ends without one: no device is in two sums of a round


def test_a_device_without_room_for_its_mark_drops_out(tmp_path, monkeypatch, caplog):
    """What could be counted twice later is not sent."""
    import fedbandit.deploy.device.device_identity as card_module

    deployment, grid, participants = a_network(tmp_path, number=4)
    server = a_server(deployment, grid)
    server.attempt()
    live(participants[0], events=2)
    write = card_module.write_json

    def no_room(path, fill):
        if path.parent.name == "device-0":
            raise OSError(28, "No space left on device")
        write(path, fill)

    with monkeypatch.context() as patch:
        patch.setattr(card_module, "write_json", no_room)
        metrics = server.attempt()
    assert (metrics["clients"], metrics["events"], metrics["refused"]) == (
        3,
        0,
        {"could not train": 1},
    )
    assert "No space left on device" in caplog.text
    assert server.attempt()["events"] == 2


def test_more_events_than_a_device_may_report_wait_and_larger_rewards_are_cut(tmp_path):
    given = secure_values(max_events=4, max_reward=0.5)
    deployment, grid, participants = a_network(tmp_path, number=3, given=given)
    server = a_server(deployment, grid)
    lines = [server.attempt() for _ in range(3)]
    assert [line["events"] for line in lines] == [12, 6, 0]
    ones = sum(participant.agent.events().events.rewards.sum() for participant in participants)
    counted = sum((line["reward"] or 0.0) * line["events"] for line in lines)
    assert counted == pytest.approx(0.5 * ones, abs=2 * reward_error(3, deployment.rules.bounds))


def test_one_device_behind_two_nodes_is_in_the_sum_once(tmp_path, caplog):
    deployment, grid, _ = a_network(tmp_path, number=3)
    from flwr.app import Context

    grid.contexts[2000] = Context(1, 2000, dict(grid.contexts[FIRST].node_config), RecordDict(), {})
    metrics = a_server(deployment, grid).attempt()
    assert (metrics["clients"], metrics["events"], metrics["refused"]) == (3, 18, {"twice": 1})
