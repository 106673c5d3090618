"""Running a simulation from Python: iterate over rounds, or collect them into results to plot."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from fedbandit.assembly.experiment import Experiment, build_experiment
from fedbandit.assembly.parts import make_engine
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError, FedbanditError, PartFailed
from fedbandit.core.process import Stopwatch
from fedbandit.core.sources import place_of
from fedbandit.data import FederatedDataset, open_dataset
from fedbandit.data.dataset import give_back
from fedbandit.evaluation.metrics import held_out_metrics
from fedbandit.events import Events
from fedbandit.federated.algorithm import remembers
from fedbandit.federated.memory import Memory
from fedbandit.federated.round import Engine, Phase, run_round
from fedbandit.federated.state import State
from fedbandit.privacy.noise import DrawnOnce
from fedbandit.simulation.pretraining import starting_weights

if TYPE_CHECKING:
    from fedbandit.results import Results


@dataclass(frozen=True)
class RoundEvents:
    """The events of the round after a state, all clients together, made when they are asked for: `events()`.

    Chunks of clients are computed wherever the engine is, and their events are not kept. But a draw is a function of
    seed, round, client and position, so acting again with the models of the round gives the very same events. That
    costs about as much as acting did, once per round however often it is asked.
    """

    phase: Phase
    state: State  # before the round

    def __call__(self) -> Events:
        return self._events

    @cached_property
    def _events(self) -> Events:
        work, cohort = self.phase.work, self.phase.cohorts.draw(self.state.round + 1)
        return work.act(cohort, work.broadcast(self.state))


Callback = Callable[[State, RoundEvents, dict[str, Any]], Any]


"""Called after a round with the state behind it, its events (computed when called) and a copy of its metrics."""


def checked(callbacks: Iterable[Any]) -> tuple[Callback, ...]:
    """The callbacks as functions: each is one, or has a method `on_round`."""
    found = []
    for given in callbacks:
        found.append(getattr(given, "on_round", given))
        if not callable(found[-1]):
            raise ConfigError(
                f"callbacks: {given!r} is neither a function nor an object with `on_round`"
            )
    return tuple(found)


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
    callbacks: Sequence[Callback] = ()
    keep: Callable[[dict[str, Any]], None] | None = None  # called before anybody is told of a round
    _evaluated: tuple[np.ndarray, dict[str, float]] | None = field(
        default=None, init=False, repr=False
    )

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
            before = self.state
            self.experiment.dataset.check_unchanged()  # a file that was cut must not be read: that would be a signal
            with _named_parts(self.state.round + 1):
                self.state, metrics = run_round(
                    self.experiment.bandit, self.state, self.engine, self.watch, self.memory
                )
            if self._evaluates(metrics["round"]):
                with self.watch("evaluate"):
                    metrics |= self.evaluate()
            self.experiment.dataset.check_mapped()  # before what was computed from it is kept
            give_back(self.experiment.dataset)
            if self.state.round == self.experiment.rounds and self.owns_engine:
                self.engine.close()
            if self.keep is not None:
                self.keep(metrics)
            self._tell(RoundEvents(self.experiment.bandit, before), metrics)
            yield metrics

    def collect(self) -> "Results":
        """Play the remaining rounds into results: `collect()["running_reward"]` has one value per round."""
        from fedbandit.results import Results, RunRecord

        with self:
            rounds = tuple(self)
        config, header = self.experiment.config, self.experiment.dataset.header
        return Results(
            (
                RunRecord(
                    name=f"{config.policy.name if config.training else 'baseline'}-seed-{config.seed}",
                    config=config.model_dump(),
                    rounds=rounds,
                    environment={"data": header.name, "data_fingerprint": header.fingerprint},
                ),
            )
        )

    def evaluate(self) -> dict[str, float]:
        """How the training model's greedy choice does on the test split, where the data set has one."""
        dataset = self.experiment.dataset
        if dataset.test is None:
            return {}
        weights, predictor = self.state.weights, self.experiment.bandit.work.predictor
        if self._evaluated is None or not np.array_equal(
            self._evaluated[0], weights
        ):  # an untrained model stays
            found = held_out_metrics(predictor, weights, dataset.test, dataset.header.multilabel)
            self._evaluated = weights, found
        return dict(self._evaluated[1])

    def _tell(self, events: RoundEvents, metrics: dict[str, Any]) -> None:
        for callback in self.callbacks:
            callback(self.state, events, dict(metrics))

    def _evaluates(self, number: int) -> bool:
        config = self.experiment.config
        return (
            number == self.experiment.rounds
            or number % (config.evaluate_every or config.deploy_every) == 0
        )


@contextmanager
def _named_parts(number: int) -> Iterator[None]:
    """Have an error in a user's own part be one line that names the round, the file and the line."""
    try:
        yield
    except FedbanditError:
        raise
    except (Exception, SystemExit) as error:
        if (place := place_of(error)) is None:
            raise
        raise PartFailed(f"round {number}: {place}: {type(error).__name__}: {error}") from error


def simulate(
    config: Config,
    dataset: FederatedDataset | None = None,
    *,
    experiment: Experiment | None = None,
    engine: Engine | None = None,
    state: State | None = None,
    memory: Memory | None = None,
    watch: Stopwatch | None = None,
    callbacks: Sequence[Callback] = (),
) -> Simulation:
    """Set up a run in memory: iterate over its rounds, or `collect()` them into `Results`.

    Nothing is written; `run` does the same into a folder that can be resumed. The data set is the
    configuration's unless one is given. A `state` of an earlier simulation continues after its
    round; with `privacy.noise = "system"` give its `experiment` too, which has the secret of its
    cohorts. Callbacks are called after every round as `callback(state, events, metrics)`, or
    `callback.on_round(...)`; `events()` gives the events of the round.

    Examples:
        >>> from fedbandit import preset
        >>> config = preset("so-scratch-softmax").with_values({"rounds": 2, "clients_per_round": 4})
        >>> for metrics in simulate(config):
        ...     print(metrics["round"], metrics["clients"])
        1 4
        2 4
        >>> simulate(config).collect()["reward"].shape
        (2,)
        >>> actions = []
        >>> def keep(state, events, metrics):
        ...     actions.append(events().actions)
        >>> results = simulate(config, callbacks=[keep]).collect()
        >>> [len(one) for one in actions] == list(results["events"])
        True
    """
    callbacks = checked(callbacks)
    watch = watch or Stopwatch()
    if experiment is None:
        experiment = build_experiment(config, dataset or open_dataset(config.data.source))
        if state is not None and experiment.secret is not None:
            raise DrawnOnce(
                "the cohorts of this state come from a secret that is gone; give simulate the"
                " `experiment` of the earlier simulation too, or start anew"
            )
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
    return Simulation(experiment, engine, state, watch, owns_engine, memory, callbacks)
