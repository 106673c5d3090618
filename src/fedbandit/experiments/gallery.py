"""Several figures and a page to look at them: an index.html and the pictures, labelled with data and scale."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from fedbandit.data import open_dataset
from fedbandit.experiments.catalogue import EMBEDDED, Figure, figure
from fedbandit.experiments.figures import Made, Request, make_figure
from fedbandit.simulation.state import write_atomically


@dataclass(frozen=True)
class Gallery:
    """What was made; a single figure has no index."""

    figures: list[Made]
    index: Path | None


def make_gallery(
    names: Sequence[str], request: Request, out: Path, say: Callable[[str], None] = print, *, drift: bool = False
) -> Gallery:
    """Make the figures one after another; of several, those that the given data does not fit take embedded data."""
    if len(names) == 1:
        return Gallery([make_figure(names[0], request, out, say)], None)
    made = [make_figure(name, _fitting(name, request), out, say) for name in names]
    if drift:
        made.append(_drift(request, out, say))
    index = out / "index.html"
    write_atomically(index, lambda file: file.write(page(made).encode()))
    return Gallery(made, index)


def page(made: Sequence[Made]) -> str:
    """The gallery's page; needs nothing but the pictures beside it."""
    items = "\n".join(_item(one) for one in made)
    return _PAGE.replace("ITEMS", items)


def _drift(request: Request, out: Path, say: Callable[[str], None]) -> Made:
    """A figure of ours beside the paper's: what a change of the world does to each policy."""
    from fedbandit.experiments.drift import HEADING, DriftStudy, draw, play

    source = request.data or EMBEDDED["so"]
    dataset = open_dataset(source)
    whole = DriftStudy()
    rounds = max(4 * whole.window, round(whole.rounds * request.scale))
    settings = tuple({"data.source": source, **request.settings}.items())
    study = DriftStudy(rounds=rounds, at=(rounds // 2,), seeds=request.seeds, settings=settings)
    title = "labels trade places half-way (ours, not the paper's)"
    say(f"drift: {title}")
    outcomes = play(study, dataset)
    note = f"data: {dataset.header.name}; {rounds} rounds, deploying every {study.deploy_every}; {request.seeds} seeds"
    png, svg = (draw(study, outcomes, out / f"drift{suffix}", f"drift: {title}") for suffix in (".png", ".svg"))
    lines = [HEADING, *(line for outcome in outcomes for line in outcome.lines(study.window))]
    return Made(Figure("drift", title, "so", {}), note, "\n".join(lines), png, svg)


def _fitting(name: str, request: Request) -> Request:
    if request.data is None:
        return request
    sparse = open_dataset(request.data).header.kind == "sparse"
    if name.startswith("ablation-") or (figure(name).family == "so") == sparse:
        return request
    return Request(None, request.seeds, request.scale, request.settings, request.tune_minutes, request.workers)


def _item(one: Made) -> str:
    name, title = escape(one.figure.name), escape(one.figure.title)
    return (
        f'<section id="{name}"><h2>{name}: {title}</h2><p>{escape(one.note)}</p>'
        f'<a href="{escape(one.svg.name)}"><img src="{escape(one.png.name)}" alt="{name}: {title}; numbers below"></a>'
        f"<details><summary>Numbers, beside the paper's</summary><pre>{escape(one.text)}</pre></details></section>"
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
<body><h1>Figures of the paper, made here</h1><main>
ITEMS
</main></body></html>
"""
