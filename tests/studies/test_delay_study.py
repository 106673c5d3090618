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


def _of(rows, policy):
    """The policy's rows: deploying often, and once."""
    return [row for row in rows if row.policy == policy]


def test_bounds_are_told_the_measured_error_and_how_often_was_trained(rows):
    often, once = (row.row() for row in _of(rows, "epsilon-greedy"))
    assert (often["samples"], often["periods"]) == (2 * 4 * 20, 3)
    for kept in _of(rows, "epsilon-greedy"):
        row = kept.row()
        size = row["samples"], row["periods"]
        setting = Setting(ACTIONS, 0.2, 3.0, 0.05, row["optimization_error"])
        events = size[0] * size[1]
        assert row["eq_9"] == pytest.approx(federated_regret(setting, *size) / events)
        assert row["eq_10"] == pytest.approx(centralised_regret(setting, *size) / events)
        assert kept.perfect["eq_9"] < row["eq_9"]
    # The model that serves the third period has been trained on the first two.
    bounds = {"epsilon-greedy": epsilon_greedy_per_event, "falcon": falcon_per_event}
    for policy, bound in bounds.items():
        row = _of(rows, policy)[0].row()
        setting = Setting(ACTIONS, 0.2, 3.0, 0.05, row["optimization_error"])
        assert row["bound_of_last"] == pytest.approx(bound(setting, 160, 2))
    unseen = [row.bounds["bound_of_last"] for row in rows if row.measured[0].periods == 1]
    assert len(unseen) == 3
    assert np.isnan(unseen).all()  # one period: its model was never trained
    assert once["eq_9"] >= 1  # it says nothing


def test_all_policies_are_measured(rows):
    first = {}
    for policy in ("epsilon-greedy", "falcon", "falcon-schedule"):
        often, once = _of(rows, policy)
        first[policy] = often.by_seed("regret")
        assert once.by_seed("regret") == pytest.approx(once.by_seed("last_regret"))
        if policy != "falcon-schedule":  # after so few events it still explores almost uniformly
            assert (often.by_seed("last_regret") < once.by_seed("last_regret")).all()
        assert once.row()["bound_of_last"] is None
    assert not np.array_equal(first["epsilon-greedy"], first["falcon"])
    assert not np.array_equal(first["falcon-schedule"], first["falcon"])


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
