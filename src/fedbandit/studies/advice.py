"""`fedbandit advise`: a tournament of exploration rules on a user's own data, and what it says in words."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.config import Config
from fedbandit.core.errors import ConfigError
from fedbandit.core.files import read_json, read_lines, write_json
from fedbandit.data import FederatedDataset, open_dataset
from fedbandit.data.info import describe
from fedbandit.presets import preset
from fedbandit.runs.folder import read_metrics
from fedbandit.runs.local_runner import HERE, Job, LocalRunner, Runner
from fedbandit.studies.comparison import Curves, compare, paired_difference, standard_error, with_error
from fedbandit.studies.search import (
    FACTOR,
    RATES,
    TUNING_SEED,
    Search,
    best_point,
    cost,
    effort,
    points,
    scaled,
    search_steps,
    values_of,
)

EXPLORERS = ("softmax", "falcon", "epsilon-greedy")
POLICIES = (*EXPLORERS, "greedy")
_PERIODS = (0.2, 2.0)  # other deployment periods to try, relative to the usual one
_SEEDS = (2, 5)  # the fewest and the most that are reported
_SHORTEST = 0.02  # of the paper's length; below it a tournament says nothing


@dataclass(frozen=True)
class Tournament:
    """All runs of the tournament, from which the recommendation is written."""

    dataset: FederatedDataset
    scale: float
    minutes: float
    tries: Mapping[str, int]  # pairs of learning rates that each policy got
    configs: Mapping[str, Config]  # each policy at its best rates
    curves: Mapping[str, Curves]
    chosen: str
    periods: Mapping[int, Curves]  # of the chosen policy, by deployment period
    private: Mapping[float, Curves]  # of the chosen policy, by epsilon
    private_note: str
    folder: Path


def base_configs(dataset: FederatedDataset, source: str, scenario: str) -> dict[str, Config]:
    """Where each policy starts: the paper's values for the nearer of its two kinds of data, fitted to this one."""
    header = dataset.header
    image = header.kind == "dense" and len(header.shape) == 2
    family = "emnist" if image else "so"
    setting = scenario if scenario in ("scratch", "init", "init-shift") else "init-shift"
    clients = dataset.train.num_clients
    initial = 0 if scenario == "scratch" else min(100, clients // 4)
    cohort = min(64, clients - initial, initial or clients)
    if cohort < 1:
        raise ConfigError(f"--data: {clients} clients are too few for a tournament")
    fitted: dict[str, Any] = {"data.source": source, "scenario": scenario, "clients_per_round": cohort}
    if initial:
        fitted["pretraining.clients"] = initial
    if not image:
        fitted["model.name"] = "linear"
    names = [*POLICIES, *(["baseline"] if setting != "scratch" else [])]
    return {name: preset(f"{family}-{setting}-{name}").with_values(fitted) for name in names}


def hold(
    source: str,
    minutes: float,
    out: Path,
    *,
    scenario: str = "init-shift",
    epsilon: float | None = 8.0,
    runner: Runner = HERE,
    say: Callable[[str], None] = print,
) -> Tournament:
    """Run the tournament within about `minutes`, or resume it."""
    if epsilon is not None and not epsilon > 0:
        raise ConfigError(f"--epsilon: should be above 0, or 0 to leave privacy out; not {epsilon:g}")
    started = time.monotonic()
    ends = started + 60 * minutes
    dataset = open_dataset(source)
    bases = base_configs(dataset, source, scenario)
    grid = _coarse_rates("emnist" if bases["softmax"].model.name == "cnn" else "so")
    tries = len(points(grid)) + 1
    private = epsilon is not None
    if (out / "tournament.json").exists():
        say(f"resuming the tournament in {out} with its original plan; for another budget use another folder")
    scale = _decided(out, "scale", lambda: _fitting_scale(bases["softmax"], out, 60 * minutes, tries, private, say))
    bases = {name: scaled(config, scale) for name, config in bases.items()}
    configs = {}
    for number, name in enumerate(POLICIES):
        share = (started + 0.45 * 60 * minutes - time.monotonic()) / (len(POLICIES) - number)
        search = Search(out / "rates" / name, time.monotonic() + max(share, 5.0), runner, say)
        configs[name] = bases[name].with_values(best_point(name, bases[name], grid, search))
    if "baseline" in bases:
        configs["baseline"] = bases["baseline"]
    left = ends - time.monotonic()
    seeds = range(int(_decided(out, "seeds", lambda: _affordable_seeds(configs["softmax"], out, left, private))))
    say(f"all policies at their best rates, {len(seeds)} seeds")
    curves = compare(configs, seeds, lambda name, seed: out / "runs" / name / f"seed-{seed}", runner=runner)
    chosen = choose(curves)
    periods = _other_periods(configs[chosen], chosen, seeds, out, runner, say)
    usual = configs[chosen].deploy_every
    by_epsilon, note = _under_privacy(configs[chosen], seeds, out, epsilon, dataset, runner, say)
    return Tournament(
        dataset=dataset,
        scale=scale,
        minutes=(time.monotonic() - started) / 60,
        tries={name: looked for name, (looked, _) in effort({n: n for n in POLICIES}, out / "rates").items()},
        configs=configs,
        curves=curves,
        chosen=chosen,
        periods={usual: curves[chosen], **periods},
        private=by_epsilon,
        private_note=note,
        folder=out,
    )


def choose(curves: Mapping[str, Curves]) -> str:
    """The policy with the highest mean; softmax if it is not clearly worse, since it has a single parameter."""
    entrants = {name: c for name, c in curves.items() if name in POLICIES and len(c.final)}
    if not entrants:
        raise ConfigError("--data: every policy diverged at every rate that was tried")
    best = max(entrants, key=lambda name: entrants[name].final.mean())
    if best in EXPLORERS and "softmax" in entrants:
        difference, error = paired_difference(entrants[best], entrants["softmax"])
        return "softmax" if not difference > 2 * error else best
    return best


def _coarse_rates(family: str) -> dict[str, list[float]]:
    """One rate a decade of the appendix's grids."""
    return {key: values_of(key, values)[::3] for key, values in RATES[family].items()}


def _rounds_of_everything(steps: list[int], tries: int, seeds: int, private: bool) -> int:
    members = len(POLICIES) + 1 + len(_PERIODS) + private
    return len(POLICIES) * cost(tries, steps, FACTOR) + members * seeds * steps[-1]


def _fitting_scale(
    config: Config, out: Path, seconds: float, tries: int, private: bool, say: Callable[[str], None]
) -> float:
    """How much the paper's length has to be shortened for the whole tournament to fit."""
    rounds = 30
    probe = config.with_values({"rounds": rounds, "seed": TUNING_SEED})
    LocalRunner(1).run([Job(probe, out / "probe")])
    seconds_a_round = _pace(out / "probe")
    scale = 1.0
    while _rounds_of_everything(search_steps(scaled(config, scale)), tries, 3, private) * seconds_a_round > seconds:
        scale *= 0.9
        if scale < _SHORTEST:
            least = math.ceil(_least_minutes(config, tries, seconds_a_round))
            raise ConfigError(f"--budget: a tournament on this data needs at least {least} minutes here")
    say(f"{seconds_a_round * 1000:.0f} ms a round; running {scale:.2g} of the paper's length")
    return scale


def _least_minutes(config: Config, tries: int, seconds_a_round: float) -> float:
    shortest = search_steps(scaled(config, _SHORTEST))
    return _rounds_of_everything(shortest, tries, 3, True) * seconds_a_round / 60 + 1


def _decided(out: Path, name: str, decide: Callable[[], float]) -> float:
    """What an earlier call for this folder has decided, or a decision now, kept for the next call.

    How long runs are and how many depends on the time there is; a tournament that is resumed has to stay the same.
    """
    kept = read_json(out / "tournament.json") or {}
    if not isinstance(kept.get(name), int | float):
        kept[name] = decide()
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "tournament.json", kept)
    decided: float = kept[name]
    return decided


def _pace(folder: Path) -> float:
    """The median seconds per round of a run with some rounds."""
    seconds = [line["seconds"] for line in read_lines(folder / "timings.jsonl")]
    return float(np.median(seconds)) if seconds else 0.0


def _affordable_seeds(config: Config, out: Path, seconds: float, private: bool) -> int:
    seconds_a_round = _pace(out / "probe") if (out / "probe").exists() else 0.0
    members = len(POLICIES) + 1 + len(_PERIODS) + private
    one = members * config.rounds * seconds_a_round
    return int(min(_SEEDS[1], max(_SEEDS[0], seconds // one))) if one > 0 else _SEEDS[1]


def _other_periods(
    config: Config, name: str, seeds: range, out: Path, runner: Runner, say: Callable[[str], None]
) -> dict[int, Curves]:
    periods = sorted({max(1, round(config.deploy_every * factor)) for factor in _PERIODS} - {config.deploy_every})
    say(f"{name}, deploying every {' and '.join(map(str, periods))} rounds instead of {config.deploy_every}")
    members = {str(every): config.with_values({"deploy_every": every}) for every in periods}
    curves = compare(members, seeds, lambda every, seed: out / "periods" / every / f"seed-{seed}", runner=runner)
    return {int(every): c for every, c in curves.items()}


def _under_privacy(
    config: Config,
    seeds: range,
    out: Path,
    epsilon: float | None,
    dataset: FederatedDataset,
    runner: Runner,
    say: Callable[[str], None],
) -> tuple[dict[float, Curves], str]:
    """The chosen policy with noise for the epsilon asked for; its clip norm is the median update without noise."""
    if epsilon is None:
        return {}, ""
    runs = [read_metrics(out / "runs" / config.policy.name / f"seed-{seed}") for seed in seeds]
    norms = [line["client_norm_median"] for lines in runs for line in lines if line["client_norm_median"]]
    settings: dict[str, Any] = {
        "clipping.norm": float(f"{np.median(norms):.2g}"),
        "privacy.mechanism": "dp-fedavg",
        "privacy.epsilon": epsilon,
        "privacy.sampling": "poisson",
        "privacy.delta": min(1e-3, 1 / (10 * dataset.train.num_clients)),
    }
    if config.scenario != "scratch":
        settings["privacy.pretraining"] = "public"
    say(f"{config.policy.name} with epsilon {epsilon:g}")
    try:
        member = {f"epsilon-{epsilon:g}": config.with_values(settings)}
        curves = compare(member, seeds, lambda label, seed: out / "private" / label / f"seed-{seed}", runner=runner)
    except ConfigError as error:
        return {}, f"epsilon {epsilon:g} cannot be had here: {error}"
    note = (
        f"delta {settings['privacy.delta']:.1g}, clip norm {settings['clipping.norm']:g} (the median update, seen"
        " without noise), rates as without privacy"
    )
    if config.scenario != "scratch":
        note += "; the pre-training clients count as public"
    return {epsilon: next(iter(curves.values()))}, note


_SURE = 2.0  # standard errors


def recommendation(held: Tournament) -> str:
    """The recommendation as Markdown."""
    config = held.configs[held.chosen]
    rates = (
        f"client learning rate {config.client.learning_rate:g}, server learning rate {config.server.learning_rate:g}"
    )
    exploration = " ".join(f"{key} {value:g}" for key, value in config.policy.parameters.items())
    lines = [
        f"# Advice for {held.dataset.header.name}",
        "",
        f"- **Is exploration worth it here?** {_worth(held.curves)}",
        f"- **Which rule?** {_rule(held)}",
        f"- **Which parameters?** {exploration + ', ' if exploration else ''}{rates}, server optimiser"
        f" {config.server.optimizer}.",
        f"- **How often to deploy?** {_deploying(held.periods)}",
        f"- **What does privacy cost?** {_privacy(held)}",
        f"- **How sure is this?** {_sureness(held)}",
        "",
        "## Evidence",
        "",
        f"Scenario `{config.scenario}`, {config.rounds} rounds of {config.clients_per_round} clients, deploying every"
        f" {config.deploy_every}; running average reward, mean ± standard error over seeds.",
        "",
        _table("policy", held.curves),
        "",
        _table("deploying every", {f"{every} rounds": curves for every, curves in sorted(held.periods.items())}),
        "",
        "```",
        describe(held.dataset),
        "```",
        "",
    ]
    return "\n".join(lines)


def _worth(curves: Mapping[str, Curves]) -> str:
    explorers = {name: curves[name] for name in EXPLORERS if len(curves[name].final)}
    if not explorers or not len(curves["greedy"].final):
        return "Cannot be said: the runs that would show it diverged."
    best = max(explorers, key=lambda name: explorers[name].final.mean())
    difference, error = paired_difference(curves[best], curves["greedy"])
    size = with_error(f"{abs(difference):.4f}", error)
    amount = f"{best} ends {size} {'above' if difference > 0 else 'below'} greedy"
    if difference > _SURE * error:
        return f"Yes: {amount}."
    if difference < -_SURE * error:
        return f"No: {amount}."
    return f"Not clearly: {amount}."


def _rule(held: Tournament) -> str:
    chosen = held.curves[held.chosen]
    others = {n: c for n, c in held.curves.items() if n not in (held.chosen, "baseline") and len(c.final)}
    text = f"**{held.chosen}**, {with_error(f'{chosen.final.mean():.4f}', standard_error(chosen.final))}."
    parts = []
    for name, curves in sorted(others.items(), key=lambda item: -item[1].final.mean()):
        difference, error = paired_difference(chosen, curves)
        clear = "" if abs(difference) > _SURE * error else ", not clear"
        size = with_error(f"{'-' if difference > 0 else '+'}{abs(difference):.4f}", error)
        parts.append(f"{name} {size}{clear}")
    return f"{text} The others, against it: {'; '.join(parts)}." if parts else text


def _deploying(periods: Mapping[int, Curves]) -> str:
    ended = {every: curves for every, curves in sorted(periods.items()) if len(curves.final)}
    best = max(ended, key=lambda every: ended[every].final.mean())
    longest = best
    for every, curves in ended.items():
        difference, error = paired_difference(ended[best], curves)
        if every > longest and not difference > _SURE * error:
            longest = every
    rewards = ", ".join(f"{curves.final.mean():.4f} every {every} rounds" for every, curves in ended.items())
    if longest != best:
        return f"Every {longest} rounds is enough; more often gains nothing that could be measured ({rewards})."
    return f"Every {best} rounds is best of those tried ({rewards})."


def _privacy(held: Tournament) -> str:
    if not held.private:
        return held.private_note or "Not asked for."
    parts = []
    for epsilon, curves in held.private.items():
        if not len(curves.final):
            parts.append(f"epsilon {epsilon:g}: every run diverged")
            continue
        difference, error = paired_difference(curves, held.curves[held.chosen])
        share = 100 * difference / held.curves[held.chosen].final.mean()
        parts.append(f"epsilon {epsilon:g}: {with_error(f'{difference:+.4f}', error)} ({share:+.1f}%)")
    return (
        f"{'; '.join(parts)} of reward ({held.private_note}). With few clients noise weighs heavily; with ten times the"
        " clients a round it would weigh a tenth. Looking at the data for this advice has itself spent privacy that no"
        " epsilon counts."
    )


def _sureness(held: Tournament) -> str:
    seeds = len(held.curves[held.chosen].seeds)
    shortened = (
        f"The runs are shortened to {held.scale:.2g} of the paper's length, which favours little exploration and high"
        " rates; a longer budget brings the truth nearer. "
        if held.scale < 1
        else ""
    )
    tried = ", ".join(f"{name} {count}" for name, count in held.tries.items())
    return (
        f"{seeds} seeds each; differences are paired by seed, and one within two standard errors counts as not clear."
        f" Pairs of learning rates that were tried, on a seed of their own: {tried}. Exploration parameters are the"
        f" paper's, not tuned here. {shortened}"
        f"Took {held.minutes:.1f} minutes; everything is in {held.folder}."
    )


def _table(first: str, curves: Mapping[str, Curves]) -> str:
    rows = [f"| {first} | reward | ± s.e. | seeds | diverged |", "| --- | ---: | ---: | ---: | ---: |"]
    for label, member in curves.items():
        final = member.final
        numbers = f"{final.mean():.4f} | {_error(final)}" if len(final) else "– | –"
        rows.append(f"| {label} | {numbers} | {len(member.seeds)} | {len(member.diverged)} |")
    return "\n".join(rows)


def _error(final: np.ndarray) -> str:
    return f"{standard_error(final):.4f}" if len(final) > 1 else "–"
