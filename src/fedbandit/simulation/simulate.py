"""Running a simulation from Python: iterate over rounds, or collect them into arrays to plot."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from fedbandit.config import Config
from fedbandit.data import FederatedDataset, cache_folder, open_dataset
from fedbandit.data.paging import give_back
from fedbandit.engines import Engine
from fedbandit.engines.choose import make_engine
from fedbandit.errors import DataError
from fedbandit.evaluation.metrics import held_out_metrics
from fedbandit.privacy.mechanisms import PrivateMean
from fedbandit.simulation.experiment import Experiment, build_experiment
from fedbandit.simulation.loop import play_round
from fedbandit.simulation.state import State, load_state, save_state
from fedbandit.timing import Stopwatch


@dataclass
class Simulation:
    """A run in progress: iterating over it plays rounds; `state` is all that has to be kept to go on later.

    An engine of its own is closed after the last round, or at the end of a `with` block by one who stops earlier.
    """

    experiment: Experiment
    engine: Engine
    state: State
    watch: Stopwatch = field(default_factory=Stopwatch)
    owns_engine: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine, if it was made for this simulation; no round can be played after that."""
        if self.owns_engine:
            self.engine.close()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Play the remaining rounds, yielding each one's metrics."""
        while self.state.round < self.experiment.rounds:
            self.state, metrics = play_round(self.experiment.bandit, self.state, self.engine, self.watch)
            if self._evaluates(metrics["round"]):
                with self.watch("evaluate"):
                    metrics |= self.evaluate()
            give_back(self.experiment.dataset)
            if self.state.round == self.experiment.rounds:
                self.close()
            yield metrics

    def collect(self) -> dict[str, np.ndarray]:
        """Play the remaining rounds; arrays by name, one value a round, NaN where a round has none."""
        rounds = list(self)
        numeric = {key for metrics in rounds for key, value in metrics.items() if isinstance(value, int | float)}
        return {key: np.array([metrics.get(key) for metrics in rounds], float) for key in sorted(numeric)}

    def evaluate(self) -> dict[str, float]:
        """How the training model's greedy choice does on the test split, where the data set has one."""
        dataset = self.experiment.dataset
        if dataset.test is None:
            return {}
        learner = self.experiment.bandit.work.learner
        return held_out_metrics(learner, self.state.weights, dataset.test, dataset.header.multilabel)

    def _evaluates(self, number: int) -> bool:
        config = self.experiment.config
        return number == self.experiment.rounds or number % (config.evaluate_every or config.deploy_every) == 0


def simulate(
    config: Config,
    dataset: FederatedDataset | None = None,
    *,
    engine: Engine | None = None,
    state: State | None = None,
    watch: Stopwatch | None = None,
) -> Simulation:
    """Set up a run: `for metrics in simulate(config): ...`, or `simulate(config).collect()["running_reward"]`."""
    watch = watch or Stopwatch()
    dataset = dataset or open_dataset(config.data.source)
    experiment = build_experiment(config, dataset)
    owns_engine = engine is None
    engine = engine or make_engine(config, dataset)
    if state is None:
        try:
            with watch("pretrain"):
                state = experiment.bandit.start(starting_weights(experiment, engine))
        except BaseException:
            if owns_engine:
                engine.close()
            raise
    return Simulation(experiment, engine, state, watch, owns_engine)


def starting_weights(experiment: Experiment, engine: Engine) -> np.ndarray:
    """The initial model of the bandit phase; a pre-trained one is kept and reused by runs that share it."""
    phase, kept = experiment.pretraining, pretrained_file(experiment)
    if phase is None or kept is None:
        return experiment.initial_weights()
    if kept.exists():
        try:
            return load_state(kept).weights
        except DataError:
            kept.unlink(missing_ok=True)  # damaged: made again below
    state = phase.start(experiment.initial_weights())
    for _ in range(experiment.config.pretraining.rounds):
        state, _metrics = play_round(phase, state, engine, Stopwatch())
    _keep(state, kept)
    return state.weights


def pretrained_file(experiment: Experiment) -> Path | None:
    """Where this machine keeps (or would keep) the pre-trained model that the run starts from; None: from scratch."""
    if experiment.pretraining is None:
        return None
    return cache_folder() / "pretrained" / f"{_pretraining_key(experiment)}.safetensors"


def _keep(state: State, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_state(State(state.round, state.weights, {}, {}, state.clip_norm), path)


def _pretraining_key(experiment: Experiment) -> str:
    """Identifies a pre-trained model by everything that went into it, and by nothing else."""
    config, phase = experiment.config, experiment.pretraining
    assert phase is not None
    parts = {
        "data": experiment.dataset.header.fingerprint,
        "model": config.model.model_dump(),
        "dtype": config.dtype,
        "client": config.client.model_dump(exclude={"learning_rate"}),
        "learning_rate": config.pretraining.client_learning_rate or config.client.learning_rate,
        "pretraining": config.pretraining.model_dump(),
        "phase": [repr(part) for part in (phase.work.plan, phase.cohorts, phase.optimizer, phase.clipping)],
        "aggregation": repr(phase.aggregation.plan) if isinstance(phase.aggregation, PrivateMean) else "plain",
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    rewards = experiment.bandit.scenario.pretraining
    assert rewards is not None
    for array in (rewards.exact, rewards.near, rewards.near_value):
        digest.update(array.tobytes())
    return digest.hexdigest()[:32]
