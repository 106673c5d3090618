"""`fedbandit advise`: a tournament of exploration rules on a user's own data.

Every rule searches its learning rates with the same number of tries, on a seed apart; then all run
with the same seeds, the chosen one also with other deployment periods and with noise. What is run
is decided once, in rounds, and kept in `tournament.json`: the time there is decides only how much.
`fedbandit.report.advice` says what it shows.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.assembly.experiment import Experiment, build_experiment
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError
from fedbandit.core.files import read_json, write_json
from fedbandit.data import FederatedDataset, open_dataset
from fedbandit.evaluation.metrics import expected_rewards
from fedbandit.presets import preset
from fedbandit.runs.folder import read_metrics
from fedbandit.runs.local_runner import HERE, Runner
from fedbandit.studies.compare import Curves, run_members
from fedbandit.studies.planning import (
    PERIODS,
    POLICIES,
    Pace,
    TournamentPlan,
    measured,
    plan_for,
    seeds_for,
)
from fedbandit.studies.search import RATES, Search, best_point, effort, points, scaled, values_of

EXPLORERS = tuple(name for name in POLICIES if name != "greedy")
UNTOUCHED = "untouched"  # the model before any bandit round, greedy
_WEIGHTED = "softmax-weighted"  # softmax that learns with importance weights
_SMALL_CLIENT_RATE = {
    "so": 0.05,
    "emnist": 0.01,
}  # where importance weights start: they make steps large
_ROWS = 4096


@dataclass(frozen=True)
class Tournament:
    """All runs of the tournament, from which the recommendation is written."""

    dataset: FederatedDataset
    plan: TournamentPlan
    minutes: float
    tries: Mapping[str, int]  # pairs of learning rates that each policy got
    configs: Mapping[str, Config]  # each policy at its best rates
    curves: Mapping[str, Curves]
    periods: Mapping[int, Curves]  # of the chosen policy, by deployment period
    private: Mapping[float, Curves]  # of the chosen policy, by epsilon
    private_note: str
    folder: Path
    chosen: str
    tie: str = ""  # in whose favour and why a tie was broken
    constants: Mapping[str, float] = field(
        default_factory=dict
    )  # what needs no model earns: random, one action always
    held_out: Mapping[str, np.ndarray] = field(
        default_factory=dict
    )  # one value a seed, where there is a test split
    held_out_name: str = ""
    visits: float = 0.0  # of an example, on average


def base_configs(dataset: FederatedDataset, source: str, scenario: str) -> dict[str, Config]:
    """Where each policy starts: the paper's values for the nearer of its two kinds of data.

    Images take EMNIST's tables and the CNN, everything else Stack Overflow's and a linear model;
    cohorts and pre-training are fitted to the number of clients. `UNTOUCHED` is the model before
    any bandit round, for comparison.
    """
    header = dataset.header
    image = header.kind == "dense" and len(header.shape) == 2
    family = "emnist" if image else "so"
    setting = scenario if scenario in ("scratch", "init", "init-shift") else "init-shift"
    clients = dataset.train.num_clients
    initial = 0 if scenario == "scratch" else min(100, clients // 4)
    cohort = min(64, clients - initial, initial or clients)
    if cohort < 1:
        raise ConfigError(f"--data: {clients} clients are too few for a tournament")
    fitted: dict[str, Any] = {
        "data.source": source,
        "scenario": scenario,
        "clients_per_round": cohort,
    }
    if initial:
        fitted["pretraining.clients"] = initial
    if not image:
        fitted["model.name"] = "linear"
    weighted = {
        "objective.name": "weighted-regression",
        "client.learning_rate": _SMALL_CLIENT_RATE[family],
    }
    presets = {name: preset(f"{family}-{setting}-{name}") for name in POLICIES if name != _WEIGHTED}
    presets[_WEIGHTED] = presets["softmax"].with_values(weighted)
    configs = {name: presets[name].with_values(fitted) for name in POLICIES}
    return {**configs, UNTOUCHED: configs["greedy"].with_values({"training": False})}


def run_tournament(
    source: str,
    minutes: float,
    out: Path,
    *,
    scenario: str = "init",
    epsilon: float | None = 8.0,
    runner: Runner = HERE,
    say: Callable[[str], None] = print,
) -> Tournament:
    """Run the tournament within about `minutes`, or resume it, and return all that it measured.

    `out` holds the runs. `epsilon` asks what privacy would cost, None leaves that out. A first
    probe measures the pace of this machine; the lengths and counts that follow from it are kept, so
    that a tournament that is resumed stays the same. `ConfigError` with the minutes it takes where
    even the shortest one does not fit.
    """
    if epsilon is not None and not epsilon > 0:
        raise ConfigError(
            f"--epsilon: should be above 0, or 0 to leave privacy out; not {epsilon:g}"
        )
    started = time.monotonic()
    dataset = open_dataset(source)
    bases = base_configs(dataset, source, scenario)
    experiment = build_experiment(bases["softmax"], dataset)
    grid = _coarse_rates("emnist" if bases["softmax"].model.name == "cnn" else "so")
    private = epsilon is not None
    if (out / "tournament.json").exists():
        say(
            f"resuming the tournament in {out} with its original plan; for another budget use another folder"
        )
    pace: Pace | None = None
    most = len(
        points(grid)
    )  # every policy has as many, whether or not its published rates are among them

    def left() -> float:
        return 60 * minutes - (time.monotonic() - started)

    def fitting(pace: Pace) -> TournamentPlan | None:
        try:
            return plan_for(bases["softmax"], left(), most, private, pace)
        except ConfigError:
            return None

    if not _is_decided(out, "scale", "tries", "seeds"):
        runner, pace = measured(bases["softmax"], out / "probe", runner, fitting)

    def planned() -> TournamentPlan:
        assert pace is not None
        return plan_for(bases["softmax"], left(), most, private, pace)

    tries = int(_decided(out, "tries", lambda: planned().tries))
    scale = _decided(out, "scale", lambda: planned().scale)
    plan = TournamentPlan(scale, tries)
    say(f"running {scale:.2g} of the paper's length; {tries} pairs of rates for each policy")
    bases = {name: scaled(config, scale) for name, config in bases.items()}
    configs = {
        name: _at_best(bases[name], grid, tries, out / "rates" / name, name, runner, say)
        for name in POLICIES
    }
    configs[UNTOUCHED] = bases[UNTOUCHED]

    def affordable() -> int:
        assert pace is not None
        return seeds_for(configs["softmax"], left(), tries, private, pace)

    seeds = range(int(_decided(out, "seeds", affordable)))
    say(f"all policies at their best rates, {len(seeds)} seeds")
    curves = run_members(
        configs, seeds, lambda name, seed: out / "runs" / name / f"seed-{seed}", runner=runner
    )
    chosen, tie = choose(curves)
    periods = _other_periods(configs[chosen], chosen, seeds, out, runner, say)
    by_epsilon, note = _under_privacy(
        configs[chosen], chosen, grid, tries, seeds, out, epsilon, dataset, runner, say
    )
    name, held_out = _held_out(out, curves)
    return Tournament(
        dataset=dataset,
        plan=plan,
        minutes=(time.monotonic() - started) / 60,
        tries={
            name: looked
            for name, (looked, _) in effort({n: n for n in POLICIES}, out / "rates").items()
        },
        configs=configs,
        curves=curves,
        chosen=chosen,
        tie=tie,
        periods={configs[chosen].deploy_every: curves[chosen], **periods},
        private=by_epsilon,
        private_note=note,
        folder=out,
        constants=without_a_model(experiment),
        held_out=held_out,
        held_out_name=name,
        visits=visits_per_example(configs[chosen], experiment),
    )


def choose(curves: Mapping[str, Curves]) -> tuple[str, str]:
    """The policy with the highest mean, or softmax where the two cannot be told apart.

    The second value says how a tie was broken; it is empty where none was.
    """
    entrants = {name: c for name, c in curves.items() if name in POLICIES and len(c.final)}
    if not entrants:
        raise ConfigError("--data: every policy diverged at every rate that was tried")
    best = max(entrants, key=lambda name: entrants[name].final.mean())
    if best in EXPLORERS and best != "softmax" and "softmax" in entrants:
        difference = entrants[best].minus(entrants["softmax"])
        if not difference.told_apart:
            reason = (
                f"{best} has the highest mean, but cannot be told apart from softmax ({difference})"
            )
            return "softmax", f"{reason}; a tie, broken in favour of softmax, the default"
    return best, ""


def without_a_model(experiment: Experiment) -> dict[str, float]:
    """The reward of a random action, and of the one action that is best to take always: exact.

    Averaged over the clients and examples that the bandit phase sees, and over the rounds of each
    stage of the scenario. What a model has to beat.
    """
    work, split = experiment.bandit.work, experiment.dataset.train
    stages = experiment.bandit.scenario.stages
    ends = [*(stage.from_round for stage in stages[1:]), experiment.config.rounds + 1]
    lengths = [max(0, end - stage.from_round) for stage, end in zip(stages, ends, strict=True)]
    first = experiment.config.pretraining.clients if experiment.pretraining is not None else 0
    sizes = split.sizes()[first:]
    most = experiment.config.client.max_examples
    share = np.repeat(
        np.minimum(sizes, most or sizes) / np.maximum(sizes, 1), sizes
    )  # of a large client some count
    rows = np.arange(split.offsets[first], split.num_examples)
    total = np.zeros(work.num_actions)
    for stage, length in zip(stages, lengths, strict=True):
        rewards = expected_rewards(split, stage.environment, work.num_actions, stage.from_round)
        for start in range(0, len(rows), _ROWS):
            block = slice(start, start + _ROWS)
            total += length / sum(lengths) * (share[block] @ rewards(rows[block]))
    mean = total / share.sum()
    action = experiment.dataset.header.actions[int(np.argmax(mean))]
    return {"random": float(mean.mean()), f"always {action}": float(mean.max())}


def visits_per_example(config: Config, experiment: Experiment) -> float:
    """Visits of a run to each example of the bandit phase's clients, on average.

    Beyond about twenty, rewards show what was memorised.
    """
    first = config.pretraining.clients if experiment.pretraining is not None else 0
    sizes = experiment.dataset.train.sizes()[first:]
    seen = np.minimum(sizes, config.client.max_examples or sizes)
    return float(config.rounds * config.clients_per_round * seen.mean() / max(1, sizes.sum()))


def _held_out(out: Path, curves: Mapping[str, Curves]) -> tuple[str, dict[str, np.ndarray]]:
    """Accuracy or recall of the last models on the test split: its name, and one value for each
    seed.
    """
    found: dict[str, np.ndarray] = {}
    name = ""
    for label, member in curves.items():
        lines = [read_metrics(out / "runs" / label / f"seed-{seed}")[-1] for seed in member.seeds]
        for key in ("test_accuracy", "test_recall_at_5"):
            if lines and all(line.get(key) is not None for line in lines):
                name, found[label] = key, np.array([line[key] for line in lines], float)
    return name, found


def _coarse_rates(family: str) -> dict[str, list[float]]:
    """One rate a decade of the appendix's grids."""
    return {key: values_of(key, values)[::3] for key, values in RATES[family].items()}


def _at_best(
    config: Config,
    grid: Mapping[str, Sequence[float]],
    tries: int,
    folder: Path,
    name: str,
    runner: Runner,
    say: Callable[[str], None],
) -> Config:
    search = Search(folder, None, runner, say, tries)
    return config.with_values(best_point(name, config, grid, search))


def _is_decided(out: Path, *names: str) -> bool:
    kept = read_json(out / "tournament.json") or {}
    return all(isinstance(kept.get(name), int | float) for name in names)


def _decided(out: Path, name: str, decide: Callable[[], float]) -> float:
    """The decision of an earlier call for this folder, or one made now, kept for the next call.

    How long runs are and how many depends on the time there is; a tournament that is resumed has to
    stay the same.
    """
    kept = read_json(out / "tournament.json") or {}
    if not isinstance(kept.get(name), int | float):
        kept[name] = decide()
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "tournament.json", kept)
    decided: float = kept[name]
    return decided


def _other_periods(
    config: Config, name: str, seeds: range, out: Path, runner: Runner, say: Callable[[str], None]
) -> dict[int, Curves]:
    periods = sorted(
        {max(1, round(config.deploy_every * factor)) for factor in PERIODS} - {config.deploy_every}
    )
    say(
        f"{name}, deploying every {' and '.join(map(str, periods))} rounds instead of {config.deploy_every}"
    )
    members = {str(every): config.with_values({"deploy_every": every}) for every in periods}
    curves = run_members(
        members, seeds, lambda every, seed: out / "periods" / every / f"seed-{seed}", runner=runner
    )
    return {int(every): c for every, c in curves.items()}


def _under_privacy(
    config: Config,
    name: str,
    grid: Mapping[str, Sequence[float]],
    tries: int,
    seeds: range,
    out: Path,
    epsilon: float | None,
    dataset: FederatedDataset,
    runner: Runner,
    say: Callable[[str], None],
) -> tuple[dict[float, Curves], str]:
    """The chosen policy with noise for the epsilon asked for, at own rates from as many
    tries.

    Its clip norm is the median update without noise.
    """
    if epsilon is None:
        return {}, ""
    runs = [read_metrics(out / "runs" / name / f"seed-{seed}") for seed in seeds]
    norms = [
        line["client_norm_median"] for lines in runs for line in lines if line["client_norm_median"]
    ]
    settings: dict[str, Any] = {
        "clipping.norm": float(f"{np.median(norms):.2g}") if norms else 1.0,
        "privacy.mechanism": "dp-fedavg",
        "privacy.epsilon": epsilon,
        "privacy.sampling": "poisson",
        "privacy.delta": min(1e-3, 1 / (10 * dataset.train.num_clients)),
    }
    if config.scenario != "scratch":
        settings["privacy.pretraining"] = "public"
    say(f"{name} with epsilon {epsilon:g}")
    label = f"epsilon-{epsilon:g}"
    try:
        member = config.with_values(settings)
        build_experiment(member, dataset)
        member = _at_best(member, grid, tries, out / "rates" / label, label, runner, say)
        curves = run_members(
            {label: member},
            seeds,
            lambda _, seed: out / "private" / label / f"seed-{seed}",
            runner=runner,
        )
    except ConfigError as error:
        return {}, f"epsilon {epsilon:g} cannot be had here: {error}"
    rates = f"{member.client.learning_rate:g} and {member.server.learning_rate:g}"
    note = (
        f"delta {settings['privacy.delta']:.1g}, clip norm {settings['clipping.norm']:g} (the median update, seen"
        f" without noise), client and server rates of its own ({rates})"
    )
    if config.scenario != "scratch":
        note += "; the pre-training clients count as public"
    return {epsilon: next(iter(curves.values()))}, note
