"""What a private server publishes gives no sum away: not by the low bits of its numbers."""

import numpy as np
import pytest
from network_builders import Network, a_deployment, coordinator, devices, settle, values
from release_attacks import (
    PRIVACY,
    figures_of_a_deployment,
    impossible_with,
    most_without,
    possible_sums,
)

from fedbandit.deploy.server.private_metrics import RoundNoise
from fedbandit.federated.pipeline import add_steps


@pytest.mark.parametrize("mechanism", PRIVACY)
def test_published_figures_do_not_give_the_exact_sum_back(tmp_path, mechanism):
    found = figures_of_a_deployment(tmp_path, mechanism)
    recovered = sum(possible_sums(sum_, unit, 1000) == [true] for sum_, unit, true in found)
    assert recovered <= 1  # of three; a single one happens by chance, once in a thousand times


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
        noise.weights.update(number, np.zeros(1, np.float32))
        true = int(rng.integers(0, 901))
        noised = noise.figures(np.full(3, true), bounds)
        unit = noised.deviations[0] / np.sqrt(plan.noise_variances[0, number - 1])
        recovered += possible_sums(noised.sums[0], unit, 900) == [true]
        memory = noise.memory
        # What every reader knows of the grid rules nothing out.
        step = unit / (plan.noise_multiplier * 2**34)
        off = (noised.sums[0] - np.arange(901)) / step
        grid += np.abs(off - np.rint(off)).max() < 1e-3
    assert recovered <= 5  # by chance
    assert grid == 100


@pytest.mark.parametrize("noise", [1.0, 2.0, 4.0])
def test_low_bits_of_the_weights_do_not_show_that_a_client_was_there(tmp_path, noise):
    """A client that owns a coordinate, 20,000 times: what float32 could not have made with it comes
    about with it as often as the noise promises, and tells nothing for sure."""
    given = {"mechanism": "dp-fedavg", "noise_multiplier": noise, "sampling": "fixed"}
    chosen = {"rounds": 4, "clients_per_round": 4, "privacy": given}
    deployment = a_deployment(tmp_path, values(population=4) | chosen)
    flagged = []
    for update in (0.0, 1.0):
        server, like = deployment.server(deployment.noise(0, {})), np.zeros(20_000, np.float32)
        total = np.zeros(like.shape, np.int64)
        add_steps(total, np.full_like(like, update), 1.0, deployment.grid.step)
        released = server.aggregation.mean(total, 1, 1, 1.0)
        assert released.dtype == np.float32
        flagged.append(impossible_with(released, 4, 1.0).mean())
    without, with_it = flagged
    assert 0 < without <= most_without(with_it + 5 * np.sqrt(with_it / 20_000), noise)


@pytest.mark.parametrize("private", [False, True])
def test_in_a_plain_round_a_device_sends_one_update_and_sums_and_hears_of_no_other(
    tmp_path, private
):
    """Contexts, actions and single rewards stay; requests name no device."""
    given = {"mechanism": "dp-fedavg", "noise_multiplier": 1.0, "sampling": "fixed"}
    chosen = {"clients_per_round": 4} | ({"privacy": given} if private else {})
    deployment = a_deployment(tmp_path, values(population=4) | chosen)
    network = Network(devices(tmp_path, 4))
    settle(deployment, network.participants)
    coordinator(deployment, network).run(2)
    trained = [reply for reply in network.received if "update" in reply.arrays]
    assert len(trained) == 8
    sums = {"since", "upto", "events", "reward_sum", "propensity_sum", "unclipped", "by_version"}
    about = {"device", "version", "token", "trained", "protocol", "seen"}
    for reply in trained:
        assert set(reply.arrays) == {"update"}
        assert set(reply.facts) <= sums | about
    names = {reply.facts["device"] for reply in trained}
    assert len(names) == 4
    for request in network.sent:
        assert not any(name in repr(request.facts) for name in names)
        assert set(request.arrays) <= {"weights", "model"}
