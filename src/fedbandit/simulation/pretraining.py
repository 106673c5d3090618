"""Supervised pre-training before a run: shared by all runs that start from the same model, and resumable."""

import sys
import time
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.assembly.experiment import Experiment, pretraining_server
from fedbandit.core.errors import Diverged
from fedbandit.core.identity import digest_of, require_run
from fedbandit.core.process import Stopwatch
from fedbandit.core.sources import RESULTS, source_digests
from fedbandit.data import cache_folder
from fedbandit.federated.round import Engine, run_round
from fedbandit.federated.state import DamagedState, State, load_marked, save_state

KEEP_SECONDS = 20.0  # at most this much pre-training is repeated after a crash


def starting_weights(experiment: Experiment, engine: Engine) -> np.ndarray:
    """The initial model of the bandit phase; a pre-trained one is kept and reused by runs that share it."""
    if experiment.pretraining is None:
        return experiment.initial_weights()
    pretraining = Pretraining(experiment, engine)
    for _ in pretraining:
        pass
    return pretraining.state.weights


class Pretraining:
    """The supervised rounds before a run: iterating runs those that are missing, yielding each one's metrics.

    The model is kept for all runs that share it. So is the state before it is finished, every now and then and by
    `keep`: the next run that needs the model resumes from there.
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
            self._dataset.check_mapped()  # before what was computed from it is kept
            if self.state.round == self.rounds or time.monotonic() - kept_at >= self._keep_seconds:
                self.keep()
                kept_at = time.monotonic()
            yield metrics

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
        if self._file is None:
            return None
        for file in (self._file, _unfinished(self._file)):
            try:
                if file.exists():
                    state, marks = load_marked(file)
                    require_run(
                        file, marks.get("run"), self._file.stem, "remove it to make it again"
                    )
                    return state
            except DamagedState as error:
                aside = file.with_name(f"{file.name}.damaged")
                file.replace(aside)
                print(
                    f"note: {error}; kept as {aside.name}, and made again",
                    file=sys.stderr,
                    flush=True,
                )
        return None


def pretrained_file(experiment: Experiment) -> Path | None:
    """Where this machine keeps (or would keep) the pre-trained model that the run starts from; None: nowhere.

    Data in memory without a fingerprint cannot be distinguished from other such data.
    """
    if experiment.pretraining is None or not experiment.dataset.header.fingerprint:
        return None
    return cache_folder() / "pretrained" / f"{_pretraining_key(experiment)}.safetensors"


def _unfinished(file: Path) -> Path:
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
