"""Pictures of runs. The same policy has the same colour everywhere.

Colours are safe for the colour-blind (Okabe and Ito) and dark enough for thin lines on white.
"""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.core.errors import ConfigError, needing
from fedbandit.core.files import write_atomically

# Okabe and Ito's palette.
COLOURS = {
    "softmax": "#0072B2",
    "falcon": "#D55E00",
    "epsilon-greedy": "#009E73",
    "greedy": "#CC79A7",
    "baseline": "#595959",
}
# All have a contrast of 3:1 or more on white, as thin lines need, and differ to colour-blind eyes from those above too.
OTHER_COLOURS = ("#7700FF", "#662200", "#000000", "#8C6D31", "#330088")
_DASHED = ("baseline",)
MOST_CURVES = 8  # in one chart of a page
_POINTS = 400  # more than a chart of a page can show
_TITLE_WIDTH, _NOTE_WIDTH = 75, 105  # characters a line
_PICTURES = (".png", ".svg")


def require_picture(path: Path) -> None:
    """Refuse a name that no picture can be saved under; to be called before the work that the
    picture is to show.
    """
    if path.suffix.lower() not in _PICTURES:
        raise ConfigError(f"--out: {path} must end in {' or '.join(_PICTURES)}")


def policy_of(label: str) -> str | None:
    """The policy that a label names: the label itself, or one that starts or ends with it."""
    for name in sorted(COLOURS, key=len, reverse=True):  # "epsilon-greedy" before "greedy"
        if (
            label == name
            or label.endswith(f"-{name}")
            or label.startswith((f"{name} ", f"{name},"))
        ):
            return name
    return None


def styles_of(labels: Sequence[str]) -> dict[str, tuple[str, bool]]:
    """A colour for every label, and whether its line is dashed: the policy's own, and if several
    share it, others.

    The second curve of a policy is dashed in the policy's colour; further ones, and unknown labels,
    take what is left: all colours, where no label names a policy.
    """
    named = any(policy_of(label) is not None for label in labels)
    left = OTHER_COLOURS if named else (*COLOURS.values(), *OTHER_COLOURS)
    styles: dict[str, tuple[str, bool]] = {}
    seen: Counter[str] = Counter()
    others = 0
    for label in labels:
        policy = policy_of(label)
        if policy is not None and seen[policy] < (1 if policy in _DASHED else 2):
            styles[label] = (COLOURS[policy], policy in _DASHED or seen[policy] == 1)
            seen[policy] += 1
        else:
            styles[label] = (left[others % len(left)], (others // len(left)) % 2 == 1)
            others += 1
    return styles


def styles_of_best(ranked: Sequence[str]) -> dict[str, tuple[str, bool] | None]:
    """Styles of the first eight, which can be told apart; the others have none until one of those
    makes room.
    """
    return {**dict.fromkeys(ranked), **styles_of(ranked[:MOST_CURVES])}


def draw_curves(curves: Mapping[str, np.ndarray], path: Path, **shown: Any) -> Path:
    """A figure of curves (see `curves_figure`), saved by the path's suffix."""
    require_picture(path)
    return save_picture(curves_figure(curves, **shown), path)


def curves_figure(
    curves: Mapping[str, np.ndarray],
    *,
    title: str,
    ylabel: str = "running average reward",
    deploy_every: int | None = None,
    note: str = "",
    changes: Sequence[int] = (),
    trials: bool = False,
) -> Any:
    """A matplotlib figure with the mean and band (± one standard deviation over seeds) of curves
    [seeds, rounds].

    With `trials` every seed is a thin line in place of the band. Rounds before which the
    world changes are marked as `changes`. Rounds without a number are passed over.
    """
    figure = empty_figure(7.2, 4.5)
    axes = figure.add_subplot()
    rounds = max((np.atleast_2d(values).shape[1] for values in curves.values()), default=1)
    lines = deploy_every is not None and rounds // deploy_every <= 40
    if deploy_every is not None and lines:
        for deployed in range(deploy_every, rounds, deploy_every):
            axes.axvline(deployed, color="#d0d0d0", linewidth=0.7, zorder=0)
    styles = styles_of(list(curves))
    for label, values in curves.items():
        (_trials if trials else _band)(axes, label, np.atleast_2d(values), *styles[label])
    marks = [
        *(["grey lines: deployments"] if lines else []),
        *(["dashed: the world changes"] if changes else []),
    ]
    axes.set(xlabel=f"round ({', '.join(marks)})" if marks else "round", ylabel=ylabel)
    for change in changes:
        axes.axvline(change, color="#595959", linewidth=1, linestyle=(0, (4, 2)), zorder=1)
    write_heading(axes, title, note)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(1, max(rounds, 2))
    if curves:
        axes.legend(frameon=False)
    return figure


def empty_figure(width: float, height: float) -> Any:
    """A matplotlib figure of this size in inches, without global state and without a display."""
    with needing("a picture"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_points(
    axes: Any, points: Mapping[str, tuple[float, float, float]], colours: Mapping[str, str]
) -> None:
    """Points with intervals, one below the other by name; the first stands on top.

    `points` has (low, value, high) by name; what is not a number leaves its line empty.
    """
    upwards = list(points)[::-1]
    for place, name in enumerate(upwards):
        low, value, high = points[name]
        axes.plot([low, high], [place, place], color=colours[name], linewidth=1.5)
        axes.plot(value, place, "o", markersize=4, color=colours[name])
    axes.set_yticks(range(len(points)), upwards, fontsize=7)
    axes.set_ylim(-0.6, len(points) - 0.4)
    axes.tick_params(axis="x", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def save_picture(figure: Any, path: Path) -> Path:
    """Save a figure by the path's suffix, .png or .svg; the same figure is the same file."""
    from matplotlib import rc_context

    require_picture(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.suffix.lower().removeprefix(".")
    told = {"format": kind, "metadata": {"Date": None} if kind == "svg" else None}
    with rc_context({"svg.hashsalt": "fedbandit"}):
        write_atomically(path, lambda file: figure.savefig(file, dpi=150, **told))
    return path


def write_heading(axes: Any, title: str, note: str = "") -> None:
    """A title above the axes and a smaller note below it, both broken into lines that fit a figure
    7.2 inches wide.
    """
    wrapped = textwrap.fill(note, _NOTE_WIDTH)
    room = "\n" * (wrapped.count("\n") + 1 if note else 0)
    axes.set_title(textwrap.fill(title, _TITLE_WIDTH) + room, loc="left", fontsize=11)
    if note:
        axes.text(0, 1.02, wrapped, transform=axes.transAxes, fontsize=8, color="#595959")


def _band(axes: Any, label: str, values: np.ndarray, colour: str, dashed: bool) -> None:
    rounds = np.flatnonzero(~np.isnan(values).any(axis=0)) + 1
    values = values[:, rounds - 1]
    mean, spread = (
        values.mean(axis=0),
        values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1]),
    )
    style: dict[str, Any] = {
        "color": colour,
        "linewidth": 1.6,
        "dashes": (4, 2) if dashed else (None, None),
    }
    axes.plot(rounds, mean, label=label, marker="o" if len(rounds) == 1 else None, **style)
    if len(values) > 1:
        axes.fill_between(
            rounds, mean - spread, mean + spread, color=colour, alpha=0.18, linewidth=0
        )


def _trials(axes: Any, label: str, values: np.ndarray, colour: str, dashed: bool) -> None:
    rounds = np.arange(1, values.shape[1] + 1)
    for trial in values:
        axes.plot(rounds, trial, color=colour, linewidth=0.8, alpha=0.5)
    axes.plot(
        rounds,
        values.mean(axis=0),
        color=colour,
        linewidth=1.6,
        label=f"{label}: mean of {len(values)} trials",
    )


def chart(
    title: str,
    name: str,
    groups: Mapping[str, Sequence[Mapping[str, np.ndarray]]],
    deploy_every: int | None = None,
) -> dict[str, Any] | None:
    """One chart of a page as JSON: a curve of a column per group of seeds, in the order given.

    `groups` has the columns of each run, [rounds] each; None where no run has the column.
    """
    curves, styles = [], styles_of_best(list(groups))
    for label, runs in groups.items():
        values = [run[name] for run in runs if name in run and np.isfinite(run[name]).any()]
        if values:
            colour, dashed = styles[label] or (None, False)
            curves.append(_curve(label, colour, dashed, values))
    if not curves:
        return None
    longest = max(int(curve["x"][-1]) for curve in curves)
    marks = (
        list(range(deploy_every, longest, deploy_every))
        if deploy_every and longest / deploy_every <= 60
        else []
    )
    return {"title": title, "series": curves, "marks": marks}


def _curve(
    label: str, colour: str | None, dashed: bool, values: Sequence[np.ndarray]
) -> dict[str, Any]:
    """The mean over seeds ± one standard deviation, as far as all of them have come where they
    still run.
    """
    length = min(len(run) for run in values)
    stacked = np.stack([run[:length] for run in values])
    rounds = np.flatnonzero(np.isfinite(stacked).all(axis=0))
    if len(rounds) > _POINTS:
        rounds = np.unique(
            np.concatenate(
                [rounds[np.linspace(0, len(rounds) - 1, _POINTS).astype(int)], rounds[-1:]]
            )
        )
    shown = stacked[:, rounds]
    mean = shown.mean(axis=0)
    spread = shown.std(axis=0, ddof=1) if len(shown) > 1 else np.zeros_like(mean)
    return {
        "label": label,
        "colour": colour,
        "dashed": dashed,
        "x": (rounds + 1).tolist(),
        "mean": _rounded(mean),
        "low": _rounded(mean - spread),
        "high": _rounded(mean + spread),
    }


def _rounded(values: np.ndarray) -> list[float]:
    """Six digits each: more cannot be seen, and pages stay small."""
    return [float(f"{value:.6g}") for value in values]
