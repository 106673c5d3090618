"""The engine against runs of the authors' released code: same data, same initial weights, same learning rates."""

import numpy as np
import pytest
from golden_runs import emnist, initial_weights, phase_of, spec_of, stackoverflow

from fedbandit.core.process import Stopwatch
from fedbandit.engines import ThreadEngine
from fedbandit.federated.round import run_round
from fedbandit.objectives import FullInformation


def _play(run, dataset, dtype):
    """Play the run's rounds; yields the number, the weights in the order of the file, and the metrics."""
    layout, phase = phase_of(run, dataset, dtype)
    if spec_of(run)["alg"].startswith("SUPERVISED"):
        assert isinstance(phase.work.learner.objective, FullInformation)
    state, engine = phase.start(initial_weights(run, layout, dtype)), ThreadEngine(2)
    for number in range(1, spec_of(run)["rounds"] + 1):
        state, metrics = run_round(phase, state, engine, Stopwatch())
        yield number, list(layout.split(state.weights).values()), metrics


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "name", ["so_greedy", "so_greedy_sgd_clip", "so_greedy_shift", "so_supervised"]
)
def test_text_runs(golden_run, tmp_path, name, dtype):
    run = golden_run(name)
    rounds = list(_play(run, stackoverflow(run, tmp_path), dtype))
    for number, weights, metrics in rounds:
        for i, ours in enumerate(weights):
            np.testing.assert_allclose(ours, run[f"round{number}_{i}"], atol=5e-5, rtol=0)
        assert metrics["reward"] == pytest.approx(run["round_reward"][number - 1], abs=1e-6)
        assert metrics["running_reward"] == pytest.approx(
            run["average_reward"][number - 1], abs=1e-6
        )
    assert len(rounds) == len(run["round_reward"])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_image_run(golden_run, tmp_path, dtype):
    run = golden_run("emnist_greedy")
    rounds = list(_play(run, emnist(run, tmp_path), dtype))
    for number, _, metrics in rounds:
        assert metrics["reward"] == pytest.approx(run["round_reward"][number - 1], abs=1e-6)
        assert metrics["running_reward"] == pytest.approx(
            run["average_reward"][number - 1], abs=1e-6
        )
    number, weights, _ = rounds[-1]
    moved = np.sqrt(
        sum(((run[f"round{number}_{i}"] - run[f"initial_{i}"]) ** 2).sum() for i in range(8))
    )
    apart = np.sqrt(sum(((run[f"round{number}_{i}"] - weights[i]) ** 2).sum() for i in range(8)))
    assert apart <= 4e-4 * moved
