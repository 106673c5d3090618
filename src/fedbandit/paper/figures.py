"""One figure of the paper: run what is missing, draw it, and hold it against what the paper says."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbandit.config import Config
from fedbandit.core.errors import ConfigError
from fedbandit.core.files import read_json, write_json
from fedbandit.data import FederatedDataset, open_dataset
from fedbandit.paper.catalogue import EMBEDDED, Above, Alike, Family, Figure, Member, figure
from fedbandit.results.plots import draw_curves
from fedbandit.runs.local_runner import HERE, Runner
from fedbandit.studies.comparison import (
    Curves,
    compare,
    paired_difference,
    read_curves,
    standard_error,
    table,
    telling,
    with_error,
)
from fedbandit.studies.search import effort, effort_in_words, scaled, tune


@dataclass(frozen=True)
class FigureVerdict:
    """A claim of the paper and what came out here: a difference of final rewards, with its standard error."""

    claim: str
    words: str
    difference: float
    error: float
    verdict: Literal["agrees", "disagrees", "not clear"]


def judge(claim: Above | Alike, curves: Mapping[str, Curves]) -> FigureVerdict:
    """Whether the seeds bear a claim out; differences within two standard errors decide nothing."""
    if isinstance(claim, Above):
        difference, error = paired_difference(curves[claim.higher], curves[claim.lower])
        text = f"{claim.higher} above {claim.lower}"
        sure = np.isfinite(error) and abs(difference) > _SURE * error
        verdict = ("agrees" if difference > 0 else "disagrees") if sure else "not clear"
    else:
        difference, error = paired_difference(curves[claim.one], curves[claim.other])
        text = f"{claim.one} about as {claim.other}"
        ends = [member.final.mean() for member in (curves[claim.one], curves[claim.other]) if len(member.final)]
        allowed = _ALIKE * max(ends, default=float("nan"))
        slack = _SURE * error if np.isfinite(error) else float("inf")
        verdict = "not clear"
        if abs(difference) + slack <= allowed:
            verdict = "agrees"
        elif abs(difference) - slack > allowed:
            verdict = "disagrees"
    return FigureVerdict(text, claim.words, difference, error, verdict)  # type: ignore[arg-type]


def improvement(label: str, often: Curves, seldom: Curves) -> FigureVerdict:
    """The paper says that every method ends higher where models are deployed more often."""
    found = judge(Above("often", "seldom", _OFTEN), {"often": often, "seldom": seldom})
    return replace(found, claim=f"{label} above {label} every 200 rounds")


def epsilons_in_words(epsilons: Mapping[str, float | None], stated: Mapping[str, float]) -> str:
    """What each private member has spent here, beside what the paper states for its own population."""
    lines = ["epsilon (RDP) of the released weights, for the clients of this data set:"]
    for label, epsilon in epsilons.items():
        there = f"; the paper states {stated[label]:g} for its 342,477 users" if label in stated else ""
        lines.append(f"  {label}: {'none' if epsilon is None else f'{epsilon:.4g}'}{there}")
    return "\n".join(lines)


def beside_the_paper(figure: Figure, curves: Mapping[str, Curves], judged: Sequence[FigureVerdict]) -> str:
    """The table of final rewards, the paper's stated numbers where it states any, and the verdicts on its claims."""
    lines = [table(curves, "member")]
    if figure.stated:
        lines.append("\nstated in the paper's text (its data, tuned rates):")
        for label, value in figure.stated.items():
            ours = curves[label].final
            lines.append(f"  {label}: {value:.2f} there, {ours.mean():.4f} here" if len(ours) else f"  {label}: -")
    if figure.shows == "trials":
        for label, member in curves.items():
            if len(member.final) > 1:
                spread = member.final.std(ddof=1) / member.final.mean()
                lines.append(f"\n{label}: the trials' standard deviation is {100 * spread:.2f}% of the final reward")
            else:
                lines.append(f"\n{label}: one trial has no standard deviation")
            lines.append('  the paper: "the variation in rewards across repeated trials is negligible"')
    if judged:
        width = max(len(verdict.claim) for verdict in judged)
        lines.append("\nthe paper's orderings (difference ± standard error over seeds, paired):")
        lines += [
            f"  {v.claim:<{width}}  {with_error(f'{v.difference:+8.4f}', v.error)}  {v.verdict:<9}  ({v.words})"
            for v in judged
        ]
    return "\n".join(lines)


@dataclass(frozen=True)
class FigureRequest:
    """How a figure is wanted: on which data, over how many seeds, how much shortened, tuned or as published."""

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
    """A figure that was made."""

    name: str
    title: str
    note: str
    text: str
    png: Path
    svg: Path


def make_figure(name: str, request: FigureRequest, out: Path, say: Callable[[str], None] = print) -> Made:
    """Run what the figure needs and is not there yet, then draw it into `out` as PNG, SVG and JSON."""
    wanted, dataset = _choose(name, request)
    members = {
        label: scaled(member.config().with_values({"data.source": _source(wanted, request)}), request.scale)
        for label, member in wanted.members.items()
    }
    members = {label: config.with_values(request.settings) for label, config in members.items()}
    keys = {label: member.key for label, member in wanted.members.items()}
    place = runs_folder(out, dataset, request)
    published = members
    if request.tune_minutes is not None:
        by_key = {keys[label]: config for label, config in members.items()}
        tuned = tune(by_key, wanted.family, place / "tuning", request.tune_minutes, runner=request.runner, say=say)
        members = {label: tuned[keys[label]] for label in members}

    def folder(label: str, seed: int) -> Path:
        kind = "published" if members[label] == published[label] else "tuned"
        return place / kind / keys[label] / f"seed-{seed}"

    say(f"{wanted.name}: {wanted.title}")
    curves = compare(members, range(request.seeds), folder, runner=request.runner, on_end=telling(say))
    rates = "tuned here" if request.tune_minutes is not None else "published rates"
    config = next(iter(members.values()))
    note = describe(dataset, config.rounds, config.deploy_every, request, rates)
    stem = out / (wanted.name if wanted.family == figure(name).family else f"{wanted.name}-{wanted.family}")
    stem = stem.with_name(stem.name + ("-tuned" if request.tune_minutes is not None else ""))
    png, svg = (_draw(wanted, members, curves, stem.with_suffix(suffix), note) for suffix in (".png", ".svg"))
    verdicts = [judge(claim, curves) for claim in wanted.claims]
    verdicts += [
        improvement(label, curves[label], earlier)
        for label, earlier in _finished(
            wanted.improves_on, place / ("published" if request.tune_minutes is None else "tuned"), request.seeds
        ).items()
    ]
    text = f"{wanted.name}: {wanted.title}\n{note}\n\n{beside_the_paper(wanted, curves, verdicts)}"
    if wanted.improves_on and not verdicts:
        text += f"\n\nthe paper sets it beside {wanted.name[:-1]}c; make that too, and then this one again"
    epsilons = {label: _epsilon(folder(label, 0)) for label in members}
    if any(epsilon is not None for epsilon in epsilons.values()):
        text += f"\n\n{epsilons_in_words(epsilons, wanted.stated_epsilon)}"
    efforts = effort(keys, place / "tuning") if request.tune_minutes is not None else {}
    if efforts:
        text += f"\n\n{effort_in_words(efforts)}"
    _keep(stem.with_suffix(".json"), wanted, note, members, curves, efforts, verdicts)
    return Made(wanted.name, wanted.title, note, text, png, svg)


def describe(dataset: FederatedDataset, rounds: int, deploy_every: int, request: FigureRequest, *more: str) -> str:
    """What a reader has to know to read the picture rightly: data, length, seeds, and whatever else there is."""
    parts = [f"data: {dataset.header.name}", f"{rounds} rounds, deploying every {deploy_every}"]
    if request.scale != 1:
        parts.append(f"shortened to {request.scale:g}")
    if request.settings:
        parts.append("reduced: " + ", ".join(f"{key}={value}" for key, value in request.settings.items()))
    parts.append(f"{request.seeds} seed{'s' if request.seeds > 1 else ''}")
    return "; ".join([*parts, *more])


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
    """A folder named after everything that all members of a figure share, so that no run is taken for another."""
    settings = json.dumps(dict(request.settings), sort_keys=True)
    mark = f"-{hashlib.sha256(settings.encode()).hexdigest()[:6]}" if request.settings else ""
    return out / "runs" / f"{dataset.header.name}-{dataset.header.fingerprint[:6]}-scale{request.scale:g}{mark}"


def _finished(members: Mapping[str, Member], folder: Path, seeds: int) -> dict[str, Curves]:
    """The runs of another figure, of those members that have run with all seeds."""
    found = {}
    for label, member in members.items():
        runs = [folder / member.key / f"seed-{seed}" for seed in range(seeds)]
        if all((run / "summary.json").exists() for run in runs):
            found[label] = read_curves(runs)
    return found


def _epsilon(run: Path) -> float | None:
    """What a private run has spent, by the accountant that the paper uses; None for any other."""
    summary = read_json(run / "summary.json") or {}
    return (summary.get("privacy") or {}).get("epsilon_rdp")


def _draw(wanted: Figure, members: Mapping[str, Config], curves: Mapping[str, Curves], path: Path, note: str) -> Path:
    config = next(iter(members.values()))
    shown = {_with_losses(label, c): c for label, c in curves.items() if len(c.final)}
    values = {label: c.propensity if wanted.shows == "propensity" else c.running_reward for label, c in shown.items()}
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
    return f"{label}, {len(curves.diverged)} of {tried} seeds diverged" if curves.diverged else label


def _keep(
    path: Path,
    wanted: Figure,
    note: str,
    members: Mapping[str, Config],
    curves: Mapping[str, Curves],
    efforts: Mapping[str, tuple[int, int]],
    verdicts: Sequence[FigureVerdict],
) -> None:
    """The numbers behind the picture, for tables elsewhere."""
    kept = {
        "figure": wanted.name,
        "title": wanted.title,
        "note": note,
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
                **{f"policy.{key}": value for key, value in members[label].policy.parameters.items()},
            }
            for label, c in curves.items()
        },
        "tuning": {label: {"looked_at": seen, "grid_points": total} for label, (seen, total) in efforts.items()},
        "claims": [asdict(verdict) for verdict in verdicts],
    }
    write_json(path, kept)


_SURE = 2.0  # standard errors
_OFTEN = "the absolute performance of all the methods improves"
_ALIKE = 0.05  # what "nearly identical" allows, relative to the larger reward
