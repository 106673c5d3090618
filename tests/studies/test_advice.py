"""`fedbandit advise`: equal tries, honest differences, baselines, and a configuration that runs."""

import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from fedbandit.assembly.experiment import build_experiment
from fedbandit.cli.app import program
from fedbandit.config import Config, read_toml
from fedbandit.core.errors import ConfigError
from fedbandit.data import open_dataset
from fedbandit.engines import ThreadEngine
from fedbandit.report.advice import advice_of, recommended, render_advice
from fedbandit.runs.local_runner import LocalRunner
from fedbandit.simulation.simulate import simulate
from fedbandit.studies.advice import (
    UNTOUCHED,
    Tournament,
    base_configs,
    choose,
    run_tournament,
    visits_per_example,
    without_a_model,
)
from fedbandit.studies.compare import Curves
from fedbandit.studies.planning import (
    POLICIES,
    Pace,
    TournamentPlan,
    plan_for,
    search_seconds,
    seconds_of,
    seeds_for,
)
from fedbandit.studies.search import scaled


def _curves(*final):
    values = np.array(final, float)[:, None]
    return Curves(values, values, tuple(range(len(final))))


REST = {
    "greedy": _curves(0.1, 0.1, 0.1),
    "epsilon-greedy": _curves(0.2, 0.2, 0.2),
    "softmax-weighted": _curves(0.3, 0.3, 0.3),
}
NEAR = {"softmax": _curves(0.50, 0.60, 0.55), "falcon": _curves(0.58, 0.57, 0.56), **REST}


def test_softmax_is_chosen_unless_another_is_clearly_better_and_a_tie_is_said():
    name, tie = choose(NEAR)
    assert name == "softmax"
    assert "cannot be told apart" in tie
    assert "broken in favour of softmax" in tie
    clear = {**NEAR, "falcon": _curves(0.70, 0.81, 0.75)}
    assert choose(clear) == ("falcon", "")
    assert choose({**clear, "softmax-weighted": _curves(0.80, 0.91, 0.85)}) == (
        "softmax-weighted",
        "",
    )
    assert choose({**NEAR, "greedy": _curves(0.9, 0.9, 0.9)}) == ("greedy", "")


def test_two_seeds_are_no_evidence_of_anything_small():
    """Two standard errors of two seeds covered 70%: Student's t is what 95% takes."""
    assert not _curves(2.36, 2.50).minus(_curves(1.66, 2.40)).told_apart
    assert _curves(2.36, 2.37, 2.38).minus(_curves(1.66, 1.67, 1.66)).told_apart
    alone = _curves(1.0).minus(_curves(0.5))
    assert not alone.told_apart
    assert "single seed" in str(alone)


@pytest.fixture(scope="module")
def dataset(tiny_text):
    return open_dataset(tiny_text)


def test_starting_points_fit_small_data(dataset, tiny_text):
    for scenario in ("scratch", "init", "init-shift"):
        configs = base_configs(dataset, str(tiny_text), scenario)
        assert UNTOUCHED in configs
        assert not configs[UNTOUCHED].training
        for config in configs.values():
            build_experiment(config, dataset)
        plain, weighted = configs["softmax"], configs["softmax-weighted"]
        changes = {"objective.name": "weighted-regression", "client.learning_rate": 0.05}
        assert weighted == plain.with_values(changes)


def test_a_budget_that_cannot_do_is_refused(tiny_text, tmp_path):
    with pytest.raises(ConfigError, match="needs at least"):
        run_tournament(
            str(tiny_text), 0.0001, tmp_path, runner=LocalRunner(1), say=lambda text: None
        )


@pytest.mark.parametrize("minutes", [3, 10, 60])
@pytest.mark.parametrize(
    "pace", [Pace(0.004, 0.5, 3.0, 2), Pace(0.02, 1.0, 4.0, 2), Pace(0.002, 0.2, 1.0, 8)]
)
def test_the_plan_fits_the_time_and_uses_it(pace, minutes):
    """By its own reckoning within a fifth of the budget, unless runs of the paper's length with all seeds fit."""
    config = Config.build({"rounds": 1500, "deploy_every": 200})
    try:
        plan = plan_for(config, 60 * minutes, 10, True, pace)
    except ConfigError:
        assert minutes == 3
        return
    final = scaled(config, plan.scale)
    searched = len(POLICIES) * search_seconds(final, plan.tries, pace)
    seeds = seeds_for(final, 60 * minutes - searched, plan.tries, True, pace)
    total = seconds_of(config, plan, seeds, True, pace)
    assert total <= 60 * minutes * 1.05
    assert total >= 0.8 * 60 * minutes or (plan.scale == 1 and seeds == 10)
    assert (
        plan.tries == 10 or plan.scale < 0.03
    )  # fewer tries only where even the shortest runs do not fit


def test_what_needs_no_model_earns_what_a_simulation_of_it_earns(dataset, tiny_text):
    config = base_configs(dataset, str(tiny_text), "scratch")["greedy"].with_values(
        {"rounds": 40, "training": False}
    )
    experiment = build_experiment(config, dataset)
    found = without_a_model(experiment)
    assert len(found) == 2
    uniform = config.with_values({"policy.name": "epsilon-greedy", "policy.epsilon": 1.0})
    engine = ThreadEngine(1)
    try:
        earned = simulate(uniform, dataset, engine=engine).collect()
    finally:
        engine.close()
    assert found["random"] == pytest.approx(float(earned["running_reward"][-1]), abs=0.03)
    assert max(found.values()) >= found["random"]
    assert visits_per_example(config, experiment) > 20


def _tournament(dataset, tiny_text, **changes):
    configs = base_configs(dataset, str(tiny_text), "init")
    curves = {**NEAR, UNTOUCHED: _curves(0.3, 0.31, 0.29)}
    chosen, tie = choose(curves)
    usual = configs[chosen].deploy_every
    held = Tournament(
        dataset=dataset,
        plan=TournamentPlan(0.1, 10),
        minutes=1.0,
        tries=dict.fromkeys(NEAR, 10),
        configs=configs,
        curves=curves,
        chosen=chosen,
        tie=tie,
        periods={usual: curves[chosen], 7: _curves(0.50, 0.75, 0.58), 37: _curves(0.2, 0.3, 0.25)},
        private={8.0: _curves(0.4, 0.5, 0.45)},
        private_note="rates of its own",
        folder=tiny_text,
        constants={"random": 0.05, "always a": 0.2},
        held_out={name: np.array([0.4, 0.4, 0.4]) for name in curves},
        held_out_name="test_accuracy",
        visits=3.0,
    )
    return replace(held, **changes)


def test_the_advice_has_every_baseline_held_out_numbers_and_intervals(dataset, tiny_text):
    held = _tournament(dataset, tiny_text)
    text = str(advice_of(held))
    for words in (
        "| untouched |",
        "| random |",
        "| always a |",
        "held-out accuracy",
        "95% interval",
        "a tie, broken",
    ):
        assert words in text
    assert "Warning" not in text
    assert re.search(r"every 7: .* \(cannot be told apart\)", text)
    assert re.search(r"every 37: .* \(worse\)", text)
    assert "gains nothing" not in text
    assert "chose among 10 pairs" in text
    page = render_advice(held, advice_of(held))
    assert page.count("<table>") == 3
    assert "<svg" in page
    assert "always a" in page


def test_a_rule_that_a_constant_beats_is_not_praised(dataset, tiny_text):
    """It recommended a rule that earns 0.068 where the best constant earns 0.110."""
    text = str(
        advice_of(_tournament(dataset, tiny_text, constants={"random": 0.05, "always a": 0.7}))
    )
    assert "> **Warning:** softmax earns less than `always a`" in text
    near = str(advice_of(_tournament(dataset, tiny_text, constants={"always a": 0.56})))
    assert "cannot be told apart from `always a`" in near


def test_memorised_examples_are_warned_of(dataset, tiny_text):
    """Reward 3.61 and a held-out recall of 0.22, against 0.39 for the untouched model, went without a warning."""
    held_out = {"softmax": np.array([0.22] * 3), UNTOUCHED: np.array([0.39] * 3)}
    text = str(advice_of(_tournament(dataset, tiny_text, held_out=held_out, visits=300.0)))
    assert (
        "on held-out data softmax is worse than the untouched model: held-out accuracy 0.2200 against 0.3900"
        in text
    )
    assert "each example is visited about 300 times" in text


def test_what_is_recommended_can_be_run_from_anywhere(dataset, tiny_text, tmp_path, monkeypatch):
    config = recommended(_tournament(dataset, tiny_text))
    (tmp_path / "recommended.toml").write_text(config.to_toml(), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    again = Config.build(read_toml(tmp_path / "recommended.toml"))
    assert again == config
    build_experiment(again, open_dataset(again.data.source))


def test_rewards_are_in_the_users_own_scale_by_default():
    from typer.main import get_command

    options = {one.name: one for one in get_command(program()).commands["advise"].params}
    assert options["scenario"].default == "init"
    assert Config.build({}).scenario == "init-shift"


def test_every_policy_has_the_same_tries_whatever_the_load(
    dataset, tiny_text, tmp_path, monkeypatch
):
    """The search asks for so many points and gives no deadline, so a busy machine changes nothing but the time."""
    asked = []

    def best_point(name, config, grid, search):
        asked.append((name, search.tries, search.deadline))
        raise _EnoughError

    monkeypatch.setattr("fedbandit.studies.advice.best_point", best_point)
    (tmp_path / "tournament.json").write_text(
        '{"scale": 0.02, "tries": 4, "seeds": 3}', encoding="utf-8"
    )
    with pytest.raises(_EnoughError):
        run_tournament(
            str(tiny_text), 1.0, tmp_path, runner=SimpleNamespace(), say=lambda text: None
        )
    assert asked == [("softmax", 4, None)]


class _EnoughError(Exception):
    pass


@pytest.mark.slow
def test_a_tournament_answers_every_question_and_can_be_resumed(tiny_text, tmp_path, monkeypatch):
    (tmp_path / "advice").mkdir()
    # Decided as by an earlier call, so that a busy machine plays the same tournament.
    plan = '{"scale": 0.02, "tries": 3, "seeds": 3}'
    (tmp_path / "advice" / "tournament.json").write_text(plan, encoding="utf-8")
    held = run_tournament(
        str(tiny_text), 1.0, tmp_path / "advice", runner=LocalRunner(1), say=lambda text: None
    )
    text = str(advice_of(held))
    for question in (
        "exploration worth it",
        "Which rule",
        "Which parameters",
        "How often",
        "privacy cost",
        "How sure",
    ):
        assert question in text
    assert set(held.curves) == {*POLICIES, UNTOUCHED}
    assert set(held.tries.values()) == {3}
    assert len(held.periods) == 3
    assert 8.0 in held.private or "cannot be had" in held.private_note
    again = run_tournament(
        str(tiny_text), 1.0, tmp_path / "advice", runner=LocalRunner(1), say=lambda text: None
    )
    for name, curves in held.curves.items():
        np.testing.assert_array_equal(again.curves[name].final, curves.final)
    for part in ("periods", "private", "rates/epsilon-8"):
        shutil.rmtree(tmp_path / "advice" / part)
    monkeypatch.setattr("fedbandit.studies.advice.choose", lambda curves: ("softmax-weighted", ""))
    weighted = run_tournament(
        str(tiny_text), 1.0, tmp_path / "advice", runner=LocalRunner(1), say=lambda text: None
    )
    assert "objective weighted-regression" in str(advice_of(weighted))
    assert recommended(weighted).objective.name == "weighted-regression"
    assert 8.0 in weighted.private or "cannot be had" in weighted.private_note
