"""Which examples a client meets and which model answers: simple mode, and the caches of a lasting population."""

from collections import Counter

import numpy as np
import pytest
from core_samples import config, text
from hypothesis import given
from hypothesis import strategies as st

from fedbandit.assembly.experiment import build_experiment
from fedbandit.federated.clients import Broadcast
from fedbandit.federated.state import Version
from fedbandit.federated.visit_plans import PopulationVisits, SimpleVisits, period_of

pytestmark = pytest.mark.usefixtures("small_chunks")

SPLIT = text().train
SIZES = SPLIT.sizes()
EVERYBODY = np.arange(SPLIT.num_clients)


def log_of(visits, index):
    """The visits of one client of a chunk, as rows that can be compared."""
    part = slice(visits.bounds[index], visits.bounds[index + 1])
    return np.stack(
        [visits.rows, visits.clients, visits.times, visits.positions, visits.versions], axis=1
    )[part]


# --- simple mode ---


@pytest.mark.parametrize("limit", [None, 1, 7, 1000])
def test_a_visit_is_a_random_subset_without_repetition(limit):
    visits = SimpleVisits(seed=1, deploy_every=10, max_examples=limit).visits(SPLIT, EVERYBODY, 12)
    assert visits.fresh.all()
    assert (visits.versions == 1).all()
    assert (visits.times == 12).all()
    np.testing.assert_array_equal(np.diff(visits.bounds), np.minimum(SIZES, limit or 1000))
    for client in EVERYBODY:
        rows, owners, _, positions, _ = log_of(visits, client).T
        assert (owners == client).all()
        np.testing.assert_array_equal(positions, np.arange(len(rows)))
        assert len(set(rows)) == len(rows)
        assert ((SPLIT.offsets[client] <= rows) & (rows < SPLIT.offsets[client + 1])).all()


def test_the_limit_takes_the_beginning_of_the_same_order():
    everything = SimpleVisits(1, 10).visits(SPLIT, EVERYBODY, 3)
    limited = SimpleVisits(1, 10, 5).visits(SPLIT, EVERYBODY, 3)
    for client in EVERYBODY:
        np.testing.assert_array_equal(log_of(limited, client), log_of(everything, client)[:5])


@given(st.lists(st.sampled_from(list(EVERYBODY)), unique=True, min_size=1), st.integers(1, 50))
def test_a_clients_visit_does_not_depend_on_who_else_is_in_the_chunk(chunk, round_number):
    plan = SimpleVisits(2, 4, 6)
    together = plan.visits(SPLIT, np.array(chunk), round_number)
    for index, client in enumerate(chunk):
        alone = plan.visits(SPLIT, np.array([client]), round_number)
        np.testing.assert_array_equal(log_of(together, index), log_of(alone, 0))


def test_another_seed_round_or_client_is_another_order():
    client = int(np.argmax(SIZES))

    def order(seed=0, round_number=1):
        return SimpleVisits(seed, 10).visits(SPLIT, np.array([client]), round_number).rows

    np.testing.assert_array_equal(order(), order())
    assert (order() != order(seed=1)).any()
    assert (order() != order(round_number=2)).any()
    assert (np.diff(order()) != 1).any()


def test_every_example_comes_first_as_often_as_the_next():
    """Chi-squared over the first example met in 5,000 rounds; above the bound once in a thousand seeds."""
    client, rounds = int(np.argmax(SIZES)), 5000
    first = np.concatenate(
        [
            SimpleVisits(5, 10, 1).visits(SPLIT, np.array([client]), t).rows
            for t in range(1, rounds + 1)
        ]
    )
    counts = np.bincount(first - SPLIT.offsets[client], minlength=SIZES[client])
    expected, freedom = rounds / SIZES[client], SIZES[client] - 1
    bound = (
        freedom + 3.1 * np.sqrt(2 * freedom) + 6
    )  # at or above the 99.9% quantile for 5 to 100 degrees of freedom
    assert ((counts - expected) ** 2 / expected).sum() < bound


def test_periods():
    assert [period_of(t, 3) for t in (1, 2, 3, 4, 6, 7)] == [0, 0, 0, 1, 1, 2]
    assert [SimpleVisits(0, 3).oldest_version(t) for t in (1, 3, 4)] == [0, 0, 1]


# --- population mode ---


def population(**settings):
    defaults = {"seed": 3, "deploy_every": 4, "events_per_period": 5, "cache_size": 12}
    return PopulationVisits(**{**defaults, **settings})


def test_drawn_twice_in_one_period_a_client_has_the_same_log():
    plan = population(pull_probability=0.5)
    logs = [plan.visits(SPLIT, EVERYBODY, t) for t in (9, 10, 12)]
    for other in logs[1:]:
        for name in ("bounds", "rows", "times", "positions", "versions", "fresh"):
            np.testing.assert_array_equal(getattr(logs[0], name), getattr(other, name))
    later = plan.visits(SPLIT, EVERYBODY, 13)
    assert later.rows.shape != logs[0].rows.shape or (later.rows != logs[0].rows).any()


def test_drawn_twice_in_one_period_a_client_logs_the_same_actions_and_rewards():
    chosen = config(
        mode="population", population__pull_probability=0.5, population__events_per_period=5
    )
    experiment = build_experiment(chosen, text())
    work = experiment.bandit.work
    rng = np.random.default_rng(0)
    versions = {v: Version(rng.normal(size=experiment.layout.size)) for v in range(3)}
    received = {"weights": versions[0].weights}
    first, second = (work.act(EVERYBODY, Broadcast(t, received, versions, 1.0)) for t in (5, 6))
    for name in ("bounds", "actions", "rewards", "propensities", "versions", "fresh"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert len(set(first.versions.tolist())) > 1


@pytest.mark.parametrize("cache_size", [1, 5, 7, 12, 100])
@pytest.mark.parametrize("events_per_period", [1, 5, 64])
def test_a_cache_is_never_above_its_size_and_holds_the_newest(cache_size, events_per_period):
    plan = population(cache_size=cache_size, events_per_period=events_per_period)
    for t in (1, 4, 5, 30):
        period, visits = period_of(t, 4), plan.visits(SPLIT, EVERYBODY, t)
        counts = np.diff(visits.bounds)
        assert (counts <= cache_size).all()
        per_period = np.minimum(SIZES, events_per_period)
        reach = min(period + 1, -(-cache_size // events_per_period))
        np.testing.assert_array_equal(counts, np.minimum(cache_size, per_period * reach))
        for client in EVERYBODY:
            times = log_of(visits, client)[:, 2]
            assert (np.diff(times) >= 0).all()
            fresh = Counter(times.tolist())[period]
            assert fresh == min(per_period[client], cache_size)
        np.testing.assert_array_equal(visits.fresh, visits.times == period)


def test_an_event_stays_as_it_was_while_it_is_cached():
    """What a client met in a period does not depend on when one looks."""
    plan = population(events_per_period=3, cache_size=9, pull_probability=0.4)
    for client in (0, 5):
        seen = {}
        for t in range(1, 41, 4):
            for row, owner, time, position, version in log_of(
                plan.visits(SPLIT, np.array([client]), t), 0
            ).tolist():
                assert seen.setdefault((owner, time, position), (row, version)) == (row, version)


def test_with_certain_pulls_every_event_has_the_newest_model_of_its_period():
    visits = population(pull_probability=1.0).visits(SPLIT, EVERYBODY, 30)
    np.testing.assert_array_equal(visits.versions, visits.times)


@pytest.mark.parametrize("longest_lag", [1, 2, 8])
def test_with_uncertain_pulls_models_of_several_ages_are_in_use(longest_lag):
    plan = population(pull_probability=0.3, longest_lag=longest_lag)
    for t in (1, 6, 30, 200):
        visits = plan.visits(SPLIT, EVERYBODY, t)
        assert (visits.versions <= visits.times).all()
        assert (visits.versions >= np.maximum(visits.times - longest_lag, 0)).all()
        assert (visits.versions >= plan.oldest_version(t)).all()
    newest = visits.versions[visits.fresh]
    assert len(set(newest.tolist())) > 1


def test_models_are_pulled_as_often_as_asked():
    """The share of clients with the newest model, over many periods: within four standard errors."""
    plan, chunk = (
        population(pull_probability=0.3, events_per_period=1, cache_size=1, longest_lag=50),
        EVERYBODY,
    )
    newest = []
    for t in range(401, 1601, 4):
        visits = plan.visits(SPLIT, chunk, t)
        newest.append(visits.versions == visits.times)
    share = np.concatenate(newest)
    assert share.mean() == pytest.approx(0.3, abs=4 * np.sqrt(0.3 * 0.7 / len(share)))


def test_clients_keep_the_model_they_have_until_they_pull():
    plan = population(pull_probability=0.4, events_per_period=1, cache_size=1, longest_lag=20)
    held = []
    for period in range(12):
        visits = plan.visits(SPLIT, np.array([0]), 4 * period + 1)
        held.append(int(visits.versions[0]))
    for period in range(1, 12):
        assert held[period] in (held[period - 1], period)
    assert len(set(held)) > 2


def test_the_oldest_version_that_may_be_asked_for_is_kept_for_all_later_rounds():
    plan = population(pull_probability=0.2, longest_lag=3)
    for t in range(1, 80):
        oldest = plan.oldest_version(t)
        assert all(
            plan.visits(SPLIT, EVERYBODY, later).versions.min() >= oldest
            for later in (t, t + 1, t + 4, t + 9)
        )


def test_no_clients_and_clients_without_examples():
    empty = int(np.flatnonzero(SIZES == 0)[0])
    for plan in (SimpleVisits(0, 4), population()):
        assert len(plan.visits(SPLIT, np.array([], np.int64), 9).rows) == 0
        assert plan.visits(SPLIT, np.array([empty]), 9).bounds.tolist() == [0, 0]
