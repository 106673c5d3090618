"""The fitted reward model: made of clients' sums, right where it can be, and doubly robust where it cannot."""

from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np
import pytest

from fedbandit.core.errors import ConfigError
from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import Log, Split
from fedbandit.evaluation.logs import (
    action_means,
    choose_columns,
    linear_rewards,
    linear_sums,
    records_of,
)
from fedbandit.ope import Bootstrap, DirectMethod, DoublyRobustEstimator, Range, estimate
from fedbandit.policies import Uniform
from fedbandit.studies.evaluate import _Opened, _reward_model

ACTIONS, CLIENTS, EVENTS, DRAWS = 3, 60, 20, 150
TARGET = np.array([0.2, 0.1, 0.7])
BOTH = {"dm": DirectMethod(), "dr": DoublyRobustEstimator()}


@dataclass(frozen=True)
class Fixed:
    """A policy that looks at nothing."""

    def probabilities(self, prediction, available=None):
        return np.broadcast_to(TARGET, prediction.mean.shape)


def _log(seed, hidden=False, sparse=False):
    """Two features decide what pays; the log likes an action where it pays. `hidden`: the contexts show neither."""
    rng = np.random.default_rng(seed)
    n = CLIENTS * EVENTS
    x = rng.integers(0, 2, (n, 2)).astype(np.float32)
    means = np.stack([0.2 + 0.5 * x[:, 0], np.full(n, 0.5), 0.1 + 0.6 * x[:, 1]], axis=1)
    logging = np.where(means > 0.45, 0.5, 0.15)
    logging /= logging.sum(axis=1, keepdims=True)
    actions = (
        (rng.random(n)[:, None] > np.cumsum(logging, axis=1)).sum(axis=1).clip(max=ACTIONS - 1)
    )
    rewards = (rng.random(n) < means[np.arange(n), actions]).astype(float)
    propensities = logging[np.arange(n), actions]
    shown = rng.random((n, 2)).astype(np.float32) if hidden else x
    features = shown
    if sparse:
        rows, ids = np.nonzero(shown)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=n))])
        features = Ragged(offsets, ids.astype(np.int32), shown[rows, ids])
    no_labels = Ragged(np.zeros(n + 1, np.int64), np.empty(0, np.int32))
    ids = np.array([f"{c:03d}".encode() for c in range(CLIENTS)])
    log = Log(actions.astype(np.int32), rewards, propensities)
    return Split(ids, np.arange(CLIENTS + 1) * EVENTS, features, no_labels, log=log)


TRUTH = float(TARGET @ [0.45, 0.5, 0.4])


def _errors(model, **log):
    found = []
    for seed in range(DRAWS):
        split = _log(seed, **log)
        records = records_of(split, Fixed(), ACTIONS, rewards=model(split, ACTIONS))
        estimates = estimate(records, BOTH, bootstrap=Bootstrap(2))
        found.append([estimates[name].value - TRUTH for name in ("dm", "dr")])
    values = np.array(found)
    return values, values.mean(axis=0), values.std(axis=0, ddof=1) / np.sqrt(DRAWS)


def test_doubly_robust_is_unbiased_with_a_right_and_with_a_wrong_model():
    for hidden in (False, True):
        _, bias, error = _errors(linear_rewards, hidden=hidden)
        assert abs(bias[1]) < 3 * error[1]


def _rare_rewards(seed):
    """Rewards so rare that a linear model predicts less than none in many contexts, and the truth of playing any."""
    rng = np.random.default_rng(seed)
    n, features, logging = 2000, 6, np.array([0.6, 0.1, 0.1, 0.1, 0.1])
    x = rng.standard_normal((n, features))
    means = 1 / (
        1 + np.exp(4 - x @ np.random.default_rng(100).standard_normal((features, len(logging))))
    )
    actions = rng.choice(len(logging), n, p=logging)
    rewards = (rng.random(n) < means[np.arange(n), actions]).astype(float)
    no_labels = Ragged(np.zeros(n + 1, np.int64), np.empty(0, np.int32))
    log = Log(actions.astype(np.int32), rewards, logging[actions])
    ids = np.array([f"{c:03d}".encode() for c in range(100)])
    return Split(ids, np.arange(101) * 20, x.astype(np.float32), no_labels, log=log), float(
        means.mean()
    )


def test_doubly_robust_stays_unbiased_where_the_bound_needs_predictions_in_a_range():
    """Cut after averaging, `predicted` and `expected` would no longer belong together: the estimate was a fifth low."""
    errors, cut = [], 0
    for seed in range(DRAWS):
        split, truth = _rare_rewards(seed)
        model = linear_rewards(split, 5)
        cut += int((model(np.arange(split.num_examples)) < 0).sum())
        records = records_of(split, Uniform(), 5, rewards=model, within=(0.0, 1.0))
        assert records.predicted.min() >= 0
        found = estimate(
            records,
            {"dr": DoublyRobustEstimator()},
            bootstrap=Bootstrap(1),
            within=Range(0, 1, 0.1),
        )
        errors.append(found["dr"].value - truth)
    assert cut > 0.1 * DRAWS * 2000 * 5
    assert abs(np.mean(errors)) < 3 * np.std(errors, ddof=1) / np.sqrt(DRAWS)


def test_the_bound_is_refused_for_predictions_outside_its_range():
    split, _ = _rare_rewards(0)
    records = records_of(split, Uniform(), 5, rewards=linear_rewards(split, 5))
    with pytest.raises(ConfigError, match=r"predicted rewards leave the range \[0, 1\]"):
        estimate(records, BOTH, within=Range(0, 1, 0.1))


def test_the_direct_method_errs_upwards_where_the_log_knew_more_than_the_model():
    """The log takes actions where they pay, so what it earned with them is more than they earn at large."""
    _, bias, error = _errors(linear_rewards, hidden=True)
    assert bias[0] > 3 * error[0]


def test_looking_at_contexts_takes_the_bias_away_and_some_of_the_variance():
    plain, plain_bias, _ = _errors(action_means)
    fitted, fitted_bias, _ = _errors(linear_rewards)
    assert abs(fitted_bias[0]) < 0.2 * plain_bias[0]
    assert fitted[:, 1].std() < plain[:, 1].std()


def test_clients_sums_add_up_to_the_model_of_all():
    split = _log(0)
    columns = choose_columns(split, ACTIONS)

    def sums(rows):
        log = split.log
        return linear_sums(
            columns.features(split.shared(rows)), log.actions[rows], log.rewards[rows], ACTIONS
        )

    each = [sums(np.arange(split.offsets[c], split.offsets[c + 1])) for c in range(CLIENTS)]
    whole = sums(np.arange(split.num_examples))
    np.testing.assert_allclose(reduce(add, each).fitted(), whole.fitted(), rtol=1e-9)
    assert each[0].gram.shape == (ACTIONS, 3, 3)


def test_sparse_contexts_give_the_same_model_as_dense_ones():
    rows = np.arange(200)
    dense, sparse = (
        linear_rewards(_log(1, sparse=sparse), ACTIONS)(rows) for sparse in (False, True)
    )
    np.testing.assert_allclose(dense, sparse, rtol=1e-6)


def test_a_client_is_predicted_from_others_alone():
    """Another reward of one client changes the predictions for the other half, and none of its own half's."""
    split = _log(2)
    before = linear_rewards(split, ACTIONS)(np.arange(split.num_examples))
    split.log.rewards[:EVENTS] += 5.0  # of client 0
    change = np.abs(linear_rewards(split, ACTIONS)(np.arange(split.num_examples)) - before).max(
        axis=1
    )
    half = np.repeat(np.arange(CLIENTS) % 2, EVENTS)
    assert change[half == 0].max() == 0
    assert change[half == 1].min() > 0


def test_it_is_the_default_where_there_are_contexts():
    split = _log(3)
    rows = np.arange(50)
    assert np.array_equal(
        _reward_model(_Opened(split, ("a", "b", "c")), "auto")(rows),
        linear_rewards(split, ACTIONS)(rows),
    )
    bare = Split(
        split.client_ids, split.offsets, np.empty((split.num_examples, 0), np.float32), split.labels
    )
    bare = Split(bare.client_ids, bare.offsets, bare.features, bare.labels, log=split.log)
    assert np.array_equal(
        _reward_model(_Opened(bare, ("a", "b", "c")), "auto")(rows),
        action_means(bare, ACTIONS)(rows),
    )
    with pytest.raises(ConfigError, match="linear needs contexts"):
        _reward_model(_Opened(bare, ("a", "b", "c")), "linear")


def test_wide_contexts_are_cut_to_what_varies():
    rng = np.random.default_rng(0)
    split = _log(4)
    wide = rng.random((split.num_examples, 600)).astype(np.float32) * np.linspace(
        0, 1, 600, dtype=np.float32
    )
    columns = choose_columns(
        Split(split.client_ids, split.offsets, wide, split.labels, log=split.log), 200
    )
    assert len(columns.chosen) == 101  # 200 actions: about two million numbers in all
    assert columns.chosen.min() > 400
