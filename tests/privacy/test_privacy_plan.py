"""The plan: what fits together can be built and does what it says; what does not is refused with the key's name."""

from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
from builders import random_text

from fedbandit.building.experiment import build_experiment
from fedbandit.building.privacy import build_ledger
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError
from fedbandit.federated.clients import BlockCohorts, FixedCohorts, PoissonCohorts
from fedbandit.federated.pipeline import AdaptiveClipping, FixedClipping
from fedbandit.presets import TABLE_9, figure_members
from fedbandit.privacy.plan import PrivacyPlan
from fedbandit.privacy.strategies import Banded, Independent, Tree


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
        ({"sampling": "min-separation", "separation": 21}, "separation"),  # 21 blocks of 50 out of 1000
        ({"sampling": "min-separation", "separation": 2, "strategy": Banded((1.0, 0.5, 0.2))}, "bands"),
        ({"clipping": FixedClipping()}, "clipping"),
        ({"sampling": "fixed", "strategy": Tree(), "clipping": AdaptiveClipping()}, "clipping"),
        ({"clipping": AdaptiveClipping(), "noise_multiplier": 5.0}, "noise_multiplier"),  # 2 σ_b = 5
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
        ({"privacy": {"mechanism": "dp-fedavg", "noise_multiplier": 1.0, "bands": 3}}, "privacy.bands"),
        (
            {"privacy": {"mechanism": "dp-fedavg", "noise_multiplier": 1.0, "restart_at_deployments": True}},
            "privacy.re",
        ),
        ({"privacy": {"mechanism": "dp-ftrl", "noise_multiplier": 1.0, "sampling": "poisson"}}, "privacy.sampling"),
        (
            {"privacy": {"mechanism": "banded-mf", "noise_multiplier": 1.0, "sampling": "fixed", "bands": 4}},
            "privacy.b",
        ),
        ({"privacy": {"mechanism": "dp-ftrl", "noise_multiplier": 1.0, "separation": 99}}, "privacy.separation"),
        ({"privacy": {"mechanism": "dp-ftrl", "noise_multiplier": 1.0}, "clipping": {"quantile": 0.5}}, "clipping"),
        (
            {"privacy": {"mechanism": "dp-fedavg", "noise_multiplier": 1.0}, "clipping": {"enabled": False}},
            "clipping.e",
        ),
        ({"privacy": {"mechanism": "dp-fedavg", "noise_multiplier": 0.0, "epsilon": 2.0}}, "privacy.epsilon"),
        ({"privacy": {"mechanism": "dp-fedavg", "noise_multiplier": 0.1, "epsilon": 0.01}}, "privacy.epsilon"),
        ({"privacy": {"mechanism": "dp-fedavg", "noise_multiplier": 1.0}, "scenario": "init"}, "privacy.pretraining"),
    ],
)
def test_configurations_that_contradict_themselves_are_refused(values, key):
    config = _config(**values)
    with pytest.raises(ConfigError, match=f"^{key}"):
        build_ledger(config, 40, pretrained=config.scenario == "init")


def test_unknown_privacy_keys_are_refused():
    with pytest.raises(ConfigError, match=r"^privacy\.noise_multiplyer: unknown key; did you mean noise_multiplier"):
        _config(privacy={"noise_multiplyer": 1.0})


def test_defaults_suit_the_mechanism():
    assert build_ledger(_config(), 40, pretrained=False) is None
    fedavg = build_ledger(_config(privacy={"mechanism": "dp-fedavg", "noise_multiplier": 1.0}), 40, False).plan
    assert (fedavg.sampling, fedavg.strategy) == ("poisson", Independent())
    tree = build_ledger(_config(privacy={"mechanism": "dp-ftrl", "noise_multiplier": 1.0}), 40, False).plan
    assert (tree.sampling, tree.separation, tree.strategy) == ("min-separation", 10, Tree())
    banded = build_ledger(_config(privacy={"mechanism": "banded-mf", "noise_multiplier": 1.0}), 20, False).plan
    assert (banded.separation, banded.strategy.bands) == (5, 5)


def test_private_adaptive_clipping_starts_where_the_paper_starts():
    private = {"mechanism": "dp-fedavg", "noise_multiplier": 0.3}
    ledger = build_ledger(_config(clipping={}, privacy=private), 40, False)
    assert ledger.plan.clipping == AdaptiveClipping(0.5, 0.1, 0.2)
    given = build_ledger(_config(clipping={"quantile": 0.7, "initial": 2.0}, privacy=private), 40, False)
    assert given.plan.clipping == AdaptiveClipping(0.7, 2.0, 0.2)


def test_runs_without_privacy_keep_fixed_cohorts_and_may_ask_for_others():
    data = random_text(clients=40)
    assert isinstance(build_experiment(_config(), data).bandit.cohorts, FixedCohorts)
    poisson = build_experiment(_config(privacy={"sampling": "poisson"}), data).bandit.cohorts
    assert isinstance(poisson, PoissonCohorts)
    blocks = build_experiment(_config(privacy={"sampling": "min-separation"}), data).bandit.cohorts
    assert blocks.separation == 10


def test_table_9_is_complete_and_builds():
    assert set(TABLE_9) == {
        *("emnist-no-dp", "emnist-dp-0", "emnist-dp-0.01", "emnist-dp-0.1"),
        *("so-no-dp", "so-dp-0", "so-dp-0.3", "so-dp-0.7"),
    }
    for name, values in TABLE_9.items():
        config = Config.build(values)
        assert (config.scenario, config.policy.parameters) == ("scratch", {"beta": 0.05})
        if name.endswith("no-dp"):
            assert config.privacy.mechanism == "none"
        else:
            ledger = build_ledger(config, 3400, False)
            assert ledger.plan.noise_multiplier == float(name.rpartition("-")[2])
            assert ledger.plan.clipping == FixedClipping(0.1 if name.startswith("emnist") else 0.8)
            assert (ledger.plan.sampling, ledger.plan.clients_per_round) == ("poisson", 64)
    for data in ("emnist", "so"):
        assert set(figure_members(data).values()) == {name for name in TABLE_9 if name.startswith(data)}


def test_plans_are_frozen():
    with pytest.raises(AttributeError):
        plan().noise_multiplier = 0.0
    assert replace(plan(), noise_multiplier=2.0).noise_multiplier == 2.0
