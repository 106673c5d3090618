"""Running a simulation from Python: iterate over rounds, or collect them into arrays to plot."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from fedbandit.building.experiment import Experiment, build_experiment
from fedbandit.building.parts import make_engine
from fedbandit.config import Config
from fedbandit.core.timing import Stopwatch
from fedbandit.data import FederatedDataset, open_dataset
from fedbandit.data.dataset import give_back
from fedbandit.evaluation.metrics import held_out_metrics
from fedbandit.federated.algorithm import remembers
from fedbandit.federated.memory import Memory
from fedbandit.federated.round import Engine, play_round
from fedbandit.federated.state import State
from fedbandit.simulation.pretraining import starting_weights


@dataclass
class Simulation:
    """A run in progress: iterating over it runs rounds; `state` is all that has to be kept to resume later.

    An engine of its own is closed after the last round, or at the end of a `with` block by one who stops earlier.
    """

    experiment: Experiment
    engine: Engine
    state: State
    watch: Stopwatch = field(default_factory=Stopwatch)
    owns_engine: bool = False
    memory: Memory | None = None  # what clients remember, for algorithms that need it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine, if it was made for this simulation; no round can run after that."""
        if self.owns_engine:
            self.engine.close()
        if self.memory is not None:
            self.memory.close()
            self.memory = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Play the remaining rounds, yielding each one's metrics."""
        while self.state.round < self.experiment.rounds:
            self.state, metrics = play_round(self.experiment.bandit, self.state, self.engine, self.watch, self.memory)
            if self._evaluates(metrics["round"]):
                with self.watch("evaluate"):
                    metrics |= self.evaluate()
            give_back(self.experiment.dataset)
            if self.state.round == self.experiment.rounds and self.owns_engine:
                self.engine.close()
            yield metrics

    def collect(self) -> dict[str, np.ndarray]:
        """Play the remaining rounds; arrays by name, one value a round, NaN where a round has none."""
        with self:
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
    experiment: Experiment | None = None,
    engine: Engine | None = None,
    state: State | None = None,
    memory: Memory | None = None,
    watch: Stopwatch | None = None,
) -> Simulation:
    """Set up a run: `for metrics in simulate(config): ...`, or `simulate(config).collect()["running_reward"]`."""
    watch = watch or Stopwatch()
    experiment = experiment or build_experiment(config, dataset or open_dataset(config.data.source))
    owns_engine = engine is None
    engine = engine or make_engine(config)
    if state is None:
        try:
            with watch("pretrain"):
                state = experiment.bandit.start(starting_weights(experiment, engine))
        except BaseException:
            if owns_engine:
                engine.close()
            raise
    if memory is None and remembers(experiment.bandit.work.algorithm):
        memory = Memory()
    return Simulation(experiment, engine, state, watch, owns_engine, memory)
