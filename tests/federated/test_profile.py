"""Where a round's time went is told in parts, and never enters what a run records."""

from builders import random_text

from fedbandit.assembly.experiment import build_experiment
from fedbandit.config import Config
from fedbandit.core.process import Stopwatch
from fedbandit.engines import ThreadEngine
from fedbandit.federated.round import run_round


def test_a_round_is_timed_in_parts():
    config = Config.build({"scenario": "scratch", "rounds": 2, "clients_per_round": 5})
    phase = build_experiment(config, random_text()).bandit
    weights = build_experiment(config, random_text()).initial_weights()
    watch, state = Stopwatch(), phase.start(weights)
    for _ in range(2):
        state, metrics = run_round(phase, state, ThreadEngine(2), watch)
        taken = watch.take()
        assert {"data", "act", "train", "aggregate", "step"} <= taken.keys()
        assert all(seconds >= 0 for seconds in taken.values())
        assert not {"seconds", *taken} & metrics.keys()
