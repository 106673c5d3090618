"""Pre-training has sizes of its own: they are what it uses, and nothing else about a run moves its model."""

import numpy as np
import pytest
from core_samples import config, text

from fedbandit.assembly.experiment import build_experiment
from fedbandit.core.errors import ConfigError
from fedbandit.engines import ThreadEngine
from fedbandit.presets import all_presets, preset
from fedbandit.simulation import pretrained_file, starting_weights
from fedbandit.studies.search import scaled

OWN = {
    "scenario": "init",
    "pretraining__clients_per_round": 5,
    "pretraining__max_examples": 7,
    "pretraining__clip_norm": "none",
}


def phase(**settings):
    return build_experiment(config(**{"scenario": "init", **settings}), text()).pretraining


def test_what_is_not_set_is_as_in_the_bandit_phase():
    usual = phase(client__max_examples=9, clipping__norm=0.3)
    assert (usual.cohorts.size, usual.work.plan.max_examples, usual.clipping.norm) == (6, 9, 0.3)


def test_own_sizes_are_used_and_a_cohort_is_never_larger_than_its_clients():
    own = phase(**OWN)
    assert (own.cohorts.size, own.work.plan.max_examples, own.clipping.norm) == (5, 7, np.inf)
    assert phase(pretraining__clients_per_round=64).cohorts.size == 6
    everything = phase(
        client__max_examples=3, pretraining__max_examples="all", pretraining__clip_norm=0.2
    )
    assert everything.work.plan.max_examples is None
    assert everything.clipping.norm == 0.2
    assert phase(clipping__norm=0.3, pretraining__clip_norm="adaptive").clipping.quantile == 0.8
    with pytest.raises(ConfigError, match=r"pretraining\.max_examples"):
        config(pretraining__max_examples="some")


def test_the_model_is_shared_by_runs_that_differ_in_the_bandit_phase_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDBANDIT_CACHE", str(tmp_path))
    whole = config(**OWN)
    reduced = config(
        **OWN, clients_per_round=3, client__max_examples=2, clipping__norm=0.1, rounds=2
    )
    rates = {"pretraining.client_learning_rate": 0.5, "pretraining.server_learning_rate": 0.05}
    one, other = (build_experiment(c.with_values(rates), text()) for c in (whole, reduced))
    assert pretrained_file(one) == pretrained_file(other)
    engine = ThreadEngine(1)
    first = starting_weights(one, engine)
    np.testing.assert_array_equal(starting_weights(other, engine), first)
    longer = build_experiment(
        config(**OWN | {"pretraining__max_examples": 8}).with_values(rates), text()
    )
    assert pretrained_file(longer) != pretrained_file(one)
    engine.close()


def test_presets_pretrain_at_full_size_however_much_the_rest_is_reduced():
    for name, chosen in all_presets().items():
        if chosen.scenario not in ("init", "init-shift"):
            continue
        reduced = scaled(chosen, 0.05).with_values(
            {"clients_per_round": 4, "client.max_examples": 8}
        )
        assert reduced.pretraining == chosen.pretraining, name
        first = chosen.pretraining
        assert (first.rounds, first.clients, first.clients_per_round, first.clip_norm) == (
            100,
            100,
            64,
            "none",
        )
        assert first.max_examples == ("all" if name.startswith("emnist") else 256)


def test_the_printed_form_of_emnists_pretraining_has_a_name():
    printed = preset("emnist-init-shift-printed-baseline").pretraining
    assert (
        printed.server_optimizer,
        printed.server_learning_rate,
        printed.client_learning_rate,
    ) == ("sgd", 0.5, 0.5)


def test_accounted_pretraining_is_clipped():
    private = {
        "mechanism": "dp-fedavg",
        "noise_multiplier": 1.0,
        "delta": 1e-3,
        "pretraining": "accounted",
    }
    chosen = config(
        scenario="init",
        clipping__norm=0.5,
        **{f"privacy__{key}": value for key, value in private.items()},
    )
    assert (
        build_experiment(chosen, text()).pretraining.clipping
        == build_experiment(chosen, text()).bandit.clipping
    )
    with pytest.raises(ConfigError, match=r"pretraining\.clip_norm"):
        build_experiment(chosen.with_values({"pretraining.clip_norm": "none"}), text())
    fixed = build_experiment(chosen.with_values({"pretraining.clip_norm": 0.2}), text())
    assert fixed.pretraining.clipping.norm == fixed.privacy.pretraining.clipping.norm == 0.2
