"""`fedbandit advise` on a small data set."""

import numpy as np
import pytest

from fedbandit.building.experiment import build_experiment
from fedbandit.core.errors import ConfigError
from fedbandit.data import open_dataset
from fedbandit.runs.local_runner import LocalRunner
from fedbandit.studies.advice import base_configs, choose, hold, recommendation
from fedbandit.studies.comparison import Curves


def _curves(*final):
    values = np.array(final, float)[:, None]
    return Curves(values, values, tuple(range(len(final))))


def test_softmax_is_chosen_unless_another_is_clearly_better():
    rest = {"greedy": _curves(0.1, 0.1, 0.1), "epsilon-greedy": _curves(0.2, 0.2, 0.2)}
    near = {"softmax": _curves(0.50, 0.60, 0.55), "falcon": _curves(0.58, 0.57, 0.56), **rest}
    assert choose(near) == "softmax"
    clear = {"softmax": _curves(0.50, 0.60, 0.55), "falcon": _curves(0.70, 0.81, 0.75), **rest}
    assert choose(clear) == "falcon"
    greedy = {**near, "greedy": _curves(0.9, 0.9, 0.9)}
    assert choose(greedy) == "greedy"


def test_starting_points_fit_small_data(tiny_text):
    dataset = open_dataset(tiny_text)
    for scenario in ("scratch", "init", "init-shift"):
        for config in base_configs(dataset, str(tiny_text), scenario).values():
            build_experiment(config, dataset)


def test_a_budget_that_cannot_do_is_refused(tiny_text, tmp_path):
    with pytest.raises(ConfigError, match="needs at least"):
        hold(str(tiny_text), 0.0001, tmp_path, runner=LocalRunner(1), say=lambda text: None)


@pytest.mark.slow
def test_a_tournament_answers_every_question_and_can_be_gone_on_with(tiny_text, tmp_path):
    (tmp_path / "advice").mkdir()
    # Decided as by an earlier call, so that a busy machine plays the same tournament.
    (tmp_path / "advice" / "tournament.json").write_text('{"scale": 0.02, "seeds": 2}', encoding="utf-8")
    held = hold(str(tiny_text), 1.0, tmp_path / "advice", runner=LocalRunner(1), say=lambda text: None)
    text = recommendation(held)
    for question in ("exploration worth it", "Which rule", "Which parameters", "How often", "privacy cost", "How sure"):
        assert question in text
    assert set(held.curves) == {"softmax", "falcon", "epsilon-greedy", "greedy", "baseline"}
    assert len(held.periods) == 3
    assert 8.0 in held.private or "cannot be had" in held.private_note
    assert "± " in text
    again = hold(str(tiny_text), 1.0, tmp_path / "advice", runner=LocalRunner(1), say=lambda text: None)
    for name, curves in held.curves.items():
        np.testing.assert_array_equal(again.curves[name].final, curves.final)
