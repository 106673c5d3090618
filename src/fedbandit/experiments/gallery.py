"""Several figures and a page to look at them: an index.html and the pictures, labelled with data and scale."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from fedbandit.data import open_dataset
from fedbandit.errors import ConfigError
from fedbandit.experiments.catalogue import figure
from fedbandit.experiments.drift_figure import make_drift_figure
from fedbandit.experiments.figures import Made, Request, make_figure
from fedbandit.files import write_text


@dataclass(frozen=True)
class Gallery:
    """What was made; a single figure has no index."""

    figures: list[Made]
    index: Path | None


def make_gallery(names: Sequence[str], request: Request, out: Path, say: Callable[[str], None] = print) -> Gallery:
    """Make the figures one after another; of several, those that the given data does not fit take embedded data."""
    if list(names) == ["drift"] and request.tune_minutes is not None:
        raise ConfigError("--tune: drift is played at the published rates")
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


def _make(name: str, request: Request, out: Path, say: Callable[[str], None]) -> Made:
    return make_drift_figure(request, out, say) if name == "drift" else make_figure(name, request, out, say)


def _fitting(name: str, request: Request) -> Request:
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
