"""`fedbandit advise`: tuned before it judges, verdicts from fresh seeds, and a configuration that is what it recommends."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from fedbandit.assembly.experiment import build_experiment
from fedbandit.cli.app import program
from fedbandit.config import Config, read_toml
from fedbandit.core.errors import ConfigError
from fedbandit.data import open_dataset
from fedbandit.data.embedded import catalogue, gallery
from fedbandit.engines import ThreadEngine
from fedbandit.report.advice import advice_of, recommended, write_advice
from fedbandit.runs.local_runner import LocalRunner
from fedbandit.simulation import simulate
from fedbandit.studies.advice import (
    UNTOUCHED,
    AdvicePlan,
    Contest,
    contenders,
    judge,
    plan_for,
    run_contest,
    seconds_of,
    visits_per_example,
    without_a_model,
)
from fedbandit.studies.compare import Curves
from fedbandit.studies.search import Choice

PLAN = AdvicePlan(rounds=8, deploy_every=2, tries=2, seeds=3, longer=2)


def _curves(*final):
    values = np.array(final, float)[:, None]
    return Curves(values, values, tuple(range(len(final))))


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


FAR = {
    "softmax": _curves(0.60, 0.61, 0.62, 0.60, 0.61),
    "falcon": _curves(0.50, 0.51, 0.52, 0.50, 0.51),
    "greedy": _curves(0.40, 0.41, 0.42, 0.40, 0.41),
    UNTOUCHED: _curves(0.30, 0.31, 0.32, 0.30, 0.31),
}
CHOICES = {
    "softmax": Choice({"client.learning_rate": 0.2}, 9, 9, (), 0.6),
    "falcon": Choice({"client.learning_rate": 0.2}, 9, 9, (), 0.5),
    "greedy": Choice({"client.learning_rate": 0.2}, 9, 9, (), 0.4),
}


def _contest(dataset, tiny_text, **changes):
    configs, _, _ = contenders(dataset, str(tiny_text), "init")
    plan = replace(PLAN, seeds=5)
    held = Contest(
        dataset=dataset,
        plan=plan,
        choices=CHOICES,
        configs={name: plan.second(plan.first(configs[name])) for name in FAR},
        curves=FAR,
        constants={"random": 0.05, f"always {dataset.header.actions[1]}": 0.2},
        held_out={name: dict.fromkeys(range(5), 0.4) for name in FAR},
        held_out_name="test_accuracy",
        periods={
            2: FAR["softmax"],
            1: _curves(0.50, 0.75, 0.58, 0.6, 0.61),
            4: _curves(0.2, 0.21, 0.22, 0.2, 0.21),
        },
        private={8.0: _curves(0.4, 0.41, 0.42, 0.4, 0.41)},
        private_note="rates of its own",
        visits=3.0,
    )
    return replace(held, **changes)


def _said(held, tmp_path):
    return str(advice_of(held, judge(held), tmp_path))


def test_a_rule_is_called_better_where_everything_agrees(dataset, tiny_text, tmp_path):
    held = _contest(dataset, tiny_text)
    verdict = judge(held)
    assert verdict.recommended == "softmax"
    assert set(verdict.better_than) == {"falcon", "greedy", UNTOUCHED, *held.constants}
    text = _said(held, tmp_path)
    lead = text.splitlines()[2]
    assert lead.startswith("Deploy **softmax**")
    assert "It is better than falcon, greedy, untouched" in lead
    for words in (
        "| untouched |",
        "| random |",
        "held-out accuracy",
        "95% interval",
        "Yes: softmax against greedy",
    ):
        assert words in text
    assert re.search(r"every 1: .* \(cannot be told apart\)", text)
    assert re.search(r"every 4: .* \(worse\)", text)
    assert len(re.findall(r"^\$ fedbandit", text, re.M)) == 3
    assert "Warning" not in text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {
                "choices": {
                    **CHOICES,
                    "falcon": replace(CHOICES["falcon"], on_edge=("server.learning_rate",)),
                }
            },
            "falcon: the best server.learning_rate of falcon lies on the edge of its grid",
        ),
        (
            {"choices": {**CHOICES, "falcon": replace(CHOICES["falcon"], reward=0.7)}},
            "falcon: stage 1 ranked the two the other way round",
        ),
        (
            {
                "held_out": {
                    "softmax": dict.fromkeys(range(5), 0.39),
                    "falcon": {s: 0.43 + 0.001 * s for s in range(5)},
                }
            },
            "falcon: held-out accuracy disagrees",
        ),
        (
            {"curves": {**FAR, "falcon": _curves(0.40, 0.70, 0.52, 0.50, 0.81)}},
            "falcon: not told apart",
        ),
    ],
)
def test_the_first_paragraph_says_why_no_rule_is_called_better(
    dataset, tiny_text, tmp_path, changes, reason
):
    held = _contest(dataset, tiny_text, **changes)
    verdict = judge(held)
    assert verdict.recommended == "softmax"
    assert "falcon" not in verdict.better_than
    assert "greedy" in verdict.better_than
    lead = _said(held, tmp_path).splitlines()[2]
    assert f"It is not called better than {reason}" in lead


def test_the_answer_on_exploration_does_not_contradict_the_doubts(dataset, tiny_text, tmp_path):
    """It said "Yes: softmax against greedy" with every rate on an edge and ranks reversed."""
    edges = {name: replace(one, on_edge=("server.learning_rate",)) for name, one in CHOICES.items()}
    turned = {**CHOICES, "greedy": replace(CHOICES["greedy"], reward=0.7)}
    for choices, reason in ((edges, "lies on the edge of its grid"), (turned, "ranked the two")):
        text = _said(_contest(dataset, tiny_text, choices=choices), tmp_path)
        [answer] = [line for line in text.splitlines() if "Is exploration worth it" in line]
        assert "Yes" not in answer
        assert "Cannot be said" in answer
        assert reason in answer
    noisy = {**FAR, "greedy": _curves(0.40, 0.58, 0.42, 0.58, 0.41)}
    alone = noisy["softmax"].minus(noisy["greedy"])
    assert alone.told_apart  # by an interval of one comparison, not of all that were looked at
    text = _said(_contest(dataset, tiny_text, curves=noisy), tmp_path)
    assert "Cannot be told: softmax and greedy" in text


def test_intervals_hold_for_all_pairs_since_the_winner_is_found_afterwards(dataset, tiny_text):
    held = _contest(dataset, tiny_text)
    near = {**FAR, "greedy": _curves(0.62, 0.60, 0.61, 0.60, 0.60)}
    for one in (held, replace(held, curves=near)):
        gaps = [o.difference for o in judge(one).found.outcomes if o.difference is not None]
        assert len(gaps) == 5
        assert {gap.comparisons for gap in gaps} == {15}
    [ahead] = [o for o in judge(replace(held, curves=near)).found.outcomes
               if o.configuration == "softmax"]  # fmt: skip
    assert ahead.difference.mean > 0
    assert ahead.difference.low < ahead.difference.mean < ahead.difference.high


def test_the_simpler_of_two_that_are_alike_is_recommended(dataset, tiny_text, tmp_path):
    near = {**FAR, "greedy": _curves(0.62, 0.60, 0.61, 0.60, 0.60)}
    held = _contest(dataset, tiny_text, curves=near)
    verdict = judge(held)
    assert (verdict.recommended, verdict.tie) == ("greedy", "softmax")
    text = _said(held, tmp_path)
    assert "do not explore" in text
    assert "softmax has the highest mean, but is within 1% and not told apart" in text
    assert recommended(held, verdict).policy.name == "greedy"


def test_a_constant_that_no_rule_beats_is_what_the_file_has(dataset, tiny_text, tmp_path):
    """It warned that `always Drama` beats softmax, and wrote softmax into recommended.toml."""
    name = dataset.header.actions[1]
    held = _contest(dataset, tiny_text, constants={"random": 0.05, f"always {name}": 0.9})
    verdict = judge(held)
    assert verdict.recommended == f"always {name}"
    config = recommended(held, verdict)
    assert (config.policy.name, config.policy.parameters) == ("constant", {"action": 1})
    assert not config.training
    assert f"Take one action, **always {name}**" in _said(held, tmp_path)
    short = config.with_values({"rounds": 30, "evaluate_every": 30})
    engine = ThreadEngine(1)
    try:
        earned = simulate(short, dataset, engine=engine).collect()
    finally:
        engine.close()
    exact = without_a_model(build_experiment(short, dataset))
    assert earned["propensity"].min() == 1
    if f"always {name}" in exact:
        assert earned["running_reward"][-1] == pytest.approx(exact[f"always {name}"], abs=0.05)
    untouched = {**FAR, UNTOUCHED: _curves(0.80, 0.81, 0.82, 0.80, 0.81)}
    left = _contest(dataset, tiny_text, curves=untouched)
    assert not recommended(left, judge(left)).training
    assert "Deploy the model as it is" in _said(left, tmp_path)


def test_memorised_examples_are_warned_of(dataset, tiny_text, tmp_path):
    """Reward 3.61 and a held-out recall of 0.22, against 0.39 for the untouched model, went without a warning."""
    held_out = {"softmax": dict.fromkeys(range(5), 0.22), UNTOUCHED: dict.fromkeys(range(5), 0.39)}
    text = _said(_contest(dataset, tiny_text, held_out=held_out, visits=300.0), tmp_path)
    assert (
        "on held-out data softmax is worse than the untouched model: held-out accuracy 0.2200 against 0.3900"
        in text
    )
    assert "each example is visited about 300 times" in text


def test_contenders_fit_small_data(dataset, tiny_text):
    for scenario in ("scratch", "init", "init-shift"):
        configs, grids, left_out = contenders(dataset, str(tiny_text), scenario)
        assert set(configs) - set(grids) == {UNTOUCHED}
        assert not configs[UNTOUCHED].training
        assert {"softmax", "falcon", "epsilon-greedy", "greedy", "squarecb"} <= set(grids)
        assert configs["softmax, doubly robust"].objective.name == "doubly-robust"
        assert configs["softmax, diagonal Newton"].algorithm.name == "diag-newton"
        assert len(left_out) + len(configs) == 11


def test_a_budget_that_cannot_do_is_refused(tiny_text, tmp_path):
    with pytest.raises(ConfigError, match="needs at least"):
        run_contest(str(tiny_text), 0.0001, tmp_path, runner=LocalRunner(1), say=lambda text: None)


@pytest.mark.parametrize("minutes", [1, 3, 10, 60, 600])
@pytest.mark.parametrize("pace", [(0.004, 0.5), (0.02, 1.0), (0.002, 0.2)])
def test_the_plan_fits_the_time_and_uses_it(pace, minutes):
    config = Config.build({"rounds": 1500, "deploy_every": 200})
    try:
        plan = plan_for(config, 60 * minutes, 9, True, pace)
    except ConfigError:
        assert minutes <= 3
        return
    total = seconds_of(config, plan, 9, True, pace)
    assert total <= 60 * minutes
    assert total >= 0.6 * 60 * minutes or plan.rounds == 375 or plan.seeds == 3
    assert plan.second(plan.first(config)).rounds <= 1500
    assert plan.rounds // plan.deploy_every >= 8


def test_what_needs_no_model_earns_what_a_simulation_of_it_earns(dataset, tiny_text):
    config = contenders(dataset, str(tiny_text), "scratch")[0]["greedy"].with_values(
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


@pytest.mark.parametrize("kind", [catalogue, gallery])
def test_over_candidates_a_random_one_of_those_shown_is_what_a_model_has_to_beat(kind, tmp_path):
    """It ended in a ValueError after the whole budget was spent."""
    source = str(kind.generate(tmp_path / "data", users=60, shown=5))
    dataset = open_dataset(source)
    config = contenders(dataset, source, "scratch")[0]["greedy"].with_values(
        {"rounds": 40, "training": False, "policy.name": "uniform"}
    )
    found = without_a_model(build_experiment(config, dataset))
    assert set(found) == {"random"}
    with closing(ThreadEngine(1)) as engine:
        earned = simulate(config, dataset, engine=engine).collect()
    assert found["random"] == pytest.approx(float(earned["running_reward"][-1]), abs=0.03)


@pytest.mark.slow
def test_advice_over_candidates_is_written(tmp_path):
    source = str(gallery.generate(tmp_path / "data", users=60, shown=5))
    out = tmp_path / "advice"
    _plan_in(out)
    held = run_contest(source, 1.0, out, runner=LocalRunner(1), say=lambda text: None)
    text = str(write_advice(held, out))
    assert "| random |" in text
    assert "always" not in text


def test_what_is_recommended_can_be_run_from_anywhere(dataset, tiny_text, tmp_path, monkeypatch):
    held = _contest(dataset, tiny_text)
    config = recommended(held, judge(held))
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


def _plan_in(out):
    out.mkdir()
    plan = '{"rounds": 8, "deploy_every": 2, "tries": 2, "seeds": 3, "longer": 2}'
    (out / "plan.json").write_text(plan, encoding="utf-8")


def _files(out):
    names = ("advice.md", "advice.html", "advice.png", "recommended.toml")
    runs = (*out.rglob("metrics.jsonl"), *out.rglob("choice.json"))
    return {str(p.relative_to(out)): p.read_bytes() for p in (*(out / n for n in names), *runs)}


@pytest.mark.slow
def test_advice_answers_every_question_and_killed_ends_with_the_same_bytes(
    tiny_text, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        _plan_in(tmp_path / name / "advice")
    monkeypatch.chdir(tmp_path / "whole")
    from pathlib import Path

    out = Path("advice")
    held = run_contest(str(tiny_text), 1.0, out, runner=LocalRunner(1), say=lambda text: None)
    text = str(write_advice(held, out))
    for question in (
        "exploration worth it",
        "Which parameters",
        "How often",
        "privacy cost",
        "How sure",
    ):
        assert question in text
    assert {choice.looked_at >= 2 for choice in held.choices.values()} == {True}
    assert UNTOUCHED in held.curves
    assert "greedy" in held.curves
    assert (out / "recommended.toml").exists()
    killed = tmp_path / "killed"
    command = [
        sys.executable,
        "-m",
        "fedbandit",
        "advise",
        "--data",
        str(tiny_text),
        "--workers",
        "1",
        "-q",
    ]
    for seconds in (3.0, 5.0, 7.0):
        started = subprocess.Popen(
            command, cwd=killed, start_new_session=True, stdout=subprocess.DEVNULL
        )
        time.sleep(seconds)
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
    subprocess.run(command, cwd=killed, check=True, stdout=subprocess.DEVNULL)
    assert _files(killed / "advice") == _files(out.resolve())
