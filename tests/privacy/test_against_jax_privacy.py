"""Noise multipliers and errors against those of jax-privacy 2.0.0: as stored always, and run anew where it is there."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import dp_accounting
import pytest
from noise_matrices import prefix_error

from fedbandit.assembly.privacy import build_ledger
from fedbandit.config import Config
from fedbandit.privacy.accounting import least_noise
from fedbandit.privacy.strategies import best_banded, best_blt

FOLDER = Path(__file__).parents[1] / "golden"
STORED = json.loads((FOLDER / "jax_privacy.json").read_text(encoding="utf-8"))
CLOSE = 0.02


def noise_multiplier(population, cohort, rounds, bands, accountant):
    config = Config.build(
        {
            "scenario": "scratch",
            "rounds": rounds,
            "clients_per_round": cohort,
            "clipping": {"norm": 1.0},
            "privacy": {
                "mechanism": "banded-mf",
                "sampling": "cyclic-poisson",
                "bands": bands,
                "epsilon": 4.0,
                "accountant": accountant,
            },
        }
    )
    return build_ledger(config, population, pretrained=False).plan.turn_multiplier


def check(theirs, accountants=("rdp", "pld")):
    for *case, expected in theirs["amplified noise multiplier"]:
        if case[-1] in accountants:
            assert noise_multiplier(*case) == pytest.approx(expected, rel=CLOSE), case
    once = least_noise(lambda z: dp_accounting.get_epsilon_gaussian(z, 1e-6), 4.0)
    assert once == pytest.approx(theirs["noise multiplier of one release"], rel=CLOSE)
    for rounds, separation, buffers, expected in theirs["prefix error of blt"]:
        ours = prefix_error(best_blt(rounds, separation, buffers), rounds, separation)
        assert ours == pytest.approx(expected, rel=CLOSE), (rounds, separation, buffers)
    for rounds, bands, expected in theirs["prefix error of banded"]:
        ours = prefix_error(best_banded(rounds, bands), rounds, rounds)
        assert ours == pytest.approx(expected, rel=CLOSE), (rounds, bands)


def test_the_stored_numbers_are_ours_within_two_per_cent():
    check(STORED, ("rdp",))


@pytest.mark.slow
def test_the_stored_numbers_by_privacy_loss_distributions():
    check(STORED, ("pld",))


def interpreter():
    """One that has jax-privacy: named by FEDBANDIT_JAX_PRIVACY, or this one."""
    named = os.environ.get("FEDBANDIT_JAX_PRIVACY")
    return named or (sys.executable if importlib.util.find_spec("jax_privacy") else None)


@pytest.mark.slow
@pytest.mark.skipif(
    interpreter() is None, reason="FEDBANDIT_JAX_PRIVACY names no interpreter that has jax-privacy"
)
def test_jax_privacy_run_anew_prints_the_stored_numbers():
    script = FOLDER / "jax_privacy_numbers.py"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [interpreter(), script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
        check=True,
    )
    printed = json.loads(done.stdout)
    assert printed.keys() == STORED.keys()
    for name, numbers in printed.items():
        for row, stored in zip(_rows(numbers), _rows(STORED[name]), strict=True):
            assert row[:-1] == stored[:-1]
            assert row[-1] == pytest.approx(stored[-1], rel=1e-3)
    check(printed)


def _rows(numbers):
    return numbers if isinstance(numbers, list) else [[numbers]]
