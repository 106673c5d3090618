"""Noise as it is really drawn: variance and covariance match the plan, it can be made again, or never."""

import inspect

import numpy as np
import pytest
from noise_matrices import noise_matrix
from scipy.stats import chi2, kstest

from fedbandit.federated.pipeline import AdaptiveClipping, FixedClipping
from fedbandit.privacy.noise import (
    DrawnOnce,
    GridNoise,
    PrivateMean,
    SimulatedNoise,
    secret_normals,
)
from fedbandit.privacy.plan import PrivacyPlan
from fedbandit.privacy.strategies import (
    Independent,
    Restarted,
    Tree,
    best_banded,
    best_blt,
)

ROUNDS = 12
STEPS = 2.0**20  # of a grid, in one deviation of the noise
STRATEGIES = [
    Independent(),
    Tree(),
    best_banded(ROUNDS, 4),
    Restarted(Tree(), 5),
    best_blt(ROUNDS, 4, 2),
]


def plan(strategy, **changes):
    values = {"population": 800, "clients_per_round": 20, "rounds": ROUNDS, "noise_multiplier": 1.5}
    if not isinstance(strategy, Independent):
        values |= {"sampling": "min-separation", "separation": 4}
    return PrivacyPlan(
        **{**values, "strategy": strategy, "clipping": FixedClipping(0.5), **changes}
    )


def in_the_middle(statistic, freedom, level=1e-4):
    return chi2.ppf(level, freedom) < statistic < chi2.ppf(1 - level, freedom)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_the_covariance_of_prefix_sums_is_the_plans(strategy):
    """Released sums of nothing are noise alone; whitened by the plan's covariance they must be standard normal."""
    mechanism, size = PrivateMean(plan(strategy), SimulatedNoise(plan(strategy), 11)), 20_000
    released = np.stack([mechanism.mean(np.zeros(size), 0, t, 0.5) for t in range(1, ROUNDS + 1)])
    prefixes = np.cumsum(released, axis=0) * 20  # back to sums
    expected = np.cumsum(noise_matrix(strategy, ROUNDS), axis=0) * 1.5 * 0.5
    covariance = expected @ expected.T
    white = np.linalg.solve(np.linalg.cholesky(covariance), prefixes)
    freedom = ROUNDS * size
    assert in_the_middle((white**2).sum(), freedom)
    # Every entry of the whitened covariance: 1 on the diagonal, 0 beside it, within five standard errors.
    measured = white @ white.T / size
    allowed = 5 * np.sqrt((1 + np.eye(ROUNDS)) / size)
    assert (np.abs(measured - np.eye(ROUNDS)) < allowed).all()
    assert kstest(white.reshape(-1)[::7], "norm").pvalue > 1e-4


def test_the_variance_is_noise_multiplier_times_clip_on_the_sum():
    mechanism = PrivateMean(plan(Independent()), SimulatedNoise(plan(Independent()), 0))
    total = np.full(50_000, 3.0)
    noise = mechanism.mean(total, 7, 1, 0.5) * 20 - total
    assert in_the_middle((noise**2).sum() / (1.5 * 0.5) ** 2, len(noise))


def test_float32_noise_has_the_same_variance():
    mechanism = PrivateMean(plan(Independent()), SimulatedNoise(plan(Independent()), 0))
    released = mechanism.mean(np.zeros(50_000, np.float32), 7, 1, 0.5)
    assert released.dtype == np.float32
    assert in_the_middle(((released * 20 / 0.75).astype(float) ** 2).sum(), 50_000)


def test_adaptive_plans_add_more_to_updates_and_some_to_the_count():
    adaptive = plan(Independent(), clipping=AdaptiveClipping(0.5, 0.1), noise_multiplier=1.0)
    mechanism = PrivateMean(adaptive, SimulatedNoise(adaptive, 5))
    noise = mechanism.mean(np.zeros(50_000), 0, 1, 0.3) * 20 / 0.3
    assert in_the_middle((noise**2).sum() / adaptive.update_multiplier**2, 50_000)
    counts = np.array([mechanism.unclipped(8, 20, t) for t in range(1, 4001)])
    assert in_the_middle((((counts - 0.4) * 20 / adaptive.count_deviation) ** 2).sum(), 4000)


def test_the_divisor_does_not_depend_on_who_came():
    quiet = plan(Independent(), noise_multiplier=0.0)
    mechanism = PrivateMean(quiet, SimulatedNoise(plan(Independent()), 0))
    np.testing.assert_array_equal(
        mechanism.mean(np.ones(3), 1, 1, 0.5), mechanism.mean(np.ones(3), 99, 1, 0.5)
    )
    np.testing.assert_array_equal(mechanism.mean(np.ones(3), 1, 1, 0.5), np.full(3, 1 / 20))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_simulated_noise_is_a_function_of_seed_and_round(strategy):
    like = np.zeros(50, np.float32)
    through = SimulatedNoise(plan(strategy), 9)
    drawn = [through.update(t, like) for t in range(1, ROUNDS + 1)]
    for t in (1, 5, 8, 12, 3):  # a resumed run begins anywhere
        np.testing.assert_array_equal(
            SimulatedNoise(plan(strategy), 9).update(t, like), drawn[t - 1]
        )
        np.testing.assert_array_equal(through.update(t, like), drawn[t - 1])
    other = SimulatedNoise(plan(strategy), 10)
    assert not np.array_equal(other.update(1, like), drawn[0])
    assert through.count(4) == SimulatedNoise(plan(strategy), 9).count(4) != through.count(5)


def test_runs_that_share_a_seed_do_not_share_their_noise():
    """Two runs with noise a·Z and b·Z on one sum would give the sum away, and with one Z on two sums the difference."""
    like, released = np.zeros(40_000), []
    for changes in (
        {"noise_multiplier": 0.3},
        {"noise_multiplier": 0.7},
        {"clipping": FixedClipping(0.2)},
        {},
    ):
        stream = SimulatedNoise(plan(Independent(), **changes), 0)
        released.append(stream.update(1, like))
        assert stream.count(1) != SimulatedNoise(plan(Independent(), delta=1e-7), 0).count(1)
    released.append(
        SimulatedNoise(plan(Independent()), 0, of="another learning rate").update(1, like)
    )
    correlated = np.corrcoef(released) - np.eye(len(released))
    assert np.abs(correlated).max() < 5 / np.sqrt(like.size)


def test_noise_that_is_drawn_once_resumes_only_where_nothing_is_remembered():
    like = np.zeros(3)
    assert GridNoise(Independent(), STEPS).update(5, like).shape == (3,)
    assert GridNoise(Restarted(Tree(), 5), STEPS).update(6, like).shape == (3,)
    for strategy in (Tree(), best_banded(ROUNDS, 4), best_blt(ROUNDS, 4, 2), Restarted(Tree(), 5)):
        with pytest.raises(DrawnOnce, match="start anew"):
            GridNoise(strategy, STEPS).update(5, like)


def test_deployment_noise_takes_no_seed_and_is_never_the_same():
    assert "seed" not in inspect.signature(GridNoise).parameters
    with pytest.raises(TypeError):
        GridNoise(Independent(), STEPS, seed=1)
    like = np.zeros(8)
    one, two = GridNoise(Independent(), STEPS), GridNoise(Independent(), STEPS)
    assert not np.array_equal(one.update(1, like), two.update(1, like))
    with pytest.raises(ValueError, match="only once"):
        one.update(1, like)
    assert not isinstance(one, SimulatedNoise)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_deployment_noise_goes_on_from_its_memory(strategy):
    """Kept memory continues the very stream: the noise of later rounds still cancels that of earlier ones."""
    like, stream, size = np.zeros(20_000), GridNoise(strategy, STEPS), 20_000
    drawn = []
    for t in range(1, ROUNDS + 1):
        drawn.append(stream.update(t, like))
        # as after a restart of the server
        stream = GridNoise(strategy, STEPS, stream.done, stream.memory)
    expected = noise_matrix(strategy, ROUNDS)
    white = np.linalg.solve(expected, np.stack(drawn) / STEPS)
    assert in_the_middle((white**2).sum(), ROUNDS * size)
    assert (
        np.abs(white @ white.T / size - np.eye(ROUNDS)) < 5 * np.sqrt((1 + np.eye(ROUNDS)) / size)
    ).all()
    assert len(stream.memory) <= 4


def test_secret_normals_are_normal():
    drawn = secret_normals(100_001)
    assert drawn.shape == (100_001,)
    assert np.isfinite(drawn).all()
    assert kstest(drawn, "norm").pvalue > 1e-5
