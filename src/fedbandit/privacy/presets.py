"""Table 9 of the paper: softmax (β = 0.05) from scratch, without privacy and with a fixed clip norm and growing noise.

Values of configurations, by name. Sampling is Poisson with a mean of 64 clients, as the paper's accounting assumes.
"""

from typing import Any

_SCRATCH: dict[str, dict[str, Any]] = {
    "emnist": {
        "data": {"source": "glyphs"},
        "model": {"name": "cnn"},
        "rounds": 800,
        "max_examples": None,
        "norm": 0.1,
        "no-dp": (0.002, 0.1),  # table 1
    },
    "so": {
        "data": {"source": "topics"},
        "model": {"name": "linear"},
        "rounds": 1600,
        "max_examples": 256,
        "norm": 0.8,
        "no-dp": (0.01, 1.0),  # table 5
    },
}

# Noise multiplier -> (server learning rate, client learning rate).
_RATES: dict[str, dict[float, tuple[float, float]]] = {
    "emnist": {0: (0.002, 0.2), 0.01: (0.002, 0.1), 0.1: (0.002, 0.2)},
    "so": {0: (0.02, 0.5), 0.3: (0.01, 2.0), 0.7: (0.01, 2.0)},
}


def _values(data: str, noise: float | None) -> dict[str, Any]:
    base = _SCRATCH[data]
    server, client = base["no-dp"] if noise is None else _RATES[data][noise]
    values: dict[str, Any] = {
        "scenario": "scratch",
        "data": base["data"],
        "model": base["model"],
        "rounds": base["rounds"],
        "deploy_every": 200,
        "policy": {"name": "softmax", "beta": 0.05},
        "server": {"optimizer": "adam", "learning_rate": server},
        "client": {"learning_rate": client, "max_examples": base["max_examples"]},
    }
    if noise is None:
        return values
    private = {"mechanism": "dp-fedavg", "noise_multiplier": noise, "sampling": "poisson", "delta": 1e-6}
    return {**values, "clipping": {"norm": base["norm"]}, "privacy": private}


TABLE_9: dict[str, dict[str, Any]] = {
    name: _values(data, noise)
    for data, rates in _RATES.items()
    for name, noise in [(f"{data}-no-dp", None), *((f"{data}-dp-{noise:g}", noise) for noise in rates)]
}


def figure_members(data: str) -> dict[str, str]:
    """The four approaches of figure 4 for `emnist` or `so`: what they are called there, and their presets."""
    return {"No DP": f"{data}-no-dp"} | {f"NM={noise:g}": f"{data}-dp-{noise:g}" for noise in _RATES[data]}
