"""Results do not change unnoticed: small runs are held against stored digests, and the results number says which.

To store the digests anew, after raising the number: `PYTHONPATH=src:tests/helpers python tests/test_results_number.py`.
"""

import hashlib
import json
from pathlib import Path

import pytest
from core_samples import config, images, played, text

from fedbandit.core.identity import RESULTS

STORED = Path(__file__).with_name("results_number.json")
# In float64: what is left of differences between processors is far below the digits that are kept.
RUNS = {
    "softmax on text": (text, {}),
    "epsilon-greedy with importance weights": (
        text,
        {"policy__name": "epsilon-greedy", "objective__name": "weighted-regression"},
    ),
    "falcon in a population": (text, {"policy__name": "falcon", "mode": "population", "rounds": 8}),
    "pre-trained, by its schedule": (
        text,
        {"scenario": "init-shift", "policy__name": "falcon-schedule"},
    ),
    "scaffold, compressed": (
        text,
        {"algorithm__name": "scaffold", "compression__name": "quantize"},
    ),
    "private": (
        text,
        {
            "privacy__mechanism": "dp-fedavg",
            "privacy__noise_multiplier": 1.0,
            "privacy__delta": 1e-3,
            "clipping__norm": 0.5,
        },
    ),
    "linear on images": (images, {}),
    "drift in a population": (
        text,
        {"mode": "population", "rounds": 8, "scenario": "drift", "drift__at": [5]},
    ),
    "noisy clicks, some missing": (
        text,
        {"environment__name": "logistic", "environment__missing": 0.2},
    ),
}


def rounded(value):
    """The value with eight digits in its numbers."""
    if isinstance(value, float):
        return f"{value:.8g}"
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list) else value


def digest(name):
    """Of everything that a run measures, and of its final weights."""
    data, settings = RUNS[name]
    rounds, simulation = played(config(**settings), data())
    results = {
        "rounds": rounded(rounds),
        "weights": rounded([float(w) for w in simulation.state.weights]),
    }
    return hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()[:20]


@pytest.mark.parametrize("name", RUNS)
def test_results_are_those_of_the_results_number(name):
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    assert stored["results"] == RESULTS, (
        f"the digests are of results number {stored['results']}; {__doc__}"
    )
    assert digest(name) == stored["runs"][name], (
        f"the results of {name!r} have changed. If that is meant, raise RESULTS in core/identity.py. {__doc__}"
    )


if __name__ == "__main__":
    kept = {"results": RESULTS, "runs": {name: digest(name) for name in RUNS}}
    STORED.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
