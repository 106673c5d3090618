"""`fedbandit advise`: what to deploy on a user's own data.

Stage 1 tunes every contender's rates by successive halving, beyond the grid's edges where the best
lies there. Stage 2 runs the finalists several times longer on fresh seeds, and it alone decides.
What is run is decided once, in rounds, and kept in `plan.json`. `fedbandit.report.advice` says it.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.assembly.experiment import Experiment, build_experiment
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError, refuse
from fedbandit.core.files import read_json, write_json
from fedbandit.core.parts import counted
from fedbandit.core.prediction import over_actions
from fedbandit.data import FederatedDataset, open_dataset
from fedbandit.engines import usable_cores
from fedbandit.evaluation.metrics import expected_rewards
from fedbandit.presets import preset
from fedbandit.results.differences import Differences, differences, paired
from fedbandit.runs.local_runner import HERE, Runner
from fedbandit.studies.bakeoff import pace_of
from fedbandit.studies.compare import Curves, folder_name, run_members
from fedbandit.studies.search import FACTOR, Choice, Search, best_points, cost, search_steps

UNTOUCHED = "untouched"  # the model before any bandit round, greedy
_PERIODS = (0.2, 2.0)  # other deployment periods to try, relative to the usual one
_FINALISTS = 4  # of stage 1, beside greedy and the untouched model
_LONGER = 4  # times the rounds of stage 1 that stage 2 has
_EXTEND = 2  # steps beyond the edge of a grid
_ALIKE = 0.01  # of the best reward: what makes the simpler one of two that are not told apart win
_ROWS = 4096
_RATES: dict[str, dict[str, list[Any]]] = {
    "so": {
        "client.learning_rate": [0.05, 0.2, 1.0],
        "server.learning_rate": [0.005, 0.02, 0.05],
    },
    "emnist": {
        "client.learning_rate": [0.02, 0.1, 0.5],
        "server.learning_rate": [0.001, 0.005, 0.02],
    },
}
_NEWTON = {"algorithm.rate": [0.1, 0.2, 0.4, 0.8], "algorithm.prior": [0.02, 0.1, 0.5]}
# What each contender changes, and what of it is tuned beside (or in place of) learning rates.
_RULES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "falcon": {},
    "epsilon-greedy": {},
    "greedy": {},
    "squarecb": {"policy.name": "squarecb"},
    "softmax, importance weights": {"objective.name": "weighted-regression"},
    "softmax, doubly robust": {"objective.name": "doubly-robust"},
    "softmax, diagonal Newton": {"algorithm.name": "diag-newton"},
    "greedy, diagonal Newton": {"algorithm.name": "diag-newton"},
    "linucb": {"algorithm.name": "statistics", "policy.name": "ucb"},
}


@dataclass(frozen=True)
class AdvicePlan:
    """Extent of an advice: rounds and deployment period of stage 1, tries a contender, seeds of
    stage 2, whose runs are `longer` times as long.

    It is decided once, from the pace of the machine, and kept: rounds, not seconds, say what is run.

    Examples:
        >>> plan = AdvicePlan(rounds=50, deploy_every=6, tries=9, seeds=5)
        >>> first = plan.first(preset("so-scratch-softmax"))
        >>> first.rounds, plan.second(first).rounds
        (50, 200)
    """

    rounds: int
    deploy_every: int
    tries: int
    seeds: int
    longer: int = _LONGER

    def first(self, config: Config) -> Config:
        """The configuration at the length of stage 1."""
        return config.with_values(
            {
                "rounds": self.rounds,
                "deploy_every": self.deploy_every,
                "evaluate_every": self.rounds,
            }
        )

    def second(self, config: Config) -> Config:
        """The configuration at the length of stage 2, deploying as often."""
        rounds = self.longer * self.rounds
        return config.with_values({"rounds": rounds, "evaluate_every": rounds})


@dataclass(frozen=True)
class Contest:
    """Both stages of an advice, from which the recommendation is written."""

    dataset: FederatedDataset
    plan: AdvicePlan
    choices: Mapping[str, Choice]  # of stage 1, by contender
    configs: Mapping[str, Config]  # of the finalists, tuned, at the length of stage 2
    curves: Mapping[str, Curves]  # of the finalists, stage 2
    constants: Mapping[
        str, float
    ]  # what needs no model earns: a random action, the best one always
    held_out: Mapping[str, Mapping[int, float]]  # of the last models, by seed
    held_out_name: str
    left_out: Sequence[str] = ()  # contenders that do not fit this data, with the reason
    periods: Mapping[int, Curves] = field(default_factory=dict)  # of the recommended one
    private: Mapping[float, Curves] = field(default_factory=dict)
    private_note: str = ""
    visits: float = 0.0  # of an example in stage 2, on average

    def rewards(self) -> dict[str, dict[int, float]]:
        """The final rewards of stage 2 by seed; what needs no model earns the same with each."""
        found = {label: curves.by_seed for label, curves in self.curves.items()}
        every = range(self.plan.seeds)
        return {**found, **{k: dict.fromkeys(every, v) for k, v in self.constants.items()}}


@dataclass(frozen=True)
class AdviceVerdict:
    """Recommendation of an advice, and what stage 2 allows to say beside it."""

    recommended: str
    found: Differences  # all of stage 2, with intervals that hold together
    better_than: Sequence[str]  # contenders that the recommended one is called better than
    doubts: Mapping[str, str]  # why it is not called better than others, by contender
    tie: str = ""  # who had the highest mean, where the simpler of two alike is recommended


def judge(held: Contest) -> AdviceVerdict:
    """The recommendation and what stage 2 allows to say about it.

    The highest mean reward is recommended; of those within 1% of it that cannot be told apart from
    it, the simplest (a constant, the untouched model, greedy, softmax, others). It is called better
    than another only where their interval leaves zero out, neither's rates lie on an edge, both
    stages rank the two alike, and held-out metrics do not say the opposite.
    """
    found = differences(held.rewards())
    refuse((not found.outcomes, "--data: every contender diverged at every rate that was tried"))
    best = found.outcomes[0]
    alike = [
        one.configuration
        for one in found.outcomes
        if one.reward >= best.reward - _ALIKE * abs(best.reward)
        and not (one.difference and one.difference.told_apart)
    ]
    chosen = min(alike, key=lambda name: _simplicity(held, name))
    tie = best.configuration if chosen != best.configuration else ""
    gaps, doubts = compared(held, chosen)
    better = []
    for one in gaps.outcomes:
        if one.difference is not None and one.configuration not in doubts:
            if one.difference.mean < 0:
                better.append(one.configuration)
            else:
                doubts[one.configuration] = f"ahead by less than 1% ({one.difference})"
    return AdviceVerdict(chosen, gaps, better, doubts, tie)


def compared(held: Contest, reference: str) -> tuple[Differences, dict[str, str]]:
    """Every contender minus one that stage 2 has brought up, and why a difference is not called
    one, by contender: those without a doubt are better or worse.

    The reference was found afterwards, so the intervals hold for all pairs.
    """
    gaps, doubts = differences(held.rewards(), reference, found_afterwards=True), {}
    for one in gaps.outcomes:
        if one.difference is None:
            continue
        reason = f"not told apart ({one.difference})"
        if one.difference.told_apart:
            ahead = one.difference.mean > 0
            pair = (one.configuration, reference) if ahead else (reference, one.configuration)
            reason = _doubt(held, *pair)
        if reason:
            doubts[one.configuration] = reason
    return gaps, doubts


def _simplicity(held: Contest, name: str) -> tuple[int, str]:
    """The place of a contender by its demands: one action, no training, no exploration, softmax."""
    if name in held.constants:
        return (0, name)
    order = (UNTOUCHED, "greedy", "softmax")
    return (order.index(name) + 1 if name in order else len(order) + 1, "")


def _doubt(held: Contest, ours: str, theirs: str) -> str:
    """Why a difference of stage 2 is not enough to call the one better; empty where it is."""
    for name in (ours, theirs):
        if (choice := held.choices.get(name)) and choice.on_edge:
            return f"the best {' and '.join(choice.on_edge)} of {name} lies on the edge of its grid"
    first = [held.choices[name].reward for name in (ours, theirs) if name in held.choices]
    if len(first) == 2 and (first[0] or 0.0) < (first[1] or 0.0):
        return "stage 1 ranked the two the other way round"
    if ours in held.held_out and theirs in held.held_out:
        gap = paired(held.held_out[ours], held.held_out[theirs])
        if gap is not None and gap.told_apart and gap.mean < 0:
            return f"{held.held_out_name.replace('test_', 'held-out ').replace('_', ' ')} disagrees"
    return ""


def contenders(
    dataset: FederatedDataset, source: str, scenario: str
) -> tuple[dict[str, Config], dict[str, dict[str, list[Any]]], list[str]]:
    """The contenders by name, the grid of each, and those left out with the reason.

    Each starts from the paper's values for the nearer of its two kinds of data: images take
    EMNIST's tables and the CNN, everything else Stack Overflow's and a linear model. Cohorts and
    pre-training are fitted to the number of clients. The last contender, `UNTOUCHED`, has no grid.
    """
    header = dataset.header
    image = header.kind == "dense" and len(header.shape) == 2
    family = "emnist" if image else "so"
    setting = scenario if scenario in ("scratch", "init", "init-shift") else "init-shift"
    clients = dataset.train.num_clients
    initial = 0 if scenario == "scratch" else min(100, clients // 4)
    cohort = min(64, clients - initial, initial or clients)
    refuse((cohort < 1, f"--data: {clients} clients are too few for advice"))
    fitted: dict[str, Any] = {"data.source": source, "scenario": scenario}
    fitted |= {"clients_per_round": cohort} | ({"pretraining.clients": initial} if initial else {})
    fitted |= {} if image else {"model.name": "linear"}
    configs: dict[str, Config] = {}
    grids: dict[str, dict[str, list[Any]]] = {}
    left_out: list[str] = []
    for name, changes in _RULES.items():
        rule = name.partition(",")[0]
        published = rule if rule in ("falcon", "epsilon-greedy", "greedy") else "softmax"
        grid = _RATES[family]
        if "algorithm.name" in changes:
            grid = (
                _NEWTON
                if changes["algorithm.name"] == "diag-newton"
                else {"policy.alpha": [0.1, 0.3, 1.0]}
            )
        try:
            start = preset(f"{family}-{setting}-{published}")
            config = start.with_values({**fitted, **changes})
            build_experiment(config, dataset)
        except ConfigError as error:
            if not changes:
                raise
            left_out.append(f"{name} ({error})")
            continue
        configs[name], grids[name] = config, grid
    untouched = configs["greedy"].with_values({"training": False})
    return {**configs, UNTOUCHED: untouched}, grids, left_out


def plan_for(
    config: Config, seconds: float, entrants: int, private: bool, pace: tuple[float, float]
) -> AdvicePlan:
    """The longest plan that fits this many CPU seconds, with fewer tries and seeds only where even
    short runs do not fit.

    `pace` has the seconds of a round and of a start. Refused, with the minutes it takes, where the
    least does not fit.
    """
    most = max(12, config.rounds // _LONGER)
    for tries, seeds, least in ((9, 5, 40), (6, 3, 12)):
        rounds = most
        while rounds >= min(least, most):
            plan = AdvicePlan(rounds, max(1, rounds // 8), tries, seeds)
            if (needed := seconds_of(config, plan, entrants, private, pace)) <= seconds:
                return plan
            rounds = int(rounds * 0.9)
    raise ConfigError(
        f"--budget: advice on this data needs at least {math.ceil(needed / 60 + 0.5)} minutes here"
    )


def seconds_of(
    config: Config, plan: AdvicePlan, entrants: int, private: bool, pace: tuple[float, float]
) -> float:
    """The CPU seconds of a whole advice, by the pace of its rounds and starts."""
    a_search = cost(plan.tries, search_steps(plan.first(config)), FACTOR) + _EXTEND * plan.rounds
    searches, members = entrants + private, _FINALISTS + 2 + len(_PERIODS) + 2 * private
    final = members * plan.seeds
    rounds = searches * a_search + final * plan.longer * plan.rounds
    return rounds * pace[0] + (searches * (plan.tries + _EXTEND) + final) * pace[1]


def run_contest(
    source: str,
    minutes: float,
    out: Path,
    *,
    scenario: str = "init",
    epsilon: float | None = 8.0,
    runner: Runner = HERE,
    say: Callable[[str], None] = print,
) -> Contest:
    """Run both stages within about `minutes`, or resume them, and return all that they measured.

    `out` holds the runs. `epsilon` asks what privacy would cost, None leaves that out. A probe
    measures the pace of this machine; the plan that follows from it is kept, so that an advice that
    is killed and resumed ends with the same bytes.
    """
    if epsilon is not None and not epsilon > 0:
        raise ConfigError(
            f"--epsilon: should be above 0, or 0 to leave privacy out; not {epsilon:g}"
        )
    dataset = open_dataset(source)
    configs, grids, left_out = contenders(dataset, source, scenario)
    experiment = build_experiment(configs["softmax"], dataset)
    constants = without_a_model(experiment)
    plan = _kept_plan(out)
    if plan is None:
        pace = pace_of(configs["softmax"], time.monotonic)
        cores = getattr(runner, "workers", None) or usable_cores()
        plan = plan_for(
            configs["softmax"], 50 * minutes * cores, len(grids), epsilon is not None, pace
        )
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "plan.json", asdict(plan))
    else:
        say(f"resuming the advice in {out} with its plan; for another budget use another folder")
    say(
        f"stage 1: {counted(len(grids), 'contender')}, {plan.tries} pairs of rates each,"
        f" {plan.rounds} rounds, deploying every {plan.deploy_every}"
    )
    first = {name: plan.first(config) for name, config in configs.items()}
    search = Search(_below(out / "stage-1"), runner, say, plan.tries, _EXTEND)
    choices = best_points({name: first[name] for name in grids}, grids, search)
    ranked = sorted(
        (name for name in choices if choices[name].reward is not None),
        key=lambda name: -(choices[name].reward or 0.0),
    )
    names = dict.fromkeys([*ranked[:_FINALISTS], "greedy", UNTOUCHED])
    finalists = {
        name: plan.second(first[name]).with_values(choices[name].point if name in choices else {})
        for name in names
    }
    say(
        f"stage 2: {', '.join(finalists)}; {counted(plan.seeds, 'seed')},"
        f" {plan.longer * plan.rounds} rounds"
    )
    curves = run_members(finalists, range(plan.seeds), _below(out / "stage-2"), runner=runner)
    name, held_out = _held_out(curves)
    held = Contest(
        dataset, plan, choices, finalists, curves, constants, held_out, name,
        left_out, {}, {}, "", visits_per_example(finalists[UNTOUCHED], experiment),
    )  # fmt: skip
    chosen = judge(held).recommended
    if chosen not in choices:
        return held
    periods = _other_periods(finalists[chosen], curves[chosen], plan, out, runner, say)
    private, note = _under_privacy(
        held, chosen, first[chosen], grids[chosen], out, epsilon, runner, say
    )
    return replace(held, periods=periods, private=private, private_note=note)


def _below(out: Path) -> Callable[[str], Path]:
    """The folders of contenders below `out`, by their names."""
    return lambda name: out / folder_name(name)


def _kept_plan(out: Path) -> AdvicePlan | None:
    """The plan of an earlier call for this folder, or None."""
    kept = read_json(out / "plan.json") or {}
    try:
        plan = AdvicePlan(**kept)
    except TypeError:
        return None
    return plan if all(type(n) is int and n >= 1 for n in asdict(plan).values()) else None


def without_a_model(experiment: Experiment) -> dict[str, float]:
    """The reward of a random action, and of the one action that is best to take always: exact.

    Over candidates there is a random one of those shown, and no item that is always there.
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
    # Of a large client only some examples count.
    share = np.repeat(np.minimum(sizes, most or sizes) / np.maximum(sizes, 1), sizes)
    rows = np.arange(split.offsets[first], split.num_examples)
    listed = split.candidates
    total = np.zeros(work.num_actions if listed is None else 1)
    for stage, length in zip(stages, lengths, strict=True):
        rewards = expected_rewards(split, stage.environment, work.num_actions, stage.from_round)
        for start in range(0, len(rows), _ROWS):
            block = slice(start, start + _ROWS)
            found = rewards(rows[block])
            if listed is not None:
                bounds = listed.take(rows[block]).offsets
                found = (over_actions(found, bounds) / np.diff(bounds))[:, None]
            total += length / sum(lengths) * (share[block] @ found)
    mean = total / share.sum()
    if listed is not None:
        return {"random": float(mean[0])}
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


def _held_out(curves: Mapping[str, Curves]) -> tuple[str, dict[str, dict[int, float]]]:
    """The first held-out metric of the last models: its name, and a value for each seed."""
    found: dict[str, dict[int, float]] = {}
    name = ""
    for label, member in curves.items():
        last = [lines[-1] for lines in member.metrics()]
        known = [key for line in last for key in line if key.startswith("test_")]
        if known and all(line.get(known[0]) is not None for line in last):
            name = known[0]
            values = [float(line[name]) for line in last]
            found[label] = dict(zip(member.seeds, values, strict=True))
    return name, found


def _other_periods(
    config: Config,
    usual: Curves,
    plan: AdvicePlan,
    out: Path,
    runner: Runner,
    say: Callable[[str], None],
) -> dict[int, Curves]:
    """The recommended contender at other deployment periods, and at its own."""
    every = config.deploy_every
    others = sorted({max(1, round(every * factor)) for factor in _PERIODS} - {every})
    say(f"deploying every {' and '.join(map(str, others))} rounds instead of {every}")
    members = {str(n): config.with_values({"deploy_every": n}) for n in others}
    found = run_members(members, range(plan.seeds), _below(out / "periods"), runner=runner)
    return {every: usual, **{int(name): curves for name, curves in found.items()}}


def _under_privacy(
    held: Contest,
    name: str,
    config: Config,
    grid: Mapping[str, Sequence[Any]],
    out: Path,
    epsilon: float | None,
    runner: Runner,
    say: Callable[[str], None],
) -> tuple[dict[float, Curves], str]:
    """The recommended contender with noise for the epsilon asked for, tuned with as many tries.

    Its clip norm is the median update without noise.
    """
    if epsilon is None:
        return {}, ""
    runs = held.curves[name].metrics()
    norms = [n for lines in runs for line in lines if (n := line["client_norm_median"])]
    settings: dict[str, Any] = {
        "clipping.norm": float(f"{np.median(norms):.2g}") if norms else 1.0,
        "privacy.mechanism": "dp-fedavg",
        "privacy.epsilon": epsilon,
        "privacy.sampling": "poisson",
        "privacy.delta": min(1e-3, 1 / (10 * held.dataset.train.num_clients)),
    }
    if config.scenario != "scratch":
        settings["privacy.pretraining"] = "public"
    say(f"{name} with epsilon {epsilon:g}")
    label, plan = f"epsilon-{epsilon:g}", held.plan
    try:
        member = config.with_values(settings)
        build_experiment(plan.second(member), held.dataset)
        search = Search(_below(out / "stage-1"), runner, say, plan.tries, _EXTEND)
        choice = best_points({label: member}, {label: grid}, search)[label]
        member = plan.second(member).with_values(choice.point)
        seeds, place = range(plan.seeds), _below(out / "private")
        curves = run_members({label: member}, seeds, place, runner=runner)[label]
    except ConfigError as error:
        return {}, f"epsilon {epsilon:g} cannot be had here: {error}"
    note = (
        f"delta {settings['privacy.delta']:.1g}, clip norm {settings['clipping.norm']:g} (the median"
        " update, seen without noise), rates of its own"
    )
    if config.scenario != "scratch":
        note += "; the pre-training clients count as public"
    return {epsilon: curves}, note
