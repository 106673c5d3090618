"""Runs as curves for a page: mean and band over seeds, thinned to what a screen can show."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedbandit.experiments.plots import styles_of

_POINTS = 400  # more than a chart has room for

Columns = Mapping[str, np.ndarray]  # values by name, one a round


def columns_of(metrics: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """The numbers of a run's rounds by name; nan where a round has none."""

    def column(value: Callable[[Mapping[str, Any]], Any]) -> np.ndarray:
        return np.array([np.nan if value(line) is None else value(line) for line in metrics], float)

    def worst(line: Mapping[str, Any]) -> Any:
        return (line.get("client_reward") or {}).get("worst_decile")

    return {
        "running_reward": column(lambda line: line.get("running_reward")),
        "propensity": column(lambda line: line.get("propensity")),
        "epsilon": column(lambda line: line.get("epsilon")),
        "worst_decile": _running_mean(column(worst)),
        **{name: column(lambda line, name=name: line.get(name)) for name in _held_out(metrics)},  # type: ignore[misc]
    }


def chart(
    title: str, name: str, groups: Mapping[str, Sequence[Columns]], deploy_every: int | None = None
) -> dict[str, Any] | None:
    """One chart of a column, a curve per group of seeds; None if no run has it."""
    curves, styles = [], styles_of(list(groups))
    for label, runs in groups.items():
        values = [run[name] for run in runs if name in run and np.isfinite(run[name]).any()]
        if values:
            curves.append(_curve(label, *styles[label], values))
    if not curves:
        return None
    longest = max(int(curve["x"][-1]) for curve in curves)
    marks = list(range(deploy_every, longest, deploy_every)) if deploy_every and longest / deploy_every <= 60 else []
    return {"title": title, "series": curves, "marks": marks}


def _curve(label: str, colour: str, dashed: bool, values: Sequence[np.ndarray]) -> dict[str, Any]:
    """The mean over seeds, as far as all of them have come, ± one standard deviation."""
    length = min(len(run) for run in values)
    stacked = np.stack([run[:length] for run in values])
    rounds = np.flatnonzero(np.isfinite(stacked).all(axis=0))
    if len(rounds) > _POINTS:
        rounds = np.unique(np.concatenate([rounds[np.linspace(0, len(rounds) - 1, _POINTS).astype(int)], rounds[-1:]]))
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
    return [float(f"{value:.6g}") for value in values]


def _running_mean(values: np.ndarray) -> np.ndarray:
    known = np.isfinite(values)
    return np.cumsum(np.where(known, values, 0)) / np.maximum(np.cumsum(known), 1)


def _held_out(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for line in metrics for name in line if name.startswith("test_")))
