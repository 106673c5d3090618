"""A figure of the paper: run what is missing, draw it, and hold it against what the paper says.

Every claim in the paper's words is judged by seeds: `agrees` or `disagrees` beyond two standard
errors, else `not clear`. The numbers behind a picture lie beside it as JSON.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbandit.assembly.experiment import build_experiment
from fedbandit.assembly.parts import pretraining_cohort
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError
from fedbandit.core.files import read_json, write_json, write_text
from fedbandit.data import FederatedDataset, open_dataset
from fedbandit.federated.round import Phase
from fedbandit.paper.catalogue import (
    EMBEDDED,
    RULES,
    Above,
    Alike,
    Claim,
    Family,
    Figure,
    GrowsSurer,
    MattersMore,
    Member,
    NearBest,
    Steady,
    figure,
    labels_of,
)
from fedbandit.paper.page import page, read_figures
from fedbandit.results.differences import Difference, from_zero, standard_error, with_error
from fedbandit.results.plots import draw_curves
from fedbandit.runs.local_runner import HERE, Runner
from fedbandit.studies.compare import Curves, read_curves, run_members, table, telling
from fedbandit.studies.search import effort, effort_in_words, scaled, tune

Verdict = Literal["agrees", "disagrees", "not clear"]


@dataclass(frozen=True)
class FigureVerdict:
    """A claim of the paper and what came out here: a difference of final rewards, with its standard
    error.
    """

    claim: str
    words: str
    difference: float
    error: float
    verdict: Verdict


def judge(claim: Claim, curves: Mapping[str, Curves]) -> FigureVerdict:
    """Whether the seeds bear a claim out; differences within two standard errors decide nothing.

    `curves` has the members that the claim speaks of, those of other figures among them. A claim of
    likeness allows five percent of the larger reward.
    """
    match claim:
        case Above():
            text = f"{claim.higher} above {claim.lower}"
            return _positive(text, claim.words, curves[claim.higher].minus(curves[claim.lower]))
        case Alike():
            pair = curves[claim.one], curves[claim.other]
            allowed = _ALIKE * max(
                (member.final.mean() for member in pair if len(member.final)), default=math.nan
            )
            text = f"{claim.one} about as {claim.other}"
            return _within(text, claim.words, pair[0].minus(pair[1]), -allowed, allowed)
        case NearBest():
            ended = [label for label in claim.others if len(curves[label].final)]
            best = max(
                ended, key=lambda label: float(curves[label].final.mean()), default=claim.others[0]
            )
            allowed = _ALIKE * float(curves[best].final.mean()) if ended else math.nan
            text = f"{claim.member} the best or close to {best}"
            found = curves[claim.member].minus(curves[best])
            return _within(text, claim.words, found, -allowed, math.inf)
        case Steady():
            final = curves[claim.member].final
            spread = float(final.std(ddof=1) / final.mean()) if len(final) > 1 else math.nan
            text = f"{claim.member}'s standard deviation over its mean, at most {_NEGLIGIBLE:g}"
            enough = len(final) > 2  # two trials may be alike by chance
            verdict: Verdict = "agrees" if spread <= _NEGLIGIBLE else "disagrees"
            verdict = verdict if enough else "not clear"
            return FigureVerdict(text, claim.words, spread, math.nan, verdict)
        case GrowsSurer():
            first, last = _parts(curves[claim.member].propensity, 10, (0, -1))
            text = f"{claim.member}: probability in the last tenth above the first"
            return _positive(text, claim.words, from_zero(last - first))
        case MattersMore():
            one, other = _paired(curves[claim.noisy], curves[claim.plain])
            early, late = _parts(np.abs(one - other), 2, (0, 1))
            difference = early - late if claim.half == "first" else late - early
            text = f"{claim.noisy} against {claim.plain}: probability moved more in the {claim.half} half"
            return _positive(text, claim.words, from_zero(difference))


def _positive(text: str, words: str, found: Difference) -> FigureVerdict:
    """Whether a difference lies above zero, two standard errors at least; no difference at all
    decides nothing.
    """
    verdict: Verdict = "agrees" if found.mean > 0 else "disagrees"
    sure = abs(found.mean) > _SURE * found.error
    return FigureVerdict(text, words, found.mean, found.error, verdict if sure else "not clear")


def _within(text: str, words: str, found: Difference, low: float, high: float) -> FigureVerdict:
    """Whether a difference lies between these ends, two standard errors either way."""
    slack = _SURE * found.error if math.isfinite(found.error) else math.inf
    verdict: Verdict = "not clear"
    if low <= found.mean - slack and found.mean + slack <= high:
        verdict = "agrees"
    elif found.mean + slack < low or found.mean - slack > high:
        verdict = "disagrees"
    return FigureVerdict(text, words, found.mean, found.error, verdict)


def _parts(
    curves: np.ndarray, number: int, which: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Means over two of `number` equal parts of the rounds: [seeds] each."""
    parts = np.array_split(np.nan_to_num(curves), min(number, max(1, curves.shape[1])), axis=1)
    first, second = (parts[i].mean(axis=1) if curves.size else np.zeros(0) for i in which)
    return first, second


def _paired(one: Curves, other: Curves) -> tuple[np.ndarray, np.ndarray]:
    """The probabilities of the chosen action, for the seeds that both have."""
    shared = [seed for seed in one.seeds if seed in other.seeds]
    first, second = (c.propensity[[c.seeds.index(seed) for seed in shared]] for c in (one, other))
    return first, second


def epsilons_in_words(epsilons: Mapping[str, float | None], stated: Mapping[str, float]) -> str:
    """The epsilon of each private member, beside what the paper states for its own population."""
    lines = ["epsilon (RDP) of the released weights, for the clients of this data set:"]
    for label, epsilon in epsilons.items():
        there = (
            f"; the paper states {stated[label]:g} for its 342,477 users" if label in stated else ""
        )
        lines.append(f"  {label}: {'none' if epsilon is None else f'{epsilon:.4g}'}{there}")
    return "\n".join(lines)


def beside_the_paper(
    figure: Figure, curves: Mapping[str, Curves], judged: Sequence[FigureVerdict]
) -> str:
    """The table of final rewards, the paper's stated numbers where it states any, and the verdicts
    on its claims.
    """
    lines = [table(curves, "member")]
    if figure.stated:
        lines.append("\nstated in the paper's text (its data, tuned rates):")
        for label, value in figure.stated.items():
            ours = curves[label].final
            lines.append(
                f"  {label}: {value:.2f} there, {ours.mean():.4f} here"
                if len(ours)
                else f"  {label}: -"
            )
    if judged:
        width = max(len(verdict.claim) for verdict in judged)
        lines.append("\nthe paper's claims (difference ± standard error over seeds, paired):")
        lines += [
            f"  {v.claim:<{width}}  {with_error(f'{v.difference:+8.4f}', v.error)}  {v.verdict:<9}  ({v.words})"
            for v in judged
        ]
    return "\n".join(lines)


@dataclass(frozen=True)
class FigureRequest:
    """A request for a figure: on which data, over how many seeds, how much shortened, tuned or
    published.
    """

    data: str | None = None  # None: the embedded data set of the figure's family
    seeds: int = 5
    scale: float = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    tune_minutes: float | None = None
    runner: Runner = HERE

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ConfigError(f"--seeds: should be at least 1, not {self.seeds}")
        if not 0 < self.scale <= 1:
            raise ConfigError(f"--scale: should be above 0 and at most 1, not {self.scale:g}")
        for key, instead in (("seed", "use --seeds"), ("data.source", "use --data")):
            if key in self.settings:
                raise ConfigError(f"--set {key}: set by the figure; {instead}")
        if self.tune_minutes is not None and not self.tune_minutes > 0:
            raise ConfigError(f"--budget: should be above 0 minutes, not {self.tune_minutes:g}")


@dataclass(frozen=True)
class Made:
    """A figure that was made: what it says in words, its picture (an SVG lies beside it) and its
    numbers.
    """

    name: str
    text: str
    png: Path
    kept: Path


def make_figure(
    name: str, request: FigureRequest, out: Path, say: Callable[[str], None] = print
) -> Made:
    """Run what the figure needs and is not there yet, then draw it into `out` as PNG, SVG and JSON.

    Runs lie below `out/runs`, in a folder named after everything that the members share, so that
    figures with the same members share their runs. With `tune_minutes` rates are searched first, on
    a seed that no run of the figure has.
    """
    wanted, dataset = _choose(name, request)
    model = request.settings.get("model.name")
    if model is not None:  # another curve altogether, so the picture says it first
        wanted = replace(wanted, title=f"{wanted.title}, {model} model")
    members = {
        label: scaled(
            member.config().with_values({"data.source": _source(wanted, request)}), request.scale
        )
        for label, member in wanted.members.items()
    }
    members = {label: config.with_values(request.settings) for label, config in members.items()}
    keys = {label: member.key for label, member in wanted.members.items()}
    place = runs_folder(out, dataset, request)
    published = members
    if request.tune_minutes is not None:
        by_key = {keys[label]: config for label, config in members.items()}
        tuned = tune(
            by_key,
            wanted.family,
            place / "tuning",
            request.tune_minutes,
            runner=request.runner,
            say=say,
        )
        members = {label: tuned[keys[label]] for label in members}

    def folder(label: str, seed: int) -> Path:
        kind = "published" if members[label] == published[label] else "tuned"
        return place / kind / keys[label] / f"seed-{seed}"

    say(f"{wanted.name}: {wanted.title}")
    curves = run_members(
        members, range(request.seeds), folder, runner=request.runner, on_end=telling(say)
    )
    rates = "tuned here" if request.tune_minutes is not None else "published rates"
    config = next(iter(members.values()))
    told = regime(dataset, config)
    note = describe(dataset, config.rounds, config.deploy_every, request, rates, told.in_words())
    stem = out / (
        wanted.name if wanted.family == figure(name).family else f"{wanted.name}-{wanted.family}"
    )
    stem = stem.with_name(stem.name + ("-tuned" if request.tune_minutes is not None else ""))
    _, png = (
        _draw(wanted, members, curves, stem.with_suffix(suffix), note)
        for suffix in (".svg", ".png")
    )
    kind = "published" if request.tune_minutes is None else "tuned"
    known = {**curves, **_finished(wanted.beside, place / kind, request.seeds)}
    claims = [claim for claim in wanted.claims if all(label in known for label in labels_of(claim))]
    verdicts = [judge(claim, known) for claim in claims]
    text = f"{wanted.name}: {wanted.title}\n{note}\n\n{beside_the_paper(wanted, curves, verdicts)}"
    if len(claims) < len(wanted.claims):
        text += f"\n\nthe paper sets it beside {wanted.beside_figure}; make that too, and then this one again"
    epsilons = {label: _epsilon(folder(label, 0)) for label in members}
    if any(epsilon is not None for epsilon in epsilons.values()):
        text += f"\n\n{epsilons_in_words(epsilons, wanted.stated_epsilon)}"
    efforts = effort(keys, place / "tuning") if request.tune_minutes is not None else {}
    if efforts:
        text += f"\n\n{effort_in_words(efforts)}"
    found = _found(wanted, members, curves, efforts, verdicts)
    facts = {
        "data": dataset.header.name,
        "model": model,
        "regime": asdict(told),
        "setting": _setting(wanted),
    }
    facts["scale"] = request.scale
    kept = stem.with_suffix(".json")
    write_json(
        kept,
        {
            "figure": wanted.name,
            "title": wanted.title,
            "note": note,
            **facts,
            **found,
            "text": text,
        },
    )
    return Made(wanted.name, text, png, kept)


def make_figures(
    names: Sequence[str], request: FigureRequest, out: Path, say: Callable[[str], None] = print
) -> tuple[list[Made], Path | None]:
    """Make figures one after another, and of several a page beside them: its path, None for a
    single figure.

    Of several, those that the given data does not fit take embedded data.
    """
    if len(names) == 1:
        return [make_figure(names[0], request, out, say)], None
    made = [make_figure(name, _fitting(name, request), out, say) for name in names]
    index = out / "index.html"
    write_text(index, page(read_figures([one.kept for one in made]), index.parent))
    return made, index


def _fitting(name: str, request: FigureRequest) -> FigureRequest:
    if request.data is None or name.startswith("ablation-"):
        return request
    sparse = open_dataset(request.data).header.kind == "sparse"
    return request if (figure(name).family == "so") == sparse else replace(request, data=None)


def describe(
    dataset: FederatedDataset, rounds: int, deploy_every: int, request: FigureRequest, *more: str
) -> str:
    """Caption facts: data, length, seeds, and more."""
    who = f"{dataset.train.num_clients:,} clients"
    parts = [
        f"data: {dataset.header.name}, {who}",
        f"{rounds} rounds, deploying every {deploy_every}",
    ]
    if request.scale != 1:
        parts.append(f"shortened to {request.scale:g}")
    if request.settings:
        parts.append(
            "changed: " + ", ".join(f"{key}={value}" for key, value in request.settings.items())
        )
    parts.append(f"{request.seeds} seed{'s' if request.seeds > 1 else ''}")
    return "; ".join([*parts, *more])


@dataclass(frozen=True)
class Regime:
    """Exposure of a run to its data.

    The same picture means something else where every client comes back often.
    """

    visits_per_client: float  # how often a client of the bandit phase is drawn, on average
    examples_per_visit: float
    passes: float  # events over the examples there are
    pretraining_examples: int  # counted each time they are used; 0 without pre-training

    def in_words(self) -> str:
        """The numbers in a line, for the note below a picture."""
        visits, passes = (
            f"{n:.2g}" if n < 10 else f"{n:.0f}" for n in (self.visits_per_client, self.passes)
        )
        seen = f"{visits} visits a client, {self.examples_per_visit:.0f} examples a visit"
        first = (
            f", {self.pretraining_examples:,} examples in pre-training"
            if self.pretraining_examples
            else ""
        )
        return f"{seen}, {passes} passes over the data{first}"


def regime(dataset: FederatedDataset, config: Config) -> Regime:
    """The regime of a configuration on a data set, on average over the draws of clients."""
    experiment = build_experiment(config, dataset)
    pool, plan = _pool(experiment.bandit), experiment.bandit.work.plan
    events = plan.event_counts(dataset.train, pool)
    visits = config.rounds * config.clients_per_round / len(pool)
    passes = visits * events.sum() / max(1, dataset.train.sizes()[pool].sum())
    supervised, first = experiment.pretraining, config.pretraining
    used = 0.0
    if supervised is not None:
        initial = supervised.work.plan.event_counts(dataset.train, _pool(supervised))
        used = first.rounds * pretraining_cohort(config) * float(initial.mean())
    return Regime(visits, float(events.mean()), float(passes), round(used))


def _pool(phase: Phase) -> np.ndarray:
    return np.asarray(phase.cohorts.pool)


def _choose(name: str, request: FigureRequest) -> tuple[Figure, FederatedDataset]:
    """The figure, in the family that the data belongs to where it exists for both."""
    family: Family | None = None
    if request.data is not None:
        family = "so" if open_dataset(request.data).header.kind == "sparse" else "emnist"
    wanted = figure(name, family)
    dataset = open_dataset(_source(wanted, request))
    if family is not None and wanted.family != family:
        raise ConfigError(
            f"--data: {request.data} holds {dataset.header.kind} contexts, and {name} is a figure on"
            f" {'images' if wanted.family == 'emnist' else 'text'}"
        )
    return wanted, dataset


def _source(wanted: Figure, request: FigureRequest) -> str:
    return request.data if request.data is not None else EMBEDDED[wanted.family]


def runs_folder(out: Path, dataset: FederatedDataset, request: FigureRequest) -> Path:
    """A folder named after everything that all members of a figure share, so that no run is taken
    for another.
    """
    settings = json.dumps(dict(request.settings), sort_keys=True)
    mark = f"-{hashlib.sha256(settings.encode()).hexdigest()[:6]}" if request.settings else ""
    return (
        out
        / "runs"
        / f"{dataset.header.name}-{dataset.header.fingerprint[:6]}-scale{request.scale:g}{mark}"
    )


def _finished(members: Mapping[str, Member], folder: Path, seeds: int) -> dict[str, Curves]:
    """The runs of another figure, of those members that have run with all seeds."""
    found = {}
    for label, member in members.items():
        runs = [folder / member.key / f"seed-{seed}" for seed in range(seeds)]
        if all((run / "summary.json").exists() for run in runs):
            found[label] = read_curves(runs)
    return found


def _epsilon(run: Path) -> float | None:
    """The epsilon that a private run has spent, by the accountant that the paper uses; None for any
    other.
    """
    summary = read_json(run / "summary.json") or {}
    return (summary.get("privacy") or {}).get("epsilon_rdp")


def _draw(
    wanted: Figure,
    members: Mapping[str, Config],
    curves: Mapping[str, Curves],
    path: Path,
    note: str,
) -> Path:
    config = next(iter(members.values()))
    shown = {_with_losses(label, c): c for label, c in curves.items() if len(c.final)}
    values = {
        label: c.propensity if wanted.shows == "propensity" else c.running_reward
        for label, c in shown.items()
    }
    return draw_curves(
        values,
        path,
        title=f"{wanted.name}: {wanted.title}",
        ylabel=wanted.y_axis,
        deploy_every=config.deploy_every,
        note=note,
        trials=wanted.shows == "trials",
    )


def _with_losses(label: str, curves: Curves) -> str:
    """A curve over the seeds that survived must not look like one over all."""
    tried = len(curves.seeds) + len(curves.diverged)
    return (
        f"{label}, {len(curves.diverged)} of {tried} seeds diverged" if curves.diverged else label
    )


def _setting(wanted: Figure) -> str | None:
    """The setting in which the four rules are compared, for figures that compare them."""
    return wanted.title if len(RULES & wanted.members.keys()) == len(RULES) else None


def _found(
    wanted: Figure,
    members: Mapping[str, Config],
    curves: Mapping[str, Curves],
    efforts: Mapping[str, tuple[int, int]],
    verdicts: Sequence[FigureVerdict],
) -> dict[str, Any]:
    """The numbers behind the picture, for tables elsewhere."""
    return {
        "members": {
            label: {
                "mean": float(c.final.mean()) if len(c.final) else None,
                "standard_error": standard_error(c.final) if len(c.final) > 1 else None,
                "final": c.final.tolist(),
                "seeds": list(c.seeds),
                "diverged": list(c.diverged),
                "paper": wanted.stated.get(label),
                "server.learning_rate": members[label].server.learning_rate,
                "client.learning_rate": members[label].client.learning_rate,
                **{
                    f"policy.{key}": value
                    for key, value in members[label].policy.parameters.items()
                },
            }
            for label, c in curves.items()
        },
        "tuning": {
            label: {"looked_at": seen, "grid_points": total}
            for label, (seen, total) in efforts.items()
        },
        "claims": [asdict(verdict) for verdict in verdicts],
    }


_SURE = 2.0  # standard errors
_ALIKE = 0.05  # what "nearly identical" and "close to" allow, relative to the larger reward
_NEGLIGIBLE = 0.02  # of the mean: what a spread over trials may be
