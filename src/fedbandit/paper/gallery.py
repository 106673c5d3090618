"""All figures on one page, with the drift figure that the paper does not have."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path

from fedbandit.core.errors import ConfigError
from fedbandit.core.files import write_json, write_text
from fedbandit.data import open_dataset
from fedbandit.paper.catalogue import figure
from fedbandit.paper.figures import FigureRequest, Made, describe, make_figure, runs_folder
from fedbandit.studies.comparison import telling
from fedbandit.studies.drift import DriftOutcome, DriftStudy, draw, run_study, table

TITLE = "labels trade places half-way; how far policies fall, how soon they recover"


def make_drift_figure(request: FigureRequest, out: Path, say: Callable[[str], None] = print) -> Made:
    """Run what is missing, draw it with the change marked, and tell each policy's fall and recovery.

    Always at the published rates; a search of rates for a world that is about to change would be another study.
    """
    study = scaled_study(request)
    dataset = open_dataset(study.data)
    place = runs_folder(out, dataset, request) / "drift"
    say(f"drift: {TITLE}")
    outcomes = run_study(
        study, lambda policy, seed: place / policy / f"seed-{seed}", runner=request.runner, on_end=telling(say)
    )
    clients = f"{study.clients_per_round} clients a round, at most {study.max_examples} examples each"
    ours = (clients, "published rates", "ours, not the paper's")
    note = describe(dataset, study.rounds, study.deploy_every, request, *ours)
    png, svg = (draw(study, outcomes, out / f"drift{end}", f"drift: {TITLE}", note) for end in (".png", ".svg"))
    _keep(out / "drift.json", note, outcomes)
    return Made("drift", TITLE, note, f"drift: {TITLE}\n{note}\n\n{table(study, outcomes)}", png, svg)


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


def _keep(path: Path, note: str, outcomes: Sequence[DriftOutcome]) -> None:
    kept = {
        "figure": "drift",
        "title": TITLE,
        "note": note,
        "members": {o.policy: [[asdict(change) for change in seed] for seed in o.recovered] for o in outcomes},
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
    write_text(index, page(made))
    return Gallery(made, index)


def page(made: Sequence[Made]) -> str:
    """The gallery's page; needs nothing but the pictures beside it."""
    items = "\n".join(_item(one) for one in made)
    return _PAGE.replace("ITEMS", items)


def _make(name: str, request: FigureRequest, out: Path, say: Callable[[str], None]) -> Made:
    return make_drift_figure(request, out, say) if name == "drift" else make_figure(name, request, out, say)


def _fitting(name: str, request: FigureRequest) -> FigureRequest:
    if request.data is None:
        return request
    sparse = open_dataset(request.data).header.kind == "sparse"
    if name == "drift" or name.startswith("ablation-") or (figure(name).family == "so") == sparse:
        return request
    return replace(request, data=None)


def _item(one: Made) -> str:
    name, title = escape(one.name), escape(one.title)
    return (
        f'<section id="{name}"><h2>{name}: {title}</h2><p>{escape(one.note)}</p>'
        f'<a href="{escape(one.svg.name)}"><img src="{escape(one.png.name)}" alt="{name}: {title}; numbers below"></a>'
        f"<details><summary>Numbers</summary><pre>{escape(one.text)}</pre></details></section>"
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>fedbandit: gallery</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; margin: 0 auto; max-width: 76rem; padding: 1rem; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); gap: 2rem; }
h2 { font-size: 1.1rem; margin: 0; } p { margin: .2rem 0 .6rem; color: #4a4a4a; font-size: .9rem; }
img { width: 100%; height: auto; } pre { overflow-x: auto; font-size: .8rem; background: #f5f5f5; padding: .6rem; }
</style></head>
<body><h1>Figures of the paper, and one of ours</h1><main>
ITEMS
</main></body></html>
"""
