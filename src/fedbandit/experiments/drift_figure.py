"""The gallery's figure of drift, ours and not the paper's: its runs lie beside the others, and are gone on with."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from fedbandit.data import open_dataset
from fedbandit.errors import ConfigError
from fedbandit.experiments.catalogue import EMBEDDED
from fedbandit.experiments.comparison import compare
from fedbandit.experiments.drift import HEADING, LEGEND, DriftStudy, Outcome, draw, members, outcome_of
from fedbandit.experiments.figures import Made, Request, runs_folder
from fedbandit.experiments.folder import read_metrics
from fedbandit.experiments.many import Ended
from fedbandit.files import write_json

TITLE = "labels trade places half-way; how far policies fall, how soon they recover"


def make_drift_figure(request: Request, out: Path, say: Callable[[str], None] = print) -> Made:
    """Run what is missing, draw it with the change marked, and tell each policy's fall and recovery.

    Always at the published rates; a search of rates for a world that is about to change would be another study.
    """
    dataset = open_dataset(request.data or EMBEDDED["so"])
    study = scaled_study(request)
    configs = members(study, dataset)
    place = runs_folder(out, dataset, request) / "drift"

    def folder(policy: str, seed: int) -> Path:
        return place / policy / f"seed-{seed}"

    def progress(policy: str, seed: int, ended: Ended) -> None:
        say(f"  {policy}, seed {seed}: {ended.message or ended.status} ({ended.seconds:.0f} s)")

    say(f"drift: {TITLE}")
    curves = compare(configs, range(request.seeds), folder, runner=request.runner, on_end=progress)
    outcomes = [
        outcome_of(study, policy, np.array([_rewards(folder(policy, seed)) for seed in member.seeds]))
        for policy, member in curves.items()
        if member.seeds
    ]
    if not outcomes:
        raise ConfigError("drift: every run diverged")
    note = _note(study, dataset.header.name, request)
    png, svg = (draw(study, outcomes, out / f"drift{end}", f"drift: {TITLE}", note) for end in (".png", ".svg"))
    lines = [HEADING, *(line for outcome in outcomes for line in outcome.lines(study.window)), LEGEND]
    lost = {policy: len(member.diverged) for policy, member in curves.items() if member.diverged}
    lines += [f"{policy}: {count} of {request.seeds} seeds diverged" for policy, count in lost.items()]
    _keep(out / "drift.json", note, outcomes)
    return Made("drift", TITLE, note, f"drift: {TITLE}\n{note}\n\n" + "\n".join(lines), png, svg)


def scaled_study(request: Request) -> DriftStudy:
    """The study at the length asked for, with rounds enough on both sides of the change to read a mean off."""
    whole = DriftStudy()
    rounds = max(4 * whole.window, round(whole.rounds * request.scale))
    source = request.data or EMBEDDED["so"]
    return DriftStudy(
        rounds=rounds,
        at=(rounds // 2,),
        deploy_every=max(1, round(whole.deploy_every * request.scale)),
        seeds=request.seeds,
        settings=tuple({"data.source": source, **request.settings}.items()),
    )


def _note(study: DriftStudy, data: str, request: Request) -> str:
    parts = [f"data: {data}", f"{study.rounds} rounds, deploying every {study.deploy_every}"]
    if request.scale != 1:
        parts.append(f"shortened to {request.scale:g}")
    parts.append(f"{study.clients_per_round} clients a round, at most {study.max_examples} examples each")
    if request.settings:
        parts.append("reduced: " + ", ".join(f"{key}={value}" for key, value in request.settings.items()))
    parts.append(f"{request.seeds} seed{'s' if request.seeds > 1 else ''}")
    return "; ".join([*parts, "published rates", "ours, not the paper's"])


def _rewards(folder: Path) -> list[float]:
    return [np.nan if line["reward"] is None else line["reward"] for line in read_metrics(folder)]


def _keep(path: Path, note: str, outcomes: Sequence[Outcome]) -> None:
    kept = {
        "figure": "drift",
        "title": TITLE,
        "note": note,
        "members": {o.policy: [[asdict(change) for change in seed] for seed in o.recovered] for o in outcomes},
    }
    write_json(path, kept)
