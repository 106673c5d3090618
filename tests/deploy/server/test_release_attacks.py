"""What a private server publishes gives no sum away: not by the low bits of its numbers."""

import numpy as np
import pytest
from network_builders import a_deployment, values
from release_attacks import (
    PRIVACY,
    figures_of_a_deployment,
    gaussian_delta,
    impossible_with,
    possible_sums,
)

from fedbandit.deploy.server.figures import RoundNoise
from fedbandit.federated.pipeline import clipped_sum


@pytest.mark.parametrize("mechanism", PRIVACY)
def test_published_figures_do_not_give_the_exact_sum_back(tmp_path, mechanism):
    for published, unit, true in figures_of_a_deployment(tmp_path, mechanism):
        assert possible_sums(published, unit, 1000) != [true]


@pytest.mark.parametrize("mechanism", PRIVACY)
def test_the_stream_of_noised_figures_does_not_either(tmp_path, mechanism):
    """Float32 weights. Every whole number is as possible as any other: none is singled out."""
    given = {"noise_multiplier": 6.0, "figures_share": 0.1, **PRIVACY[mechanism]}
    chosen = {"rounds": 100, "clients_per_round": 9, "privacy": given}
    deployment = a_deployment(tmp_path, values(population=27, max_events=100) | chosen)
    plan, bounds, rng = deployment.ledger.plan, deployment.rules.bounds, np.random.default_rng(0)
    memory, recovered, grid = {}, 0, 0
    for number in range(1, 101):
        noise = RoundNoise(plan, number, memory, deployment.noise)
        noise.weights.update(number, np.zeros(1))
        true = int(rng.integers(0, 901))
        noised = noise.figures(np.full(3, true), bounds)
        unit = noised.deviations[0] / np.sqrt(plan.noise_variances[0, number - 1])
        recovered += possible_sums(noised.sums[0], unit, 900) == [true]
        memory = noise.memory
        # What every reader knows of the grid rules nothing out.
        step = unit / (plan.noise_multiplier * 2**34)
        off = (noised.sums[0] - np.arange(901)) / step
        grid += np.abs(off - np.rint(off)).max() < 1e-3
    assert recovered <= 1
    assert grid == 100


@pytest.mark.parametrize("noise", [1.0, 2.0, 4.0])
def test_low_bits_of_the_weights_do_not_show_that_a_client_was_there(tmp_path, noise):
    """A client that owns a coordinate, 20,000 times. Releases without it that float32 could not have
    made with it are as likely with it as the noise promises: none tells for sure."""
    given = {"mechanism": "dp-fedavg", "noise_multiplier": noise, "sampling": "fixed"}
    chosen = {"rounds": 4, "clients_per_round": 4, "privacy": given}
    deployment = a_deployment(tmp_path, values(population=4) | chosen)
    flagged = []
    for update in (0.0, 1.0):
        server, like = deployment.server(deployment.noise(0, {})), np.zeros(20_000, np.float32)
        total = clipped_sum([(np.full_like(like, update), 1.0)], like, 1.0, deployment.grid.step)
        released = server.aggregation.mean(total, 1, 1, 1.0)
        assert released.dtype == np.float32
        flagged.append(impossible_with(released, 4, 1.0).mean())
    without, with_it = flagged
    epsilon = 4 / noise
    promised = np.exp(epsilon) * with_it + gaussian_delta(epsilon, noise)
    assert without <= promised + 5 * np.exp(epsilon) * np.sqrt(with_it / 20_000)
