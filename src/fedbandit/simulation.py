"""Running a simulation from Python: iterate over rounds, or collect them into results to plot.

Supervised pre-training comes first where the scenario has it; runs that share it share its model.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from fedbandit.assembly.experiment import Experiment, build_experiment, pretraining_server
from fedbandit.assembly.parts import make_engine
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError, Diverged, FedbanditError, PartFailed
from fedbandit.core.identity import RESULTS, digest_of, place_of, require_run, source_digests
from fedbandit.core.process import Stopwatch
from fedbandit.data import FederatedDataset, cache_folder, open_dataset
from fedbandit.data.dataset import give_back
from fedbandit.evaluation.metrics import held_out_metrics
from fedbandit.events import Events
from fedbandit.federated.algorithm import remembers
from fedbandit.federated.memory import Memory
from fedbandit.federated.round import Engine, Phase, published, run_round
from fedbandit.federated.state import DamagedState, State, load_marked, save_state
from fedbandit.privacy.noise import DrawnOnce

KEEP_SECONDS = 20.0  # at most this much pre-training is repeated after a crash
DAMAGED = ".damaged"  # ends the name of a state that was set aside


def starting_weights(experiment: Experiment, engine: Engine) -> np.ndarray:
    """The initial model of the bandit phase; a pre-trained one is kept and reused by runs that
    share it.
    """
    if experiment.pretraining is None:
        return experiment.initial_weights()
    pretraining = Pretraining(experiment, engine)
    pretraining.run()
    return pretraining.state.weights


class Pretraining:
    """The supervised rounds before a run: iterating runs those that are missing, yielding each
    one's metrics.

    The model is kept for all runs that share it. So is the state before it is finished, every now
    and then and by `keep`: the next run that needs the model resumes from there.
    """

    def __init__(
        self, experiment: Experiment, engine: Engine, keep_seconds: float = KEEP_SECONDS
    ) -> None:
        assert experiment.pretraining is not None
        self.rounds = experiment.config.pretraining.rounds
        self._phase, self._engine, self._keep_seconds = experiment.pretraining, engine, keep_seconds
        self._dataset = experiment.dataset
        self._file = pretrained_file(experiment)
        self._initial = experiment.initial_weights()
        self.state = self._kept() or self._phase.start(self._initial)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Play the remaining rounds."""
        kept_at = time.monotonic()
        while self.state.round < self.rounds:
            self._dataset.check_unchanged()
            try:
                self.state, metrics = run_round(self._phase, self.state, self._engine, Stopwatch())
            except Diverged as error:
                raise Diverged(f"pre-training {error}") from None
            self._dataset.check_unchanged()  # before what was computed from it is kept
            if self.state.round == self.rounds or time.monotonic() - kept_at >= self._keep_seconds:
                self.keep()
                kept_at = time.monotonic()
            yield metrics

    def run(
        self,
        update: Callable[[dict[str, Any]], Any] = lambda metrics: None,
        stopping: threading.Event | None = None,
    ) -> bool:
        """Run the remaining rounds, each followed by `update(metrics)`; True when all are done.

        A request to stop ends it after the round, with its state kept.
        """
        for metrics in self:
            update(metrics)
            if stopping is not None and stopping.is_set():
                self.keep()
                break
        return self.state.round == self.rounds

    def keep(self) -> None:
        """Save the state, for the next run that needs it."""
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        if self.state.round < self.rounds:
            save_state(self.state, _unfinished(self._file), run=self._file.stem)
            return
        model = State(self.state.round, self.state.weights, {}, {}, self.state.clip_norm)
        save_state(model, self._file, run=self._file.stem)
        _unfinished(self._file).unlink(missing_ok=True)

    def _kept(self) -> State | None:
        """The state that an earlier call has kept, finished or not, or None."""
        if self._file is None:
            return None
        for file in (self._file, _unfinished(self._file)):
            if file.exists():
                with setting_aside(file, "made again"):
                    state, marks = load_marked(file)
                    require_run(
                        file, marks.get("run"), self._file.stem, "remove it to make it again"
                    )
                    return state
        return None


@contextmanager
def setting_aside(file: Path, otherwise: str) -> Iterator[None]:
    """Rename a file that proves to hold a damaged state, and note on stderr what happens instead.

    Any other error is raised: whatever is wrong must not cost a run its states.
    """
    try:
        yield
    except DamagedState as error:
        aside = file.with_name(f"{file.name}{DAMAGED}")
        file.replace(aside)
        note(f"{error}; kept as {aside.name}, and {otherwise}")


def note(text: str) -> None:
    """Tell on stderr what somebody should know who did not ask for progress."""
    print(f"note: {text}", file=sys.stderr, flush=True)


def pretrained_file(experiment: Experiment) -> Path | None:
    """Where this machine keeps (or would keep) the pre-trained model that the run starts from;
    None: nowhere.

    Data in memory without a fingerprint cannot be distinguished from other such data.
    """
    if experiment.pretraining is None or not experiment.dataset.header.fingerprint:
        return None
    return cache_folder() / "pretrained" / f"{_pretraining_key(experiment)}.safetensors"


def _unfinished(file: Path) -> Path:
    """Where the state of a pre-training that was stopped is kept."""
    return file.with_suffix(".unfinished.safetensors")


def _pretraining_key(experiment: Experiment) -> str:
    """Identifies a pre-trained model by everything that went into it, and by nothing else."""
    config, phase = experiment.config, experiment.pretraining
    assert phase is not None
    optimizer, rates = pretraining_server(config)
    parts = {
        "results": RESULTS,
        "data": experiment.dataset.header.fingerprint,
        "model": config.model.described,
        "layout": experiment.layout.shapes,
        "sources": source_digests(
            [config.model.name, optimizer, config.environment.name, config.scenario]
        ),
        "files": experiment.files,
        "dtype": config.dtype,
        "client": config.client.model_dump(include={"batch_size", "epochs"}),
        "learning_rate": config.pretraining.client_learning_rate or config.client.learning_rate,
        "pretraining": config.pretraining.model_dump(
            include={"rounds", "seed", "objective", "reduction"}
        ),
        "optimizer": [optimizer, rates],
        "phase": [repr(part) for part in (phase.work.plan, phase.cohorts, phase.clipping)],
        "aggregation": repr(phase.aggregation),
    }
    if config.environment.name != "labels":
        drift = config.drift.model_dump()
        parts["world"] = [config.environment.described, config.scenario, drift]
    arrays = (experiment.initial_weights(), *_arrays(experiment.bandit.scenario.pretraining))
    return digest_of(parts, *(array.tobytes() for array in arrays))


def _arrays(part: Any) -> Iterator[np.ndarray]:
    """The arrays that an environment holds, and those of what it is laid over."""
    if isinstance(part, np.ndarray):
        yield part
    elif is_dataclass(part):
        for one in fields(part):
            yield from _arrays(getattr(part, one.name))


if TYPE_CHECKING:
    from fedbandit.results import Results


@dataclass(frozen=True)
class RoundEvents:
    """The events of the round after a state, all clients together, made when they are asked for:
    `events()`.

    Chunks of clients are computed wherever the engine is, and their events are not kept. But a draw
    is a function of seed, round, client and position, so acting again with the models of the round
    gives the very same events. That costs about as much as acting did, once per round however often
    it is asked.
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


"""Called after a round with the state behind it, its events (computed when called) and
a copy of its metrics.
"""


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
    """A run in progress: iterating over it runs rounds; `state` is all that has to be kept to
    resume later.

    An engine of its own is closed after the last round, or at the end of a `with` block by one who
    stops earlier.
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
            # a file that was cut must not be read: that would be a signal
            self.experiment.dataset.check_unchanged()
            with _named_parts(self.state.round + 1):
                self.state, metrics = run_round(
                    self.experiment.bandit, self.state, self.engine, self.watch, self.memory
                )
            config, number = self.experiment.config, metrics["round"]
            every = config.evaluate_every or config.deploy_every
            if number == self.experiment.rounds or number % every == 0:
                with self.watch("evaluate"):
                    metrics |= self.evaluate()
            self.experiment.dataset.check_unchanged()  # before what was computed from it is kept
            give_back(self.experiment.dataset)
            if self.state.round == self.experiment.rounds and self.owns_engine:
                self.engine.close()
            if self.keep is not None:
                self.keep(metrics)
            events = RoundEvents(self.experiment.bandit, before)
            told = metrics if self.experiment.secret is None else published(metrics)
            for callback in self.callbacks:
                callback(self.state, events, dict(told))
            yield metrics

    def collect(self) -> "Results":
        """Play the remaining rounds into results: `collect()["running_reward"]` has one value per
        round.
        """
        from fedbandit.results import Results, RunRecord
        from fedbandit.results.reading import columns_of

        with self:
            columns = columns_of(tuple(self))
        config, header = self.experiment.config, self.experiment.dataset.header
        name = config.policy.name if config.training else "baseline"
        return Results(
            (
                RunRecord(
                    name=f"{name}-seed-{config.seed}",
                    config=config.model_dump(),
                    columns=columns,
                    environment={"data": header.name, "data_fingerprint": header.fingerprint},
                ),
            )
        )

    def evaluate(self) -> dict[str, float]:
        """Held-out metrics of the training model's greedy choice; none where the data set has no
        test split.
        """
        dataset = self.experiment.dataset
        if dataset.test is None:
            return {}
        weights, predictor = self.state.weights, self.experiment.bandit.work.predictor
        if self._evaluated is None or not np.array_equal(
            self._evaluated[0], weights
        ):  # an untrained model stays
            header, stage = (
                dataset.header,
                self.experiment.bandit.scenario.stage(max(1, self.state.round)),
            )
            found = held_out_metrics(
                predictor, weights, dataset.test, header.multilabel, stage.environment
            )
            if "sampled" in header.source.get("candidates", ""):
                found["test_sampled"] = 1.0  # hits among sampled candidates are easier
            self._evaluated = weights, found
        return dict(self._evaluated[1])


@contextmanager
def _named_parts(number: int) -> Iterator[None]:
    """Have an error in a user's own part be one line that names the round, the file and the
    line.
    """
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
    `callback.on_round(...)`; `events()` gives the events of the round. Under that noise their
    metrics are those that may be published; who iterates, or collects, gets all.

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
