"""Runs with noise and cohorts from the operating system: what is secret, kept, shown once."""

import json
import re
import shutil
import stat
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from builders import random_text
from release_attacks import planted_client

from fedbandit.assembly.experiment import build_experiment
from fedbandit.config import Config, read_toml
from fedbandit.core.errors import DataError
from fedbandit.core.files import read_lines
from fedbandit.privacy.noise import DrawnOnce
from fedbandit.report.report import write_report
from fedbandit.results import Results
from fedbandit.runs.run import execute, run
from fedbandit.simulation import simulate

PRIVACY = {
    "dp-fedavg": {"mechanism": "dp-fedavg", "noise_multiplier": 0.8},
    "min-separation": {
        "mechanism": "dp-fedavg",
        "noise_multiplier": 0.8,
        "sampling": "min-separation",
        "separation": 3,
    },
    "cyclic-poisson": {
        "mechanism": "banded-mf",
        "noise_multiplier": 0.8,
        "sampling": "cyclic-poisson",
        "bands": 3,
    },
}


def config(name="dp-fedavg", **values):
    base = {
        "scenario": "scratch",
        "rounds": 6,
        "deploy_every": 3,
        "clients_per_round": 10,
        "threads": 1,
        "policy": {"name": "softmax", "beta": 0.1},
        "clipping": {"norm": 0.05},
        "client": {"learning_rate": 0.5},
        "privacy": {**PRIVACY[name], "noise": "system"},
    }
    return Config.build({**base, **values})


class Crash(BaseException):
    pass


class Seen:
    """Stands for all who are told of rounds: a callback and a tracker in one."""

    def __init__(self, crashes_at=None):
        self.rounds, self.told, self.crashes_at = [], [], crashes_at

    def on_round(self, state, events, metrics):
        self.rounds.append((metrics["round"], state.weights.copy()))

    def __call__(self, folder, config):
        return self

    def update(self, metrics):
        self.told.append(metrics["round"])
        if metrics["round"] == self.crashes_at:
            raise Crash

    def close(self):
        pass


@pytest.mark.parametrize("name", PRIVACY)
def test_cohorts_cannot_be_recomputed_from_what_is_public(name):
    """All that the configuration says, its seed included, draws other cohorts, in every round."""
    data, chosen = random_text(clients=60), config(name)
    experiment = build_experiment(chosen, data)
    public = experiment.privacy.plan.cohorts(experiment.bandit.cohorts.pool, chosen.seed)
    same = [np.array_equal(public.draw(t), experiment.bandit.cohorts.draw(t)) for t in range(1, 61)]
    assert sum(same) <= 1
    again = build_experiment(chosen, data)
    assert again.secret != experiment.secret
    seeded = chosen.with_values({"privacy.noise": "seed"})
    known = build_experiment(seeded, data).bandit.cohorts
    assert all(np.array_equal(public.draw(t), known.draw(t)) for t in range(1, 61))


@pytest.mark.parametrize("name", ["dp-fedavg", "min-separation"])
def test_the_secret_is_kept_beside_the_run_for_its_owner_and_the_run_resumes_with_it(
    tmp_path, name
):
    data, folder = random_text(clients=60), tmp_path / "run"
    cohorts = []

    def keep(state, events, metrics):
        cohorts.append(np.sort(events.phase.cohorts.draw(metrics["round"])))

    run(config(name), folder, dataset=data, until=3, callbacks=[keep])
    secret = folder / "secret.key"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    value = secret.read_bytes()
    run(config(name), folder, dataset=data, callbacks=[keep])
    assert secret.read_bytes() == value
    expected = build_experiment(config(name), data).with_secret(_secret(value)).bandit.cohorts
    for number, cohort in enumerate(cohorts, start=1):
        np.testing.assert_array_equal(cohort, np.sort(expected.draw(number)))
    for path in folder.rglob("*"):  # nothing else holds it, in any form it could be written in
        if path.is_file() and path != secret:
            said = path.read_bytes()
            assert value not in said
            assert value.hex().encode() not in said.lower()
    assert "secret" not in json.dumps(read_toml(folder / "config.toml"))


def _secret(value):
    from fedbandit.core.randomness import Secret

    return Secret(value)


def test_a_run_that_has_begun_is_not_resumed_without_its_secret(tmp_path):
    data = random_text(clients=60)
    run(config(), tmp_path / "run", dataset=data, until=3)
    (tmp_path / "run" / "secret.key").unlink()
    with pytest.raises(DataError, match=r"secret\.key: missing; without the secret"):
        run(config(), tmp_path / "run", dataset=data)
    assert not (tmp_path / "run" / "secret.key").exists()


def test_a_damaged_secret_is_refused(tmp_path):
    data = random_text(clients=60)
    run(config(), tmp_path / "run", dataset=data, until=3)
    (tmp_path / "run" / "secret.key").write_bytes(b"short")
    with pytest.raises(DataError, match=r"secret\.key: damaged: 5 bytes, not 32"):
        run(config(), tmp_path / "run", dataset=data)


def test_a_finished_run_needs_its_secret_no_more(tmp_path):
    data = random_text(clients=60)
    run(config(), tmp_path / "run", dataset=data)
    (tmp_path / "run" / "secret.key").unlink()
    assert len(run(config(), tmp_path / "run", dataset=data)["reward"]) == 6


def test_a_state_in_memory_continues_with_the_experiment_that_has_its_secret():
    data = random_text(clients=60)
    first = simulate(config(), data)
    rounds = iter(first)
    next(rounds)
    with pytest.raises(DrawnOnce, match="come from a secret that is gone"):
        simulate(config(), data, state=first.state)
    again = simulate(config(), data, state=first.state, experiment=first.experiment)
    assert [metrics["round"] for metrics in again] == [2, 3, 4, 5, 6]


def test_no_round_of_a_crashed_run_is_shown_twice(tmp_path):
    """Killed at the worst moment, before the next checkpoint would have been due."""
    data, folder = random_text(clients=60), tmp_path / "run"
    first, second = Seen(crashes_at=4), Seen()
    with pytest.raises(Crash):
        run(
            config(),
            folder,
            dataset=data,
            callbacks=[first],
            tracker=first,
            checkpoint_seconds=1000.0,
        )
    run(
        config(),
        folder,
        dataset=data,
        callbacks=[second],
        tracker=second,
        checkpoint_seconds=1000.0,
    )
    assert first.told + second.told == [1, 2, 3, 4, 5, 6]
    assert [number for number, _ in first.rounds + second.rounds] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", ["dp-ftrl", "banded-mf", "blt"])
def test_correlated_noise_comes_from_the_secret_so_that_a_run_resumes(tmp_path, name):
    """The same bytes as a run with that secret which was never interrupted; without it, others."""
    data, folder = random_text(clients=60), tmp_path / "run"
    privacy = {"mechanism": name, "noise_multiplier": 1.0, "noise": "system"}
    chosen = config(privacy=privacy)
    run(chosen, folder, dataset=data, until=3)
    seen = []

    def keep(state, events, metrics):
        seen.append(state.weights.copy())

    run(chosen, folder, dataset=data, callbacks=[keep])
    secret = _secret((folder / "secret.key").read_bytes())
    whole, other = (build_experiment(chosen, data) for _ in range(2))
    runs = [simulate(chosen, data, experiment=each) for each in (whole.with_secret(secret), other)]
    weights = []
    for each in runs:
        list(each)
        weights.append(each.state.weights)
    assert len(seen) == 3
    np.testing.assert_array_equal(seen[-1], weights[0])
    assert not np.array_equal(weights[0], weights[1])


def test_a_callback_that_crashes_has_seen_what_is_kept(tmp_path):
    """The round is on disk before it is shown; resumed, the run goes on after it."""
    data, folder, shown = random_text(clients=60), tmp_path / "run", []

    def crash(state, events, metrics):
        shown.append((metrics["round"], state.weights.copy()))
        if metrics["round"] == 3:
            raise Crash

    with pytest.raises(Crash):
        run(config(), folder, dataset=data, callbacks=[crash], checkpoint_seconds=1000.0)
    shown_then = dict(shown)
    shown.clear()
    run(config(), folder, dataset=data, callbacks=[crash], checkpoint_seconds=1000.0)
    assert [number for number, _ in shown] == [4, 5, 6]
    assert set(shown_then) == {1, 2, 3}


def test_accounted_pretraining_draws_its_cohorts_from_the_secret_too():
    chosen = config(
        scenario="init",
        pretraining={"rounds": 3, "clients": 20},
        privacy={**PRIVACY["dp-fedavg"], "noise": "system", "pretraining": "accounted"},
    )
    data = random_text(clients=60)
    one, two = (build_experiment(chosen, data) for _ in range(2))
    draws = [
        [phase.cohorts.draw(t).tolist() for t in range(1, 9)]
        for phase in (one.pretraining, two.pretraining)
    ]
    assert draws[0] != draws[1]
    assert all(client < 20 for cohort in draws[0] for client in cohort)
    same = one.with_secret(two.secret).pretraining.cohorts
    assert [same.draw(t).tolist() for t in range(1, 9)] == draws[1]


EXACT = (
    *("reward", "running_reward", "propensity", "events", "clients", "unclipped", "rejected"),
    *("client_norm_median", "client_reward", "sent_bytes", "test_recall_at_5"),
)
"""Functions of clients' data without noise."""


class Told:
    """All that trackers and callbacks are told."""

    def __init__(self):
        self.lines = []

    def __call__(self, *given):
        if len(given) == 3:
            self.lines.append(given[-1])
        return self

    def update(self, metrics):
        self.lines.append(metrics)

    def close(self):
        pass


@pytest.fixture(scope="module")
def told_run(tmp_path_factory):
    """A finished run, and what was told of it."""
    folder, told = tmp_path_factory.mktemp("told") / "run", Told()
    chosen = config(compression={"name": "quantize", "bits": 8}, rounds=20)
    data = random_text(clients=60)
    data = replace(data, test=data.train)
    results = run(chosen, folder, dataset=data, tracker=told, callbacks=[told])
    return folder, told.lines, results, data


def numbers_in(text):
    """Every number that stands in a text."""
    return [float(found) for found in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", text)]


def test_the_sizes_of_cohorts_are_in_nothing_that_is_written_for_others_or_told(told_run):
    folder, told, results, _ = told_run
    lines = read_lines(folder / "metrics.jsonl")[1:]
    assert len(told) == 40
    for metrics in [*lines, *told]:
        assert {metrics.get(name) for name in EXACT} == {None}
        assert metrics["update_norm"] is not None
    assert np.isfinite(results["clients"]).all()


def test_no_fraction_of_what_others_see_recovers_the_number_of_events(told_run):
    """A mean over 37 events is a fraction with denominator 37: that is how a count was found."""
    folder, told, results, _ = told_run
    events = results["events"]
    found = {Fraction(value).limit_denominator(2000).denominator for value in results["reward"]}
    assert any(count % one == 0 for count in events for one in found if one > 1)  # it has teeth
    exact = {value for name in EXACT for value in exact_values(results, name)}
    public = [json.dumps(told), *(path.read_text(errors="replace") for path in for_others(folder))]
    seen = set(numbers_in("\n".join(public)))
    assert not seen & {value for value in exact if len(repr(value)) > 10}  # 0.1 is in config.toml
    for metrics in [*read_lines(folder / "metrics.jsonl")[1:], *told]:
        for value in metrics.values():
            if isinstance(value, float):
                near = Fraction(value).limit_denominator(2000)
                assert abs(value - near) > 1e-12 or near.denominator <= 20  # clip norm 1/20


def exact_values(results, name):
    values = results.runs[0].columns.get(name, [])
    nested = [list(one.values()) if isinstance(one, dict) else [one] for one in values]
    return [one for each in nested for one in each if isinstance(one, int | float)]


def for_others(folder):
    """The files that another user may read."""
    public = [path for path in folder.rglob("*") if path.is_file() and not hidden(path, folder)]
    return [path for path in public if path.name != ".lock"]


def hidden(path, folder):
    above = [one for one in (path, *path.parents) if one.is_relative_to(folder) and one != folder]
    return any(not one.stat().st_mode & 0o077 for one in above)


def test_what_is_exact_is_its_owners_alone_and_results_still_have_it(told_run):
    folder, _, results, data = told_run
    assert {path.name for path in for_others(folder)} == {
        "config.toml", "environment.json", "metrics.jsonl", "summary.json",
    }  # fmt: skip
    for name in ("reward", "running_reward", "propensity", "client_reward.p50", "events"):
        assert np.isfinite(results[name]).all(), name
    public = json.loads((folder / "summary.json").read_text())
    assert public["running_reward"] is public["test_recall_at_5"] is None
    again = execute(results_config(folder), folder, dataset=data).summary
    assert again["running_reward"] == results["running_reward"][-1]
    assert again["test_recall_at_5"] == results.runs[0].summary["test_recall_at_5"] is not None
    page = write_report([folder], folder.parent / "report.html").read_text()
    assert f"{results['running_reward'][-1]:.4f}" in page


def results_config(folder):
    return Config.build(read_toml(folder / "config.toml"))


def test_the_norm_of_the_update_follows_from_the_released_models(tmp_path):
    """So it tells nothing that they do not."""
    weights, told = [], []

    def keep(state, events, metrics):
        weights.append(state.weights.astype(float))
        told.append(metrics["update_norm"])

    chosen = config(server={"optimizer": "sgd", "learning_rate": 1.0})
    run(chosen, tmp_path / "run", dataset=random_text(clients=60), callbacks=[keep])
    moved = [np.linalg.norm(after - before) for before, after in pairwise(weights)]
    np.testing.assert_allclose(moved, told[1:], rtol=1e-4)


def test_a_resumed_run_keeps_one_exact_line_a_round_and_needs_none(tmp_path):
    data, folder = random_text(clients=60), tmp_path / "run"
    run(config(), folder, dataset=data, until=3)
    whole = run(config(), folder, dataset=data)
    assert np.isfinite(whole["reward"]).sum() == 6
    assert stat.S_IMODE((folder / "private").stat().st_mode) == 0o700
    shutil.rmtree(folder / "private")
    public = Results.open(folder)
    assert len(public["update_norm"]) == 6
    assert np.isnan(public["reward"]).all()
    assert len(run(config(), folder, dataset=data)["round"]) == 6


def test_a_seeded_run_says_all_of_it_to_everybody(tmp_path):
    chosen = config().with_values({"privacy.noise": "seed"})
    seeded = run(chosen, tmp_path / "seed", dataset=random_text(clients=60))
    assert np.isfinite(seeded["clients"]).all()
    assert not (tmp_path / "seed" / "private").exists()


def test_a_planted_client_proves_no_more_than_is_stated_unless_one_has_the_secret():
    """By one who recomputes cohorts; 20 seeds: scripts/privacy_attacks.py."""
    found = planted_client(seed=0)
    assert found["clients"] > 500
    assert found["proved"] <= found["stated"]
    known = planted_client(seed=0, has_secret=True)
    assert known["proved"] > known["stated"]  # the attack has teeth
