"""The gallery's figure of drift, ours and not the paper's: its runs lie beside the others, and are gone on with."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from fedbandit.data import open_dataset
from fedbandit.experiments.comparison import telling
from fedbandit.experiments.drift import DriftStudy, Outcome, draw, play, table
from fedbandit.experiments.figures import Made, Request, describe, runs_folder
from fedbandit.files import write_json

TITLE = "labels trade places half-way; how far policies fall, how soon they recover"


def make_drift_figure(request: Request, out: Path, say: Callable[[str], None] = print) -> Made:
    """Run what is missing, draw it with the change marked, and tell each policy's fall and recovery.

    Always at the published rates; a search of rates for a world that is about to change would be another study.
    """
    study = scaled_study(request)
    dataset = open_dataset(study.data)
    place = runs_folder(out, dataset, request) / "drift"
    say(f"drift: {TITLE}")
    outcomes = play(
        study, lambda policy, seed: place / policy / f"seed-{seed}", runner=request.runner, on_end=telling(say)
    )
    clients = f"{study.clients_per_round} clients a round, at most {study.max_examples} examples each"
    ours = (clients, "published rates", "ours, not the paper's")
    note = describe(dataset, study.rounds, study.deploy_every, request, *ours)
    png, svg = (draw(study, outcomes, out / f"drift{end}", f"drift: {TITLE}", note) for end in (".png", ".svg"))
    _keep(out / "drift.json", note, outcomes)
    return Made("drift", TITLE, note, f"drift: {TITLE}\n{note}\n\n{table(study, outcomes)}", png, svg)


def scaled_study(request: Request) -> DriftStudy:
    """The study at the length asked for, with rounds enough on both sides of the change to read a mean off."""
    whole = DriftStudy()
    rounds = max(4 * whole.window, round(whole.rounds * request.scale))
    return DriftStudy(
        data=request.data or whole.data,
        rounds=rounds,
        at=(rounds // 2,),
        deploy_every=max(1, round(whole.deploy_every * request.scale)),
        seeds=request.seeds,
        settings=tuple(request.settings.items()),
    )


def _keep(path: Path, note: str, outcomes: Sequence[Outcome]) -> None:
    kept = {
        "figure": "drift",
        "title": TITLE,
        "note": note,
        "members": {o.policy: [[asdict(change) for change in seed] for seed in o.recovered] for o in outcomes},
        "diverged": {o.policy: list(o.diverged) for o in outcomes if o.diverged},
    }
    write_json(path, kept)
