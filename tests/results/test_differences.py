"""Paired differences: what two configurations share is taken out, and what seeds cannot tell is said."""

import numpy as np
import pytest
from scipy import stats
from small_runs import make_run

from fedbandit import Results
from fedbandit.core.errors import ConfigError
from fedbandit.results.differences import differences, paired


def test_the_interval_is_students_for_the_paired_differences():
    rng = np.random.default_rng(3)
    ours, theirs = dict(enumerate(rng.normal(1, 1, 6))), dict(enumerate(rng.normal(0, 1, 6)))
    found = paired(ours, theirs)
    expected = stats.ttest_rel(list(ours.values()), list(theirs.values())).confidence_interval(0.95)
    np.testing.assert_allclose([found.low, found.high], [expected.low, expected.high], rtol=1e-9)


def test_the_interval_covers_at_its_level():
    rng = np.random.default_rng(0)
    draws = rng.normal(0.3, 1.0, (2000, 5))
    found = [paired(dict(enumerate(row)), dict.fromkeys(range(5), 0.0)) for row in draws]
    covered = np.mean([one.low <= 0.3 <= one.high for one in found])
    assert abs(covered - 0.95) < 3 * np.sqrt(0.95 * 0.05 / 2000)


def test_only_shared_seeds_count_and_one_seed_has_no_interval():
    assert paired({0: 2.0, 1: 9.0}, {0: 1.5, 2: 0.0}).mean == 0.5
    alone = paired({0: 2.0}, {0: 1.5})
    assert (alone.low, alone.high, alone.told_apart, alone.interval) == (None, None, False, "-")
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_the_best_is_named_and_what_cannot_be_told_apart_is_said():
    clear = differences({"b": {0: 1.0, 1: 1.1}, "a": {0: 2.0, 1: 2.11}, "c": {}})
    assert clear.in_words() == "a is ahead of b beyond chance (2 shared seeds)"
    assert [one.configuration for one in clear.outcomes] == ["a", "b"]
    assert "told apart" in repr(clear)
    unclear = differences({"b": {0: 1.0, 1: 2.2}, "a": {0: 2.0, 1: 2.1}})
    assert unclear.in_words() == "a and b cannot be told apart with 2 shared seeds"
    single = differences({"b": {0: 1.0}, "a": {0: 2.0}})
    assert single.in_words() == "a is ahead of b; one seed cannot tell whether that is chance"
    assert "nan" not in repr(single)
    chosen = differences({"b": {0: 1.0}, "a": {0: 2.0}}, "b")
    assert [one.difference and one.difference.mean for one in chosen.outcomes] == [1.0, None]
    assert chosen.in_words() == single.in_words()


def test_results_pair_their_runs_by_seed(tmp_path):
    for seed in range(2):
        make_run(tmp_path / f"a{seed}", seed=seed, rounds=3)
        make_run(tmp_path / f"b{seed}", seed=seed, rounds=3, policy={"name": "greedy"})
    results = Results.open(tmp_path)
    final = {
        label: results.where({"policy.name": label})["running_reward"][:, -1]
        for label in ("softmax", "greedy")
    }
    best, other = sorted(final, key=lambda label: -final[label].mean())
    found = results.differences()
    assert found.reference == best
    np.testing.assert_allclose(
        found.outcomes[1].difference.mean, (final[other] - final[best]).mean()
    )
    with pytest.raises(ConfigError, match="did you mean greedy"):
        results.differences(against="gredy")
