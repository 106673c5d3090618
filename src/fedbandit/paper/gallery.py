"""Several figures at once and the page about them, with the drift figure that the paper does not have."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fedbandit.core.errors import ConfigError
from fedbandit.core.files import write_json, write_text
from fedbandit.data import open_dataset
from fedbandit.paper.catalogue import figure
from fedbandit.paper.figures import FigureRequest, Made, describe, make_figure, runs_folder
from fedbandit.paper.page import page, read_figures
from fedbandit.studies.compare import telling
from fedbandit.studies.drift import DriftOutcome, DriftStudy, draw, run_study, table

TITLE = "labels trade places half-way; how far policies fall, how soon they recover"


def make_drift_figure(
    request: FigureRequest, out: Path, say: Callable[[str], None] = print
) -> Made:
    """Run what is missing, draw it with the change marked, and tell each policy's fall and recovery.

    Always at the published rates; a search of rates for a world that is about to change would be another study.
    """
    study = scaled_study(request)
    dataset = open_dataset(study.data)
    place = runs_folder(out, dataset, request) / "drift"
    say(f"drift: {TITLE}")
    outcomes = run_study(
        study,
        lambda policy, seed: place / policy / f"seed-{seed}",
        runner=request.runner,
        on_end=telling(say),
    )
    clients = (
        f"{study.clients_per_round} clients a round, at most {study.max_examples} examples each"
    )
    ours = (clients, "published rates", "ours, not the paper's")
    note = describe(dataset, study.rounds, study.deploy_every, request, *ours)
    png, _ = (
        draw(study, outcomes, out / f"drift{end}", f"drift: {TITLE}", note)
        for end in (".png", ".svg")
    )
    text = f"drift: {TITLE}\n{note}\n\n{table(study, outcomes)}"
    _keep(out / "drift.json", dataset.header.name, note, text, outcomes)
    return Made("drift", text, png, out / "drift.json")


def scaled_study(request: FigureRequest) -> DriftStudy:
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


def _keep(path: Path, data: str, note: str, text: str, outcomes: Sequence[DriftOutcome]) -> None:
    kept = {
        "figure": "drift",
        "title": TITLE,
        "note": note,
        "data": data,
        "text": text,
        "members": {
            o.policy: [[asdict(change) for change in seed] for seed in o.recovered]
            for o in outcomes
        },
        "diverged": {o.policy: list(o.diverged) for o in outcomes if o.diverged},
    }
    write_json(path, kept)


@dataclass(frozen=True)
class Gallery:
    """What was made; a single figure has no index."""

    figures: list[Made]
    index: Path | None


def make_gallery(
    names: Sequence[str], request: FigureRequest, out: Path, say: Callable[[str], None] = print
) -> Gallery:
    """Make the figures one after another; of several, those that the given data does not fit take embedded data."""
    if list(names) == ["drift"] and request.tune_minutes is not None:
        raise ConfigError("--tune: drift uses the published rates")
    if len(names) == 1:
        return Gallery([_make(names[0], request, out, say)], None)
    made = [_make(name, _fitting(name, request), out, say) for name in names]
    index = out / "index.html"
    write_text(index, page(read_figures([one.kept for one in made]), index.parent))
    return Gallery(made, index)


def _make(name: str, request: FigureRequest, out: Path, say: Callable[[str], None]) -> Made:
    return (
        make_drift_figure(request, out, say)
        if name == "drift"
        else make_figure(name, request, out, say)
    )


def _fitting(name: str, request: FigureRequest) -> FigureRequest:
    if request.data is None:
        return request
    sparse = open_dataset(request.data).header.kind == "sparse"
    if name == "drift" or name.startswith("ablation-") or (figure(name).family == "so") == sparse:
        return request
    return replace(request, data=None)
