"""Choosing exploration parameters off-policy, from logged feedback, and checking the choice by
simulation.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import inf, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.assembly.experiment import Experiment, build_experiment
from fedbandit.assembly.parts import build_policy
from fedbandit.config import Config
from fedbandit.core.contexts import rows_at
from fedbandit.core.errors import ConfigError, Diverged, refuse
from fedbandit.core.progress import SILENT, ProgressReporter
from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import FederatedDataset, Log, Split
from fedbandit.evaluation.estimators import by_client
from fedbandit.evaluation.logs import records_of
from fedbandit.federated.round import Engine
from fedbandit.federated.state import State
from fedbandit.ope import BUILT_IN, Bootstrap, Estimate, Estimator, Records, estimate
from fedbandit.results import Results
from fedbandit.results.differences import text_table
from fedbandit.runs.local_runner import HERE, Runner
from fedbandit.simulation import RoundEvents, starting_weights
from fedbandit.studies.compare import folder_name, read_members, run_members
from fedbandit.studies.offline import train_from_logs
from fedbandit.studies.search import point_in_words
from fedbandit.studies.trained_models import Scorer


def collect_logs(experiment: Experiment, state: State, rounds: int) -> FederatedDataset:
    """The events of the cohorts of the next `rounds` rounds, made by the models that are deployed
    in `state`.

    The rounds must lie within one deployment period: what is deployed after it is not known yet.
    """
    phase, split = experiment.bandit, experiment.bandit.work.split
    if state.round % phase.deploy_every + rounds > phase.deploy_every:
        raise ValueError(
            f"{rounds} rounds after round {state.round} reach beyond the deployment period"
        )
    parts = []
    for number in range(state.round + 1, state.round + rounds + 1):
        refuse(
            (
                phase.scenario.stage(number).available is not None,
                f"drift.kind: not all actions exist in round {number}; such logs are not collected",
            )
        )
        events = RoundEvents(phase, replace(state, round=number - 1))()
        refuse(
            (
                events.missing is not None or phase.scenario.delay,
                "environment.name: logs whose rewards may miss are not collected",
            )
        )
        visits = phase.work.plan.visits(split, phase.cohorts.draw(number), number)
        seen = (visits.clients, visits.rows, events.actions, events.rewards, events.propensities)
        parts.append([column[events.fresh] for column in seen])
    owner, rows, actions, rewards, propensities = map(np.concatenate, zip(*parts, strict=True))
    order = np.argsort(owner, kind="stable")
    present, counts = np.unique(owner, return_counts=True)
    chosen = rows[order]
    log = Log(
        actions[order].astype(np.int32),
        rewards[order].astype(np.float32),
        propensities[order].astype(np.float32),
    )
    no_labels = Ragged(np.zeros(len(chosen) + 1, np.int64), np.empty(0, np.int32))
    offsets = np.concatenate([[0], np.cumsum(counts)])
    header = experiment.dataset.header
    logged = replace(header, logged=True, fingerprint=f"{header.fingerprint} logged")
    shown = None if split.candidates is None else split.candidates.take(chosen)
    part = Split(
        split.client_ids[present],
        offsets,
        rows_at(split.features, chosen),
        no_labels,
        split.scale,
        log,
        shown,
        split.catalogue,
    )
    return FederatedDataset(logged, part)


# What makes each policy explore more, and in which direction.
EXPLORATION = {"epsilon-greedy": ("epsilon", 1), "softmax": ("beta", 1), "falcon": ("gamma", -1)}


def exploration_around(config: Config) -> list[float]:
    """Half of what the configuration's policy explores, as much, and twice as much, in its own
    parameter.

    Examples:
        >>> from fedbandit import preset
        >>> exploration_around(preset("so-init-softmax"))  # beta
        [0.025, 0.05, 0.1]
    """
    name, _ = _parameter(config)
    now = float(getattr(build_policy(config), name))
    most = 1.0 if name == "epsilon" else inf
    return list(dict.fromkeys(min(value, most) for value in (now / 2, now, 2 * now)))


@dataclass(frozen=True)
class TuningCandidate:
    """Values to set in the configuration, and what the logs say of them."""

    settings: Mapping[str, Any]
    estimate: Estimate
    influence: np.ndarray  # [clients]: how far each client's log moves the estimate

    @property
    def label(self) -> str:
        """Its settings in few characters: `server=0.05 client=0.5 beta=0.1`."""
        return point_in_words(self.settings)

    def apart_from(self, other: "TuningCandidate", sure: float) -> bool:
        """Whether the log tells the two apart: by the same clients, so what these have in common
        cancels.
        """
        difference = self.estimate.value - other.estimate.value
        return bool(abs(difference) > _visible(self.influence - other.influence, sure))


def _visible(influence: np.ndarray, sure: float) -> float:
    """The smallest difference that can be told from nil, for an estimate moved so by each client."""
    from scipy.special import stdtrit

    n = len(influence)
    return float(stdtrit(n - 1, sure) * sqrt(n / (n - 1) * influence @ influence)) if n > 1 else inf


@dataclass(frozen=True)
class Tuned:
    """The choice, all candidates (best estimate first), and how much the log decides."""

    chosen: TuningCandidate
    candidates: list[TuningCandidate]
    logged_reward: float
    events: int

    @property
    def sure(self) -> float:
        """The quantile to compare by: 95%, over as many comparisons as there are candidates beside
        the best.
        """
        return 1 - 0.025 / max(1, len(self.candidates) - 1)

    @property
    def told_apart(self) -> int:
        """The number of candidates that the log shows to be worse than the best."""
        return sum(other.apart_from(self.candidates[0], self.sure) for other in self.candidates[1:])

    @property
    def smallest_visible(self) -> float:
        """The median difference to the best that a log of this size would show."""
        best = self.candidates[0].influence
        seen = [_visible(one.influence - best, self.sure) for one in self.candidates[1:]]
        return float(np.median(seen)) if seen else 0.0

    @property
    def decides(self) -> bool:
        """Whether the log rules out at least half of what the best was chosen from."""
        return 2 * self.told_apart >= len(self.candidates) - 1


def tune(
    config: Config,
    dataset: FederatedDataset,
    *,
    server_rates: Sequence[float],
    client_rates: Sequence[float],
    exploration: Sequence[float],
    engine: Engine,
    estimator: str = "snips",
    cost: float = 0.05,
    progress: ProgressReporter = SILENT,
) -> Tuned:
    """Play one period with the configuration as it stands, and choose from its logs what to do in
    the next ones.

    Half of the clients' logs train the candidates, from the deployed model on; the other half
    evaluate them. `cost` is the share of the best estimate that more exploration may cost.
    """
    name, _ = _parameter(config)
    refuse((not 0 <= cost < inf, f"cost: must be 0 or more, not {cost:g}"))
    experiment = build_experiment(config, dataset)
    refuse(
        (
            experiment.privacy is not None,
            "privacy.mechanism: candidates are trained on a period's logs, which no stated epsilon"
            " covers",
        )
    )
    start = starting_weights(experiment, engine)
    logs = collect_logs(
        experiment, experiment.bandit.start(start), min(config.deploy_every, config.rounds)
    )
    middle = logs.train.num_clients // 2
    refuse(
        (
            middle < 1,
            "clients_per_round: the period's logs come from too few clients to hold any out",
        )
    )
    held_out = _clients_from(logs, middle)
    candidates: list[TuningCandidate] = []
    rates = [
        {"server.learning_rate": server, "client.learning_rate": client}
        for server, client in product(server_rates, client_rates)
    ]
    with progress.task("training from the log", len(rates), unit="pairs of rates") as advance:
        for pair in rates:
            shorter = {**pair, "rounds": min(config.deploy_every, config.rounds)}
            with suppress(Diverged):
                trained = train_from_logs(
                    config.with_values(shorter),
                    logs,
                    start=start,
                    clients=range(middle),
                    engine=engine,
                )
                scorer = Scorer(trained.experiment.bandit.work.predictor, trained.weights)
                points = [{**pair, f"policy.{name}": value} for value in exploration]
                found = (_estimated(config, held_out, scorer, one, estimator) for one in points)
                candidates += [one for one in found if one is not None]
            advance(1)
    refuse(
        (
            not candidates,
            "every candidate diverged or does nothing that the log has; give smaller learning rates",
        ),
        error=Diverged,
    )
    candidates.sort(key=lambda candidate: -candidate.estimate.value)
    assert logs.train.log is not None
    rewards = logs.train.log.rewards
    return Tuned(
        _most_exploring(config, candidates, cost), candidates, float(rewards.mean()), len(rewards)
    )


def _estimated(
    config: Config,
    logs: FederatedDataset,
    scorer: Scorer,
    settings: dict[str, Any],
    estimator: str,
) -> TuningCandidate | None:
    """A candidate with what the logs say of it; None where nothing in them is like what it does."""
    policy, by = build_policy(config.with_values(settings)), BUILT_IN[estimator]
    predictions, modelled = scorer.on(logs.train), scorer.rewards_on(logs.train)
    actions = logs.header.num_actions
    records = records_of(logs.train, policy, actions, predictions, rewards=modelled)
    found = estimate(records, {estimator: by}, bootstrap=Bootstrap(200, config.seed))[estimator]
    if not np.isfinite(found.value):
        return None
    return TuningCandidate(settings, found, _influence(records, by))


def _influence(records: Records, estimator: Estimator) -> np.ndarray:
    """[clients]: by how much each client's log moves the estimate; they sum to 0."""
    top, bottom = (
        by_client(part, records.bounds) for part in estimator.terms(records, records.importance)
    )
    moved: np.ndarray = (top - top.sum() / bottom.sum() * bottom) / bottom.sum()
    return moved


@dataclass(frozen=True)
class Check:
    """A simulation of the candidates, each with its mean reward over the same rounds."""

    runs: np.ndarray  # [candidates, seeds], in the order of the candidates
    position: int  # of the choice
    cost: float  # the share of the best that a choice may fall short by

    @property
    def rewards(self) -> np.ndarray:
        """[candidates]: means over seeds."""
        means: np.ndarray = self.runs.mean(axis=1)
        return means

    @property
    def chosen(self) -> float:
        """What the choice earned, over all seeds."""
        return float(self.rewards[self.position])

    @property
    def best(self) -> float:
        """What the best candidate earned, over all seeds."""
        return float(self.rewards.max())

    @property
    def rank(self) -> int:
        """Of the choice, from 1."""
        return 1 + int((self.rewards > self.chosen).sum())

    @property
    def refutes(self) -> bool:
        """Whether the choice falls short by more than it may, and by more than seeds differ."""
        behind = self.runs[int(np.argmax(self.rewards))] - self.runs[self.position]
        noise = behind.std(ddof=1) / sqrt(len(behind)) if len(behind) > 1 else 0.0
        return bool(behind.mean() > self.cost * abs(self.best) and behind.mean() > 2 * noise)


def check(
    config: Config,
    tuned: Tuned,
    out: Path,
    *,
    seeds: Sequence[int],
    runner: Runner = HERE,
    cost: float = 0.05,
) -> tuple[Check, Results]:
    """Run every candidate for the configuration's rounds, on these seeds, and see how near the best
    the choice is.

    Runs lie in `out/runs`, and those that are finished are not run again.
    """
    named = {folder_name(one.label): one for one in tuned.candidates}
    members = {name: config.with_values(one.settings) for name, one in named.items()}
    place = out / "runs"
    curves = run_members(members, seeds, place.joinpath, runner=runner)
    rewards = np.zeros((len(members), len(seeds)))  # a run that diverged earns nothing
    for row, own in zip(rewards, curves.values(), strict=True):
        row[[seeds.index(seed) for seed in own.seeds]] = own.final
    position = next(i for i, candidate in enumerate(tuned.candidates) if candidate is tuned.chosen)
    labels = {name: one.label for name, one in named.items()}
    return Check(rewards, position, cost), read_members(labels, seeds, place, str(out))


def rows_of(tuned: Tuned, found: Check | None) -> list[dict[str, Any]]:
    """One row for each candidate, the best estimate first: its settings, estimate and reward."""
    runs = [None] * len(tuned.candidates) if found is None else found.rewards.tolist()
    return [
        {
            **one.settings,
            "estimate": one.estimate.value,
            "standard_error": one.estimate.standard_error,
            "simulated": reward,
            "chosen": one is tuned.chosen,
        }
        for one, reward in zip(tuned.candidates, runs, strict=True)
    ]


def in_words(tuned: Tuned, found: Check | None) -> str:
    """The table of candidates, what the log decides, and what to use."""
    heads = [_short(key) for key in tuned.chosen.settings]
    lines = [[*heads, "estimate", "± s.e.", *["simulated"] * (found is not None), ""]]
    for row in rows_of(tuned, found):
        figures = [row["estimate"], row["standard_error"], row["simulated"]]
        cells = [f"{value:.4f}" for value in figures if value is not None]
        mark = "<- chosen" if row["chosen"] else ""
        lines.append([*(f"{row[key]:g}" for key in tuned.chosen.settings), *cells, mark])
    said = f"{tuned.events} events logged in one period earned {tuned.logged_reward:.4f}"
    warnings = [f"warning: {text}" for text in tuned.chosen.estimate.warnings]
    table = text_table(lines, left=(len(lines[0]) - 1,))
    return "\n".join([said, "", table, "", *warnings, *verdict(tuned, found)])


def _short(key: str) -> str:
    """A setting in few characters.

    Examples:
        >>> _short("client.learning_rate"), _short("policy.beta")
        ('client rate', 'beta')
    """
    return key.removeprefix("policy.").replace(".learning_rate", " rate")


def verdict(tuned: Tuned, found: Check | None) -> list[str]:
    """The lines on what the log decides and the check says, and a recommendation where neither
    speaks against it.
    """
    others = len(tuned.candidates) - 1
    lines = [
        f"the log shows {tuned.told_apart} of {others} other candidates to be worse than its best;"
        f" differences below about {tuned.smallest_visible:.4f} cannot be seen in a log of this size"
    ]
    if not tuned.decides:
        worth = tuned.chosen.estimate.effective_sample_size
        lines.append(
            f"warning: little overlap: {tuned.chosen.estimate.events} held-out events are worth"
            f" {worth:.0f} of the choice's own, which rules out less than half of the candidates; by"
            " the log alone the choice is a guess"
        )
    settings = " ".join(f"--set {key}={value:g}" for key, value in tuned.chosen.settings.items())
    if found is None:
        return [
            *lines,
            f"use it: {settings}" if tuned.decides else f"not checked; a guess: {settings}",
        ]
    share = 100 * found.chosen / found.best if found.best else 0.0
    lines += [
        f"by simulation the choice earns {found.chosen:.4f}, {share:.1f}% of the best candidate's"
        f" {found.best:.4f}",
        f"(rank {found.rank} of {len(found.rewards)}; the worst earns {found.rewards.min():.4f})",
    ]
    if not found.refutes:
        return [*lines, f"use it: {settings}"]
    best = tuned.candidates[int(np.argmax(found.rewards))].settings
    return [
        *lines,
        "the check refutes the choice: the log does not recommend anything here",
        "best by simulation, not by the log: "
        + " ".join(f"--set {key}={value:g}" for key, value in best.items()),
    ]


def _most_exploring(
    config: Config, candidates: list[TuningCandidate], cost: float
) -> TuningCandidate:
    """The most exploration that costs no more than asked; among equals the better estimate."""
    name, sign = _parameter(config)
    best = candidates[0].estimate.value
    alike = [c for c in candidates if c.estimate.value >= best - cost * abs(best)]
    return max(alike, key=lambda c: (sign * c.settings[f"policy.{name}"], c.estimate.value))


def _parameter(config: Config) -> tuple[str, int]:
    """The parameter by which the configuration's policy explores, and the direction of more."""
    if config.policy.name not in EXPLORATION:
        known = ", ".join(EXPLORATION)
        raise ConfigError(
            f"policy.name: {config.policy.name} has no exploration to tune from its logs; known:"
            f" {known}"
        )
    return EXPLORATION[config.policy.name]


def _clients_from(logs: FederatedDataset, first: int) -> FederatedDataset:
    """The clients from `first` on, as a logged data set of their own."""
    split = logs.train
    assert split.log is not None
    rows = np.arange(split.offsets[first], split.offsets[-1])
    part = replace(
        split,
        client_ids=split.client_ids[first:],
        offsets=split.offsets[first:] - split.offsets[first],
        features=rows_at(split.features, rows),
        labels=split.labels.take(rows),
        log=split.log.take(rows),
        candidates=None if split.candidates is None else split.candidates.take(rows),
    )
    return replace(logs, train=part)
