"""Grids of values to search: the paper's appendix A, and the short form `0.02..5` for {1, 2, 5} times powers of ten."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedbandit.config import Config
from fedbandit.errors import ConfigError

Grid = Mapping[str, Sequence[Any]]

_SHORT = re.compile(r"^\s*([0-9.eE+-]+?)\s*\.\.\s*([0-9.eE+-]+)\s*$")

# Appendix A.2. The server's grid is Adam's.
RATES: dict[str, Grid] = {
    "emnist": {"client.learning_rate": "0.01..0.5", "server.learning_rate": "0.0005..0.05"},
    "so": {"client.learning_rate": "0.02..5", "server.learning_rate": "0.0002..0.05"},
}
# The paper does not print one for SGD, whose steps are a hundred times smaller than Adam's at the same rate.
SGD_SERVER_RATES = "0.05..5"

# Appendix A.1; FALCON's mu is {0.01, 0.1, 1} K / 0.05, as the paper rounds it for its 62 and 50 actions.
_FALCON_MU = {"emnist": (12, 124, 1240), "so": (10, 100, 1000)}


def one_two_five(text: str) -> list[float]:
    """The values {1, 2, 5}·10^n from the first to the last: "0.02..0.5" is 0.02, 0.05, 0.1, 0.2, 0.5."""
    match = _SHORT.match(text)
    try:
        low, high = (float(end) for end in match.groups()) if match else (0.0, 0.0)
    except ValueError:
        low = high = 0.0
    if not 0 < low <= high < math.inf:
        raise ConfigError(f"{text!r}: expected two positive ends, smaller first, for example 0.02..5")
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    values = [float(f"{digit}e{decade}") for decade in decades for digit in (1, 2, 5)]
    inside = [value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
    if not inside:
        raise ConfigError(f"{text!r}: no value {{1, 2, 5}}·10^n lies between these ends")
    return inside


def appendix(family: str, config: Config) -> dict[str, list[Any]]:
    """The paper's grid for a configuration: learning rates, and the exploration parameters of its policy."""
    if family not in RATES:
        raise ConfigError(f"appendix: should be {' or '.join(RATES)}, not {family!r}")
    grid = {key: values_of(key, values) for key, values in RATES[family].items()}
    if config.server.optimizer == "sgd":
        grid["server.learning_rate"] = values_of("", SGD_SERVER_RATES)
    exploration: dict[str, Grid] = {
        "softmax": {"policy.beta": (0.02, 0.05, 0.1)},
        "epsilon-greedy": {"policy.epsilon": (0.05, 0.1)},
        "falcon": {"policy.mu": _FALCON_MU[family], "policy.gamma": (1000, 5000)},
    }
    return grid | {key: list(values) for key, values in exploration.get(config.policy.name, {}).items()}


def values_of(key: str, values: Any) -> list[Any]:
    """The values of one axis: a list, a single value, or the short form."""
    if isinstance(values, str) and ".." in values:
        return one_two_five(values)
    if isinstance(values, list | tuple):
        if not values:
            raise ConfigError(f"{key}: the grid has no values")
        return list(values)
    return [values]


def points(grid: Grid) -> list[dict[str, Any]]:
    """Every point of the product, the last axis changing fastest."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def on_edge(point: Mapping[str, Any], grid: Grid) -> list[str]:
    """The axes on which a point has the smallest or largest of three or more numbers: a better one may lie beyond."""
    edges = []
    for key, values in grid.items():
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        if len(numbers) >= 3 and point[key] in (min(numbers), max(numbers)):
            edges.append(key)
    return edges
