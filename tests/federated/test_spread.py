"""The figures of a round that say how it spreads over clients are numpy's, to the last bit."""

import numpy as np
import pytest

from fedbandit.federated.round import _PERCENTS, _median, _quantile


@pytest.mark.parametrize("clients", [1, 2, 3, 7, 64, 65])
def test_quantiles_and_median_are_those_of_numpy(clients):
    rng = np.random.default_rng(clients)
    for values in (
        rng.random(clients),
        rng.integers(0, 3, clients) / 7,
        1e9 * rng.normal(size=clients),
    ):
        ordered = np.sort(values).tolist()
        assert [_quantile(ordered, p / 100) for p in _PERCENTS] == np.quantile(
            values, np.array(_PERCENTS) / 100
        ).tolist()
        assert _median(ordered) == np.median(values)


def test_nothing_has_no_median():
    assert _median([]) is None
