"""The study of delay: all policies measured, every bound drawn, and each told what was measured."""

import numpy as np
import pytest

from fedbandit.studies.regret import ACTIONS, DelayStudy, draw, run_study
from fedbandit.theory import (
    Setting,
    centralised_regret,
    epsilon_greedy_per_event,
    falcon_per_event,
    federated_regret,
)

STUDY = DelayStudy(
    rounds=6,
    deploy_every=(2, 6),
    seeds=2,
    epsilon=0.2,
    gamma=50.0,
    log_class=3.0,
    clients_per_round=4,
)


@pytest.fixture(scope="module")
def rows():
    return run_study(STUDY)


def test_bounds_are_told_the_measured_error_and_how_often_was_trained(rows):
    often, once = rows
    assert (often.samples, often.periods) == (2 * 4 * 20, 3)
    for row in rows:
        error = row.measured["epsilon-greedy"].optimization_error
        setting, events = Setting(ACTIONS, 0.2, 3.0, 0.05, error), row.samples * row.periods
        assert row.bounds.federated == pytest.approx(
            federated_regret(setting, row.samples, row.periods) / events
        )
        assert row.bounds.centralised == pytest.approx(
            centralised_regret(setting, row.samples, row.periods) / events
        )
        assert row.perfect.federated < row.bounds.federated
    # The model that serves the third period has been trained on the first two.
    own = {
        name: Setting(ACTIONS, 0.2, 3.0, 0.05, often.measured[name].optimization_error)
        for name in often.measured
    }
    assert often.bounds.last["epsilon-greedy"] == pytest.approx(
        epsilon_greedy_per_event(own["epsilon-greedy"], 160, 2)
    )
    assert often.bounds.last["falcon"] == pytest.approx(falcon_per_event(own["falcon"], 160, 2))
    assert all(
        np.isnan(value) for value in once.bounds.last.values()
    )  # one period: its model was never trained
    assert once.bounds.federated >= 1  # it says nothing


def test_all_policies_are_measured(rows):
    often, once = rows
    for policy in ("epsilon-greedy", "falcon", "falcon-schedule"):
        assert once.measured[policy].whole == pytest.approx(once.measured[policy].last)
        if policy != "falcon-schedule":  # after so few events it still explores almost uniformly
            assert (often.measured[policy].last < once.measured[policy].last).all()
    assert not np.array_equal(
        often.measured["epsilon-greedy"].whole, often.measured["falcon"].whole
    )
    assert not np.array_equal(
        often.measured["falcon-schedule"].whole, often.measured["falcon"].whole
    )
    assert all(row["bound_of_last"] is None for row in once.rows())


def test_every_curve_is_drawn_and_named(rows, tmp_path):
    text = draw(STUDY, rows, tmp_path / "theory.svg").read_text()
    for label in (
        "ε-greedy, federated (eq. 9)",
        "ε-greedy, centralised (eq. 10)",
        "FALCON, federated, exact oracle",
    ):
        assert f"<!-- {label} -->" in text
    for label in ("FALCON, γ = 50", "FALCON, γ by schedule"):
        assert text.count(f"<!-- {label} -->") == 2  # measured, over the run and for the last model
