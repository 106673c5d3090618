"""Paired differences: what two configurations share is taken out, and what seeds cannot tell is said."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from small_runs import make_run

from fedbandit import Results
from fedbandit.core.errors import ConfigError
from fedbandit.results.differences import Ranks, differences, from_zero, paired, simultaneous


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


def test_ranks_and_critical_differences_are_those_of_the_literature():
    values = {"a": [3, 3, 3, 2], "b": [2, 2, 1, 3], "c": [1, 1, 2, 1]}
    ranks = Ranks.of(values)
    assert ranks.means == {"a": 1.25, "b": 2.0, "c": 2.75}
    chi = stats.friedmanchisquare(*values.values()).statistic
    f_value = 3 * chi / (4 * 2 - chi)
    assert ranks.p == pytest.approx(stats.f.sf(f_value, 2, 6))
    # Demšar (2006), table 5: q at 0.05 for ten classifiers is 3.164
    ten = Ranks.of({str(i): list(np.roll(range(14), i)) for i in range(10)})
    assert ten.critical_difference == pytest.approx(3.164 * np.sqrt(10 * 11 / (6 * 14)), abs=1e-3)
    assert Ranks.of({"a": [1.0, np.nan], "b": [0.0, 0.0]}).means == {"a": 1.5, "b": 1.5}


def test_simultaneous_intervals_hold_together():
    """Of 400 families of ten comparisons without a difference, about 5% have any interval that leaves zero out."""
    random = np.random.default_rng(1)
    wrong = alone = 0
    for _ in range(400):
        found = {i: from_zero(random.normal(size=5)) for i in range(10)}
        alone += any(one.told_apart for one in found.values())
        wrong += any(one.told_apart for one in simultaneous(found).values())
    assert wrong / 400 < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 400)
    assert alone / 400 > 0.3


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=8))
def test_intervals_leave_zero_out_exactly_where_holm_rejects(p_values):
    scale = {}
    for i, p in enumerate(p_values):  # five seeds whose t-test has this p-value
        t = float(stats.t.ppf(1 - p / 2, 4))
        noise = np.array([-1, -0.5, 0, 0.5, 1.0])
        scale[i] = from_zero(noise + t * noise.std(ddof=1) / np.sqrt(5))
    found = simultaneous(scale)
    order = sorted(scale, key=lambda i: scale[i].p)
    rejecting = True
    for place, i in enumerate(order):
        rejecting = rejecting and scale[i].p <= 0.05 / (len(order) - place)
        if abs(scale[i].p - 0.05 / (len(order) - place)) > 1e-9:
            assert found[i].told_apart == rejecting


def test_no_winner_is_named_on_an_exact_tie():
    found = differences({"a": {0: 0.5, 1: 0.6}, "b": {0: 0.5, 1: 0.6}, "c": {0: 0.1, 1: 0.2}})
    assert found.in_words() == "no winner: a, b earned exactly the same"
    assert found.tied == ["a", "b"]
    assert "exactly the same" in repr(found)


def test_the_table_says_which_comparisons_its_intervals_belong_to():
    rewards = {name: {s: 0.1 * i + 0.01 * s * i for s in range(3)} for i, name in enumerate("abcd")}
    assert "hold together for 6 comparisons of all pairs" in repr(differences(rewards))
    assert "hold together for 3 comparisons with b" in repr(differences(rewards, "b"))
