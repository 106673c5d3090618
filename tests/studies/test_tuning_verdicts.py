"""What `tune` says of its choice: never more than its check and its log allow."""

import numpy as np
import pytest

from fedbandit.ope import IPS, Estimate, Interval
from fedbandit.studies.tuning import Check, Tuned, TuningCandidate, _influence, verdict


def _candidate(value, noise, clients=60, seed=0, warnings=()):
    """A candidate that each client's log moves by about `noise`."""
    influence = np.random.default_rng(seed).standard_normal(clients) * noise / np.sqrt(clients)
    found = Estimate(value, noise, Interval(0, 1, 0.95, "test"), 50.0, 1.0, 600, clients, warnings)
    return TuningCandidate({"server.learning_rate": value}, found, influence - influence.mean())


def _tuned(noise):
    candidates = [
        _candidate(value, noise, seed=i) for i, value in enumerate((0.5, 0.4, 0.3, 0.2, 0.1))
    ]
    return Tuned(candidates[0], candidates, 0.3, 600)


def test_a_choice_that_its_check_refutes_is_not_recommended():
    """It printed "use it" under a check that ranked it 13 of 27, at 42.8% of the best."""
    runs = np.array([[0.20, 0.21], [0.47, 0.48], [0.3, 0.3], [0.1, 0.2], [0.1, 0.1]])
    said = "\n".join(verdict(_tuned(0.01), Check(runs, 0, 0.05)))
    assert "use it" not in said
    assert "the check refutes the choice" in said
    assert "best by simulation, not by the log: --set server.learning_rate=0.4" in said


@pytest.mark.parametrize(
    "runs",
    [
        [
            [0.47, 0.48],
            [0.47, 0.49],
            [0.3, 0.3],
            [0.1, 0.2],
            [0.1, 0.1],
        ],  # within what more exploration may cost
        [
            [0.30, 0.50],
            [0.55, 0.45],
            [0.3, 0.3],
            [0.1, 0.2],
            [0.1, 0.1],
        ],  # within what seeds differ
    ],
)
def test_a_choice_as_good_as_the_best_is_recommended(runs):
    said = "\n".join(verdict(_tuned(0.01), Check(np.array(runs), 0, 0.05)))
    assert "use it: --set server.learning_rate=0.5" in said


def test_what_a_log_of_this_size_decides_is_said():
    clear, unclear = _tuned(0.005), _tuned(1.0)
    assert (clear.told_apart, unclear.told_apart) == (4, 0)
    assert clear.smallest_visible < 0.05 < unclear.smallest_visible
    assert "use it" in verdict(clear, None)[-1]
    assert "a guess" in verdict(unclear, None)[-1]
    assert "0 of 4 other candidates" in verdict(unclear, None)[0]
    assert "warning: little overlap: 600 held-out events are worth 50" in verdict(unclear, None)[1]
    assert not any("overlap" in line for line in verdict(clear, None))


def test_the_influence_of_clients_is_what_the_standard_error_is_made_of():
    from known_worlds import world

    from fedbandit.ope import estimate

    records = world().log(0, clients=40)
    moved = _influence(records, IPS())
    assert moved.sum() == pytest.approx(0, abs=1e-9)
    assert np.sqrt(moved @ moved * 40 / 39) == pytest.approx(
        estimate(records, {"e": IPS()})["e"].standard_error
    )
