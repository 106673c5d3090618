"""Drawing what the benchmark measured: contestants side by side, and how a round's cost grows."""

from pathlib import Path
from typing import Any

OURS = "fedbandit, bandit round"
_INK, _SOFT = "#1f4e79", "#b8c4d0"


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write `comparison.png` and `growth.png` into the folder."""
    import matplotlib

    matplotlib.use("Agg")
    return [
        _comparison(result, folder / "comparison.png"),
        _growth(result["growth"], folder / "growth.png"),
    ]


def _comparison(result: dict[str, Any], path: Path) -> Path:
    from matplotlib import pyplot

    tables = result.get("tables", {})
    figure, axes = pyplot.subplots(
        1, 3 if tables else 2, figsize=(19 if tables else 13, 5.5), layout="constrained"
    )
    titles = {"E": "E: FedAvg CNN on images", "S": "S: linear model on text"}
    for axis, (workload, title) in zip(axes[:2], titles.items(), strict=True):
        rows = {name: row for name, row in result[workload]["rows"].items() if "error" not in row}
        base = rows[OURS]["wall"]
        names = list(reversed(rows))
        ratios = [rows[name]["wall"] / base for name in names]
        _bars(axis, title, dict(zip(names, ratios, strict=True)))
    if tables:
        rows = {
            f"{who}, {name}": row[who] / row["fedbandit"]
            for name, row in tables.items()
            for who in row
        }
        _bars(axes[2], "tables, one core, CPU time", dict(reversed(rows.items())))
    figure.supxlabel(
        "time of a round (E and S: wall); a bandit round of fedbandit = 1", fontsize=10
    )
    figure.suptitle("A bandit round acts, trains, clips, aggregates and steps", fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _bars(axis: Any, title: str, ratios: dict[str, float]) -> None:
    colours = [_INK if name.startswith("fedbandit") else _SOFT for name in ratios]
    bars = axis.barh(list(ratios), list(ratios.values()), color=colours)
    axis.bar_label(
        bars,
        [f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}" for ratio in ratios.values()],
        padding=3,
    )
    if max(ratios.values()) > 20:
        axis.set_xscale("log")
    axis.margins(x=0.15)
    axis.set_title(title)
    axis.spines[["top", "right"]].set_visible(False)


def _growth(curves: dict[str, list[dict[str, float]]], path: Path) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(curves), figsize=(2.9 * len(curves), 3.4), sharey=True, layout="constrained"
    )
    for axis, (name, points) in zip(axes, curves.items(), strict=True):
        values = [point["value"] for point in points]
        # More threads do the same work in less time: there wall time is what changes.
        measure = "wall" if name == "threads" else "cpu"
        costs = [1e3 * point[measure] for point in points]
        axis.loglog(
            values, costs, "o-", color=_INK, label=f"{'wall' if measure == 'wall' else 'CPU'} time"
        )
        if name != "threads":
            proportional = [costs[-1] * value / values[-1] for value in values]
            axis.loglog(values, proportional, ":", color="grey", label="in proportion")
        axis.legend(frameon=False, fontsize=8)
        axis.set_xticks(values, [f"{value:,}" for value in values], fontsize=7)
        axis.set_xlabel(name)
        axis.minorticks_off()
        axis.grid(axis="y", color="#eeeeee")
        axis.spines[["top", "right"]].set_visible(False)
    every = [
        1e3 * point[key]
        for points in curves.values()
        for point in points
        for key in ("cpu", "wall")
    ]
    ticks = [tick for power in range(5) for tick in (10**power, 3 * 10**power)]
    shown = [tick for tick in ticks if min(every) / 4 <= tick <= max(every) * 4]
    axes[0].set_yticks(shown, [f"{tick:,}" for tick in shown], fontsize=8)
    axes[0].set_ylim(min(every) / 2, max(every) * 2)
    axes[0].set_ylabel("milliseconds a round")
    figure.suptitle(
        "Whole bandit rounds of fedbandit on text: workload S, one thing varied at a time",
        fontsize=10,
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
