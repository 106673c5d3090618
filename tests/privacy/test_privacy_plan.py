"""The plan: what fits together can be built and does what it says; what does not is refused with the key's name."""

from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
from builders import random_text

from fedbandit.assembly.experiment import build_experiment
from fedbandit.assembly.privacy import _open, build_ledger, candidates, server_momentum
from fedbandit.config import Config, PrivacyConfig
from fedbandit.core.errors import ConfigError
from fedbandit.federated.cohorts import (
    BlockCohorts,
    CyclicPoissonCohorts,
    FixedCohorts,
    PoissonCohorts,
)
from fedbandit.federated.pipeline import AdaptiveClipping, FixedClipping
from fedbandit.paper.catalogue import figure
from fedbandit.presets import all_presets
from fedbandit.privacy.plan import PrivacyPlan
from fedbandit.privacy.reporting import summary
from fedbandit.privacy.strategies import (
    Banded,
    Blt,
    Independent,
    Restarted,
    Tree,
    best_banded,
    best_blt,
)


def plan(**changes):
    values = {"population": 1000, "clients_per_round": 50, "rounds": 100, "noise_multiplier": 1.0}
    return PrivacyPlan(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"strategy": Tree()}, "sampling"),  # amplification is claimed for correlated noise
        ({"strategy": Banded((1.0, 0.5))}, "sampling"),
        ({"separation": 5}, "separation"),  # Poisson sampling keeps no distance
        ({"sampling": "fixed", "separation": 5}, "separation"),
        (
            {"sampling": "min-separation", "separation": 21},
            "separation",
        ),  # 21 blocks of 50 out of 1000
        (
            {"sampling": "min-separation", "separation": 2, "strategy": Banded((1.0, 0.5, 0.2))},
            "bands",
        ),
        (
            {"sampling": "cyclic-poisson", "separation": 2, "strategy": Banded((1.0, 0.5, 0.2))},
            "bands",
        ),
        (
            {"sampling": "cyclic-poisson", "separation": 2, "strategy": best_blt(100, 2, 2)},
            "sampling",
        ),
        ({"sampling": "cyclic-poisson", "separation": 2, "strategy": Tree()}, "sampling"),
        ({"sampling": "cyclic-poisson", "separation": 2}, "sampling"),
        (
            {"sampling": "cyclic-poisson", "separation": 21, "strategy": Banded((1.0,))},
            "separation",
        ),
        (
            {
                "sampling": "min-separation",
                "separation": 2,
                "strategy": Blt((0.9, 0.3), (0.8, -0.75)),
            },
            "strategy",
        ),
        ({"strategy": best_blt(100, 2, 2)}, "sampling"),
        ({"clipping": FixedClipping()}, "clipping"),
        ({"sampling": "fixed", "strategy": Tree(), "clipping": AdaptiveClipping()}, "clipping"),
        (
            {"clipping": AdaptiveClipping(), "noise_multiplier": 5.0},
            "noise_multiplier",
        ),  # 2 σ_b = 5
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": float("nan")}, "noise_multiplier"),
        ({"delta": 0.0}, "delta"),
        ({"clients_per_round": 1001}, "clients_per_round"),
        ({"rounds": 0}, "rounds"),
    ],
)
def test_contradictions_cannot_be_built(changes, key):
    with pytest.raises(ValueError, match=f"^{key}: "):
        plan(**changes)


def test_a_plan_makes_the_sampler_that_its_accounting_assumes():
    pool = range(7, 1007)
    assert isinstance(plan().cohorts(pool, 0), PoissonCohorts)
    assert isinstance(plan(sampling="fixed").cohorts(pool, 0), FixedCohorts)
    blocks = plan(sampling="min-separation", separation=20).cohorts(pool, 0)
    assert isinstance(blocks, BlockCohorts)
    with pytest.raises(ValueError, match=r"^population: "):
        plan().cohorts(range(999), 0)


def test_cyclic_groups_take_turns_and_draw_by_chance():
    amplified = plan(sampling="cyclic-poisson", separation=4, strategy=best_banded(100, 4))
    cohorts = amplified.cohorts(range(7, 1007), 3)
    assert isinstance(cohorts, CyclicPoissonCohorts)
    assert amplified.probability == 0.2
    drawn = [cohorts.draw(t) for t in range(1, 2001)]
    groups = [set(np.concatenate(drawn[position::4])) for position in range(4)]
    assert [len(group) for group in groups] == [250] * 4
    assert set().union(*groups) == set(range(7, 1007))
    sizes = np.array([len(cohort) for cohort in drawn])
    # A binomial count of 250: mean 50, variance 40; three standard errors over 2000 draws.
    assert abs(sizes.mean() - 50) < 3 * np.sqrt(40 / 2000)
    assert abs(sizes.var() / 40 - 1) < 3 * np.sqrt(2 / 2000)
    np.testing.assert_array_equal(cohorts.draw(17), drawn[16])


def test_amplified_banded_noise_is_charged_for_its_turns():
    """Theorem 4 of arXiv 2306.08153: as many subsampled Gaussians as a client has turns."""
    strategy = best_banded(100, 4)
    amplified = plan(sampling="cyclic-poisson", separation=4, strategy=strategy)
    one = dp_accounting.PoissonSampledDpEvent(
        0.2, dp_accounting.GaussianDpEvent(amplified.turn_multiplier)
    )
    assert amplified.turn_multiplier == pytest.approx(1.0)
    assert amplified.event() == dp_accounting.SelfComposedDpEvent(one, 25)
    assert amplified.event(5) == dp_accounting.SelfComposedDpEvent(one, 2)
    longer = plan(sampling="cyclic-poisson", separation=4, strategy=Banded((2.0, 1.0)))
    assert longer.turn_multiplier == pytest.approx(1 / np.sqrt(5))
    # Bands that end with a deployment correlate less, and are charged the same.
    restarted = plan(sampling="cyclic-poisson", separation=4, strategy=Restarted(strategy, 10))
    assert restarted.turn_multiplier == pytest.approx(1.0)
    # One band is DP-FedAvg, if every client may come in every round.
    one_band = plan(sampling="cyclic-poisson", strategy=Banded((1.0,)))
    assert one_band.event() == plan().event()


def test_events_name_sampling_and_noise():
    assert plan(noise_multiplier=0.0).event() == dp_accounting.NonPrivateDpEvent()
    assert plan().event(0) == dp_accounting.NoOpDpEvent()
    assert plan().event() == dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(1.0)), 100
    )
    assert plan(sampling="fixed").event(25).noise_multiplier == pytest.approx(1 / 5)
    apart = plan(sampling="min-separation", separation=20)
    assert apart.event().noise_multiplier == pytest.approx(1 / np.sqrt(5))
    with pytest.raises(ValueError, match="rounds"):
        plan().event(101)


def test_adaptive_clipping_splits_the_noise_between_updates_and_count():
    adaptive = plan(clipping=AdaptiveClipping(0.5, 0.1))
    assert adaptive.count_deviation == 2.5
    together = adaptive.update_multiplier**-2 + (2 * adaptive.count_deviation) ** -2
    assert together**-0.5 == pytest.approx(adaptive.noise_multiplier)
    assert adaptive.update_multiplier > 1
    assert adaptive.event() == plan().event()
    assert plan(clipping=AdaptiveClipping(), noise_multiplier=0.0).update_multiplier == 0


def test_poisson_cohorts_are_independent_and_of_the_right_size():
    cohorts = PoissonCohorts(range(5, 1005), 0.05, seed=3)
    drawn = [cohorts.draw(t) for t in range(1, 2001)]
    sizes = np.array([len(cohort) for cohort in drawn])
    # A binomial count: mean 50, variance 47.5; three standard errors over 2000 draws.
    assert abs(sizes.mean() - 50) < 3 * np.sqrt(47.5 / 2000)
    assert abs(sizes.var() / 47.5 - 1) < 3 * np.sqrt(2 / 2000)
    turns = np.bincount(np.concatenate(drawn), minlength=1005)
    assert not turns[:5].any()
    chi_square = ((turns[5:] - 100) ** 2 / 95).sum()
    assert abs(chi_square - 1000) < 4 * np.sqrt(2 * 1000)
    np.testing.assert_array_equal(cohorts.draw(17), drawn[16])


def test_poisson_cohorts_may_be_empty():
    cohorts = PoissonCohorts(range(10), 0.01, seed=0)
    assert any(len(cohorts.draw(t)) == 0 for t in range(1, 10))


def test_clients_in_blocks_keep_their_distance():
    cohorts = BlockCohorts(range(3, 106), size=10, separation=10, seed=1)
    last: dict[int, int] = {}
    for t in range(1, 101):
        cohort = cohorts.draw(t)
        assert len(set(cohort)) == 10
        assert cohort.min() >= 3
        assert cohort.max() < 106
        for client in cohort:
            assert t - last.get(client, -10) >= 10
            last[client] = t
    assert len(last) == 103  # nobody is left out for ever


def _config(**values):
    base = {"scenario": "scratch", "rounds": 10, "clients_per_round": 4, "clipping": {"norm": 1.0}}
    return Config.build({**base, **values})


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"privacy": {"noise_multiplier": 1.0}}, "privacy.noise_multiplier"),
        ({"privacy": {"epsilon": 1.0}}, "privacy.epsilon"),
        ({"privacy": {"restart_at_deployments": True}}, "privacy.restart_at_deployments"),
        ({"privacy": {"mechanism": "dp-fedavg"}}, "privacy.noise_multiplier"),
        (
            {"privacy": {"mechanism": "dp-fedavg", "noise_multiplier": 1.0, "bands": 3}},
            "privacy.bands",
        ),
        (
            {
                "privacy": {
                    "mechanism": "dp-fedavg",
                    "noise_multiplier": 1.0,
                    "restart_at_deployments": True,
                }
            },
            "privacy.re",
        ),
        (
            {"privacy": {"mechanism": "dp-ftrl", "noise_multiplier": 1.0, "sampling": "poisson"}},
            "privacy.sampling",
        ),
        (
            {
                "privacy": {
                    "mechanism": "banded-mf",
                    "noise_multiplier": 1.0,
                    "sampling": "fixed",
                    "bands": 4,
                }
            },
            "privacy.b",
        ),
        (
            {"privacy": {"mechanism": "dp-ftrl", "noise_multiplier": 1.0, "separation": 99}},
            "privacy.separation",
        ),
        (
            {
                "privacy": {"mechanism": "dp-ftrl", "noise_multiplier": 1.0},
                "clipping": {"quantile": 0.5},
            },
            "clipping",
        ),
        (
            {
                "privacy": {"mechanism": "dp-fedavg", "noise_multiplier": 1.0},
                "clipping": {"enabled": False},
            },
            "clipping.e",
        ),
        (
            {"privacy": {"mechanism": "dp-fedavg", "noise_multiplier": 0.0, "epsilon": 2.0}},
            "privacy.epsilon",
        ),
        (
            {"privacy": {"mechanism": "dp-fedavg", "noise_multiplier": 0.1, "epsilon": 0.01}},
            "privacy.epsilon",
        ),
        (
            {"privacy": {"mechanism": "dp-fedavg", "noise_multiplier": 1.0}, "scenario": "init"},
            "privacy.pretraining",
        ),
        (
            {"privacy": {"mechanism": "dp-ftrl", "noise_multiplier": 1.0, "buffers": 2}},
            "privacy.buffers",
        ),
        (
            {
                "privacy": {
                    "mechanism": "blt",
                    "noise_multiplier": 1.0,
                    "sampling": "cyclic-poisson",
                }
            },
            "privacy.sampling",
        ),
        ({"privacy": {"noise": "system"}}, "privacy.noise"),
        ({"privacy": {"sampling": "cyclic-poisson"}}, "privacy.sampling"),
    ],
)
def test_configurations_that_contradict_themselves_are_refused(values, key):
    config = _config(**values)
    with pytest.raises(ConfigError, match=f"^{key}"):
        build_ledger(config, 40, pretrained=config.scenario == "init")


def test_unknown_privacy_keys_are_refused():
    with pytest.raises(
        ConfigError, match=r"^privacy\.noise_multiplyer: unknown key; did you mean noise_multiplier"
    ):
        _config(privacy={"noise_multiplyer": 1.0})


def test_defaults_suit_the_mechanism():
    assert build_ledger(_config(), 40, pretrained=False) is None
    fedavg = build_ledger(
        _config(privacy={"mechanism": "dp-fedavg", "noise_multiplier": 1.0}), 40, False
    ).plan
    assert (fedavg.sampling, fedavg.strategy) == ("poisson", Independent())
    tree = build_ledger(
        _config(privacy={"mechanism": "dp-ftrl", "noise_multiplier": 1.0}), 40, False
    ).plan
    assert (tree.sampling, tree.separation, tree.strategy) == ("min-separation", 10, Tree())
    banded = build_ledger(
        _config(privacy={"mechanism": "banded-mf", "noise_multiplier": 1.0}), 20, False
    ).plan
    assert (banded.separation, banded.strategy.bands) == (5, 5)


def test_the_best_mechanism_is_the_one_with_the_least_error_and_says_so():
    config = _config(rounds=60, privacy={"mechanism": "best", "epsilon": 4.0, "bands": 4})
    found = {one.name: one for one in candidates(config, 4000, False)}
    assert {name.partition(" ")[0] for name in found} == {
        "dp-fedavg",
        "dp-ftrl",
        "banded-mf",
        "blt",
    }
    best = build_ledger(config, 4000, False)
    least = min(found.values(), key=lambda one: one.error)
    assert replace(best, reason=None) == least.ledger
    assert best.reason.startswith(least.name)
    assert all(
        f"{one.name} {one.error:.3g}" in best.reason for one in found.values() if one != least
    )
    for one in found.values():
        assert 3.9 < one.ledger.epsilon(60) <= 4.0
    assert summary(best, 60)["chosen"] == best.reason


def test_the_best_mechanism_keeps_to_what_is_asked():
    base = _config(rounds=60, privacy={"mechanism": "best", "epsilon": 4.0, "bands": 2})
    apart = build_ledger(base.with_values({"privacy.sampling": "min-separation"}), 400, False)
    assert apart.plan.sampling == "min-separation"
    adaptive = build_ledger(
        base.with_values({"clipping": {"quantile": 0.5}, "clients_per_round": 40}), 4000, False
    )
    assert adaptive.plan.strategy == Independent()
    assert "no other fits" not in adaptive.reason
    short = [
        bands
        for _, sampling, bands in _open(PrivacyConfig(), 6, deployed=False)
        if sampling == "cyclic-poisson"
    ]
    assert short == [4, 6]  # no band reaches past the last round
    long = [bands for _, _, bands in _open(PrivacyConfig(), 1600, deployed=False)]
    assert {4, 8, 16, 32, 64} <= set(long)
    on_devices = _open(base.privacy, 60, deployed=True)
    assert {sampling for _, sampling, _ in on_devices} == {"poisson", "min-separation"}
    with pytest.raises(ConfigError, match=r"^privacy\.epsilon: "):
        build_ledger(_config(privacy={"mechanism": "best", "noise_multiplier": 1.0}), 400, False)
    cyclic = {"mechanism": "banded-mf", "noise_multiplier": 1.0, "sampling": "cyclic-poisson"}
    with pytest.raises(ConfigError, match=r"^privacy\.sampling: .*simulations"):
        build_ledger(_config(privacy=cyclic), 400, False, deployed=True)


@pytest.mark.parametrize(
    ("server", "momentum"),
    [
        ({"optimizer": "sgd"}, 0.0),
        ({"optimizer": "sgd", "momentum": 0.5}, 0.5),
        ({"optimizer": "momentum"}, 0.9),
        ({"optimizer": "adam", "beta_1": 0.8}, 0.8),
        ({"optimizer": "adagrad"}, 0.0),
    ],
)
def test_correlated_noise_is_made_for_the_servers_momentum(server, momentum):
    private = {"noise_multiplier": 1.0}
    config = _config(server=server, privacy={"mechanism": "banded-mf", **private})
    assert server_momentum(config) == momentum
    assert build_ledger(config, 20, False).plan.strategy == best_banded(10, 5, momentum)
    config = _config(server=server, privacy={"mechanism": "blt", "buffers": 1, **private})
    assert build_ledger(config, 20, False).plan.strategy == best_blt(10, 5, 1, momentum)


def test_private_adaptive_clipping_starts_where_the_paper_starts():
    private = {"mechanism": "dp-fedavg", "noise_multiplier": 0.3}
    ledger = build_ledger(_config(clipping={}, privacy=private), 40, False)
    assert ledger.plan.clipping == AdaptiveClipping(0.5, 0.1, 0.2)
    given = build_ledger(
        _config(clipping={"quantile": 0.7, "initial": 2.0}, privacy=private), 40, False
    )
    assert given.plan.clipping == AdaptiveClipping(0.7, 2.0, 0.2)


def test_runs_without_privacy_keep_fixed_cohorts_and_may_ask_for_others():
    data = random_text(clients=40)
    assert isinstance(build_experiment(_config(), data).bandit.cohorts, FixedCohorts)
    poisson = build_experiment(_config(privacy={"sampling": "poisson"}), data).bandit.cohorts
    assert isinstance(poisson, PoissonCohorts)
    blocks = build_experiment(_config(privacy={"sampling": "min-separation"}), data).bandit.cohorts
    assert blocks.separation == 10


def test_table_9_is_complete_and_builds():
    table_9 = {name: one for name, one in all_presets().items() if "-dp" in name}
    assert set(table_9) == {
        *("emnist-no-dp", "emnist-dp-0", "emnist-dp-0.01", "emnist-dp-0.1"),
        *("so-no-dp", "so-dp-0", "so-dp-0.3", "so-dp-0.7"),
    }
    for name, config in table_9.items():
        assert (config.scenario, config.policy.parameters) == ("scratch", {"beta": 0.05})
        if name.endswith("no-dp"):
            assert config.privacy.mechanism == "none"
        else:
            ledger = build_ledger(config, 3400, False)
            assert ledger.plan.noise_multiplier == float(name.rpartition("-")[2])
            assert ledger.plan.clipping == FixedClipping(0.1 if name.startswith("emnist") else 0.8)
            assert (ledger.plan.sampling, ledger.plan.clients_per_round) == ("poisson", 64)
    for data, panel in {"emnist": "fig4a", "so": "fig4c"}.items():
        assert {one.key for one in figure(panel).members.values()} == {
            name for name in table_9 if name.startswith(data)
        }


def test_plans_are_frozen():
    with pytest.raises(AttributeError):
        plan().noise_multiplier = 0.0
    assert replace(plan(), noise_multiplier=2.0).noise_multiplier == 2.0
