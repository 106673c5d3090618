"""A figure of the paper: run what is missing, draw it, and hold it against what the paper says.

The numbers behind a picture lie beside it as JSON; `records` reads and judges them.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.assembly.experiment import build_experiment
from fedbandit.assembly.parts import pretraining_cohort
from fedbandit.config import Config
from fedbandit.core.errors import refuse
from fedbandit.core.files import read_json, write_json, write_text
from fedbandit.data import FederatedDataset, open_dataset
from fedbandit.federated.round import Phase
from fedbandit.paper.catalogue import EMBEDDED, Family, Figure, figure
from fedbandit.paper.records import RULES, FigureRecord, page, read_figures
from fedbandit.results.differences import standard_error
from fedbandit.results.plots import draw_curves
from fedbandit.runs.local_runner import HERE, Runner
from fedbandit.studies.compare import Curves, run_members
from fedbandit.studies.search import Choice, scaled, tune


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
        """Refuse what cannot be run, before anything is."""
        minutes = 1.0 if self.tune_minutes is None else self.tune_minutes
        refuse(
            (self.seeds < 1, f"--seeds: should be at least 1, not {self.seeds}"),
            (
                not 0 < self.scale <= 1,
                f"--scale: should be above 0 and at most 1, not {self.scale:g}",
            ),
            ("seed" in self.settings, "--set seed: set by the figure; use --seeds"),
            ("data.source" in self.settings, "--set data.source: set by the figure; use --data"),
            (not minutes > 0, f"--budget: should be above 0 minutes, not {minutes:g}"),
        )


def make_figure(
    name: str, request: FigureRequest, out: Path, say: Callable[[str], None] = print
) -> FigureRecord:
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
    choices, tuned = dict[str, Choice](), request.tune_minutes is not None
    if request.tune_minutes is not None:
        by_key = {keys[label]: config for label, config in members.items()}
        choices = tune(
            by_key, wanted.family, place / "tuning", request.tune_minutes, request.runner, say
        )
    published, own = members, {label: choices.get(keys[label]) for label in members}
    members = {
        label: config.with_values(one.point if (one := own[label]) else {})
        for label, config in members.items()
    }

    def folder(label: str) -> Path:
        """Where a member's seeds lie: runs at published rates serve tuned figures, too."""
        kind = "published" if members[label] == published[label] else "tuned"
        return place / kind / keys[label]

    say(f"{wanted.name}: {wanted.title}")
    curves = run_members(members, range(request.seeds), folder, runner=request.runner, say=say)
    config = next(iter(members.values()))
    rates = "tuned here" if tuned else "published rates"
    if wanted.family == "emnist" and config.scenario != "scratch":
        rates += " (those of pre-training are ours)"
    told = regime(dataset, config)
    note = describe(dataset, config.rounds, config.deploy_every, request, rates, told.in_words())
    family = "" if wanted.family == figure(name).family else f"-{wanted.family}"
    stem = out / f"{wanted.name}{family}{'-tuned' if tuned else ''}"
    for suffix in (".svg", ".png"):
        _draw(wanted, members, curves, stem.with_suffix(suffix), note)
    epsilons = {label: _epsilon(folder(label) / "seed-0") for label in members}
    kept = stem.with_suffix(".json")
    write_json(
        kept,
        {
            "figure": wanted.name,
            "title": wanted.title,
            "note": note,
            "data": dataset.header.name,
            "model": model,
            "regime": asdict(told),
            "setting": wanted.title if {*RULES} <= wanted.members.keys() else None,
            "scale": request.scale,
            "members": {
                label: _found(wanted, label, members[label], c) for label, c in curves.items()
            },
            "tuning": {
                label: {"looked_at": one.looked_at, "grid_points": one.grid_points}
                for label, one in own.items()
                if one is not None
            },
            "epsilons": epsilons if any(epsilons.values()) else {},
        },
    )
    [record] = [one for one in read_figures([out]) if one.path == kept]
    return record


def make_figures(
    names: Sequence[str], request: FigureRequest, out: Path, say: Callable[[str], None] = print
) -> tuple[list[FigureRecord], Path | None]:
    """Make figures one after another, and of several a page beside them: its path, None for one.

    Of several, those that the given data does not fit take embedded data.
    """
    if len(names) == 1:
        return [make_figure(names[0], request, out, say)], None
    made = [make_figure(name, fitting(name, request), out, say) for name in names]
    index = out / "index.html"
    write_text(index, page(read_figures([one.path for one in made]), index.parent))
    return made, index


def fitting(name: str, request: FigureRequest) -> FigureRequest:
    """The request, with embedded data where the given data does not fit the figure."""
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
    """The clients that a phase draws its cohorts from: int64 [clients]."""
    return np.asarray(phase.cohorts.pool)


def _choose(name: str, request: FigureRequest) -> tuple[Figure, FederatedDataset]:
    """The figure, in the family that the data belongs to where it exists for both."""
    family: Family | None = None
    if request.data is not None:
        family = "so" if open_dataset(request.data).header.kind == "sparse" else "emnist"
    wanted = figure(name, family)
    dataset = open_dataset(_source(wanted, request))
    refuse(
        (
            family is not None and wanted.family != family,
            f"--data: {request.data} holds {dataset.header.kind} contexts, and {name} is a figure on"
            f" {'images' if wanted.family == 'emnist' else 'text'}",
        )
    )
    return wanted, dataset


def _source(wanted: Figure, request: FigureRequest) -> str:
    """The data asked for, or the embedded set that stands in for the paper's."""
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


def _found(wanted: Figure, label: str, config: Config, curves: Curves) -> dict[str, Any]:
    """The numbers behind a curve of the picture, from which verdicts and tables are made."""
    final = curves.final
    return {
        "mean": float(final.mean()) if len(final) else None,
        "standard_error": standard_error(final) if len(final) > 1 else None,
        "final": final.tolist(),
        "seeds": list(curves.seeds),
        "diverged": list(curves.diverged),
        "propensity_by_period": _by_period(curves, config.deploy_every, wanted),
        "paper": wanted.stated.get(label),
        "server.learning_rate": config.server.learning_rate,
        "client.learning_rate": config.client.learning_rate,
        **{f"policy.{key}": value for key, value in config.policy.parameters.items()},
    }


def _by_period(curves: Curves, deploy_every: int, wanted: Figure) -> list[list[float]] | None:
    """The mean probability of the chosen action in each whole deployment period: [seeds, periods]."""
    if wanted.shows != "propensity":
        return None
    seeds, rounds = curves.propensity.shape
    whole = curves.propensity[:, : rounds - rounds % deploy_every]
    by_period = whole.reshape(seeds, -1, deploy_every).mean(axis=2)
    return [[round(value, 6) for value in row] for row in by_period.tolist()]
