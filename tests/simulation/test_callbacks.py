"""Callbacks: they see every round's state, events and metrics, in memory and in folders, and change nothing."""

import numpy as np
import pytest
from builders import random_images

from fedbandit import run, simulate
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError
from fedbandit.federated.clients import ClientWork

CONFIG = Config.build(
    {
        "scenario": "scratch",
        "mode": "population",
        "rounds": 7,
        "deploy_every": 2,
        "clients_per_round": 25,
        "policy": {"name": "softmax", "beta": 0.2},
        "client": {"learning_rate": 0.5},
        "server": {"learning_rate": 0.05},
        "model": {"name": "mlp", "hidden": 4},
        "population": {"events_per_period": 8, "cache_size": 24, "pull_probability": 0.5},
        "threads": 2,
    }
)


def data():
    return random_images(clients=30)


class Watching:
    def __init__(self):
        self.seen = []

    def on_round(self, state, events, metrics):
        self.seen.append((state, events(), metrics))


@pytest.fixture
def acted(monkeypatch):
    """The events that chunks were really trained on, by round and first client."""
    found = {}
    act = ClientWork.act

    def recording(work, clients, broadcast, watch=None, memory=None):
        events = act(work, clients, broadcast, watch, memory)
        if watch is not None:  # as the rounds themselves act
            found[broadcast.round, int(clients[0])] = events
        return events

    monkeypatch.setattr(ClientWork, "act", recording)
    return found


def test_events_are_those_the_round_trained_on(acted):
    watching = Watching()
    simulation = simulate(CONFIG, data(), callbacks=[watching])
    rounds = list(simulation)
    assert [metrics for _, _, metrics in watching.seen] == rounds
    assert [state.round for state, _, _ in watching.seen] == list(range(1, 8))
    for state, events, metrics in watching.seen:
        assert state.running_reward == metrics["running_reward"]
        fresh = events.fresh
        assert fresh.sum() == metrics["events"]
        assert events.rewards[fresh].astype(float).sum() / fresh.sum() == pytest.approx(
            metrics["reward"]
        )
        cohort = simulation.experiment.bandit.cohorts.draw(state.round).tolist()
        assert len(acted) > len(rounds)  # several chunks, which may end in any order
        chunks = [acted[state.round, client] for client in cohort if (state.round, client) in acted]
        for name in ("actions", "rewards", "propensities", "versions", "fresh"):
            trained_on = np.concatenate([getattr(chunk, name) for chunk in chunks])
            np.testing.assert_array_equal(getattr(events, name), trained_on)


def test_callbacks_change_nothing_in_a_run(tmp_path):
    def meddling(state, events, metrics):
        metrics.clear()

    plain = simulate(CONFIG, data())
    watched = simulate(CONFIG, data(), callbacks=[Watching(), meddling])
    assert list(plain) == list(watched)
    assert plain.state.weights.tobytes() == watched.state.weights.tobytes()
    run(CONFIG, tmp_path / "plain", dataset=data())
    run(CONFIG, tmp_path / "watched", dataset=data(), callbacks=[Watching(), meddling])
    files = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("plain", "watched")]
    assert files[0] == files[1]


def test_events_cost_nothing_unless_asked_for_and_are_made_once(monkeypatch):
    calls = []
    act = ClientWork.act
    monkeypatch.setattr(ClientWork, "act", lambda *args: calls.append(len(args)) or act(*args))

    def asking(state, events, metrics):
        if metrics["round"] == 3:
            assert events() is events()

    list(simulate(CONFIG, data(), callbacks=[asking, asking]))
    assert calls.count(3) == 1  # without a watch: acting again, for one round


def test_a_resumed_run_goes_on_telling(tmp_path):
    first, second = Watching(), Watching()
    run(CONFIG, tmp_path / "run", dataset=data(), until=3, callbacks=[first])
    run(CONFIG, tmp_path / "run", dataset=data(), callbacks=[second])
    whole = Watching()
    list(simulate(CONFIG, data(), callbacks=[whole]))
    assert [m for _, _, m in first.seen + second.seen] == [m for _, _, m in whole.seen]
    for (_, one, _), (_, other, _) in zip(first.seen + second.seen, whole.seen, strict=True):
        np.testing.assert_array_equal(one.actions, other.actions)


def test_what_is_no_callback_is_refused_before_anything_is_made(tmp_path):
    for start in (
        lambda: simulate(CONFIG, data(), callbacks=[3]),
        lambda: run(CONFIG, tmp_path / "run", dataset=data(), callbacks=[3]),
    ):
        with pytest.raises(
            ConfigError, match="callbacks: 3 is neither a function nor an object with `on_round`"
        ):
            start()
    assert not (tmp_path / "run").exists()
