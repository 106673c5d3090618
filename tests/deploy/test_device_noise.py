"""Noise that devices add themselves: how much, towards whom it counts, and who refuses when."""

import math

import numpy as np
import pytest
from network_builders import a_deployment, values
from release_attacks import dataset_in_memory
from secure_builders import SECURE, SURVIVORS, TRAINING, a_network, a_server

from fedbandit.assembly.experiment import build_experiment
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError, DataError
from fedbandit.deploy.device.device_identity import MostAgreed, Terms, Turns
from fedbandit.deploy.masking.announcements import in_order
from fedbandit.deploy.masking.masked_sum import Held, vouch
from fedbandit.deploy.secure_sums import RANGE, STEP
from fedbandit.privacy.accounting import plan_epsilon
from fedbandit.privacy.discrete import DeviceNoise, gaussian_epsilon, sum_divergence
from fedbandit.privacy.noise import SECURE as GRID
from fedbandit.privacy.reporting import in_one_line, known_cohorts, summary

NOISE = {
    "mechanism": "dp-fedavg", "noise_multiplier": 2.0, "sampling": "fixed", "noise": "devices",
    "dropout": 0.2, "colluders": 0.1,
}  # fmt: skip


def noisy_values(number=10, **changes):
    rules = {**SECURE, "population": 2 * number, "min_reach": 0.0}
    chosen = {"clients_per_round": number, "privacy": {**NOISE, **changes}}
    return values(**rules) | chosen


def test_honest_survivors_make_up_the_plans_noise_and_no_more_is_counted():
    tolerance = DeviceNoise(0.2, 0.1)
    for cohort in (10, 64, 2560):
        share = tolerance.share(cohort, 3.0)
        assert math.sqrt(tolerance.honest(cohort)) * share == pytest.approx(3.0)
        assert math.sqrt(cohort) * share == pytest.approx(3.0 * tolerance.excess(cohort))
    assert tolerance.excess(2560) == pytest.approx(math.sqrt(1 / 0.7), rel=1e-3)


def test_sums_of_shares_are_discrete_gaussian_up_to_the_bound():
    """tau bounds how far logarithms of probabilities are apart, counted out for two devices."""
    for deviation in (0.75, 0.9, 1.1):
        points = np.arange(-60, 61)
        one = np.exp(-(points**2) / (2 * deviation**2))
        both = np.convolve(one / one.sum(), one / one.sum(), "same")
        wide = np.exp(-(points**2) / (4 * deviation**2))
        near = np.abs(points) < 8
        apart = np.abs(np.log(both[near] / (wide[near] / wide.sum()))).max()
        assert 0 < apart <= sum_divergence(deviation, 2)
    assert sum_divergence(0.1 / math.sqrt(260_000) / GRID.step, 260_000) == 0.0


def test_epsilon_towards_the_server_counts_turns_without_amplification(tmp_path):
    chosen = noisy_values(sampling="poisson") | {"rounds": 4}
    chosen["deployment"] |= {"population": 10_000, "min_reach": 1.0, "max_dropout": 0.0}
    chosen["clients_per_round"] = 100
    deployment = a_deployment(tmp_path, chosen)
    found = deployment.spent(4, False)["privacy"]
    plan = deployment.ledger.plan
    server = found["towards_server"]
    assert server["epsilon_rdp"] == pytest.approx(plan_epsilon(known_cohorts(plan)))
    assert server["epsilon_rdp"] > found["epsilon_rdp"]  # readers: amplified
    assert server["turns"] == 4
    assert (server["dropout"], server["colluders"]) == (0.2, 0.1)
    assert "at most 20%" in server["holds"]
    assert "10% work with the server" in server["holds"]
    assert "towards the server" in in_one_line(found)
    assert "towards a server that only listens" in server["holds"]
    assert "25 devices (secure_shares)" in server["holds"]
    assert deployment.terms["privacy"]["epsilon"] == server["epsilon_rdp"]


@pytest.mark.parametrize(
    ("cohort", "shares", "acts"), [(25, 25, True), (26, 25, False), (26, 27, True)]
)
def test_towards_a_server_that_acts_epsilon_is_stated_for_small_rounds_alone(
    tmp_path, cohort, shares, acts
):
    """A device checks the keys of so many devices; of a larger round the server may invent some."""
    chosen = noisy_values() | {"rounds": 4, "clients_per_round": cohort}
    chosen["deployment"] |= {"population": 200, "secure_shares": shares, "min_reports": 15}
    deployment = a_deployment(tmp_path, chosen)
    found = deployment.spent(4, False)["privacy"]
    holds = found["towards_server"]["holds"]
    assert ("towards a server that acts, too" in holds) == acts
    assert ("towards a server that only listens" in holds) != acts
    assert ("towards the server if it only listens" in in_one_line(found)) != acts


def sums_seen(monkeypatch, server):
    """What the server reads out of each sum, before it does anything with it."""
    seen, read = [], server._gathering._read

    def spied(attempt, levels, devices):
        seen.append((levels.copy(), devices))
        return read(attempt, levels, devices)

    monkeypatch.setattr(server._gathering, "_read", spied)
    return seen


def test_a_server_sees_noisy_sums_and_adds_no_noise(tmp_path, monkeypatch):
    deployment, grid, _ = a_network(tmp_path, 10, noisy_values())
    server = a_server(deployment, grid)
    seen = sums_seen(monkeypatch, server)
    for _ in range(4):
        assert server.attempt() is not None
    steps = np.concatenate([
        (levels - devices * round(RANGE / STEP) + GRID.modulus // 2) % GRID.modulus
        - GRID.modulus // 2
        for levels, devices in seen
    ])  # fmt: skip
    tail = np.concatenate([part[-5:] for part in np.split(steps, len(seen))])
    assert not tail.any()  # no count, no reward, no propensity
    updates = np.concatenate([part[:-5] for part in np.split(steps, len(seen))]) * GRID.step
    stated = NOISE["noise_multiplier"] * DeviceNoise(0.2, 0.1).excess(10)
    assert 0.8 * stated < updates.std() < 1.25 * stated
    # The model moves by the sum that was seen: nothing is added to it.
    first = (seen[0][0] - 10 * round(RANGE / STEP))[:-5]
    moved = GRID.centred(first) * GRID.step / 10
    again = a_deployment(tmp_path / "again", noisy_values())
    mean = again.server(again.noise(0, {})).aggregation.mean(first, 10, 1, 1.0)
    np.testing.assert_allclose(mean, moved.astype(np.float32), rtol=1e-6)


def test_noise_covers_every_part_of_what_is_sent(tmp_path, monkeypatch):
    chosen = noisy_values() | {"algorithm": {"name": "diag-newton"}}
    deployment, grid, _ = a_network(tmp_path, 10, chosen)
    server = a_server(deployment, grid)
    seen = sums_seen(monkeypatch, server)
    assert all(server.attempt() is not None for _ in range(2))
    (first, _), (second, _) = seen
    changes = GRID.centred((second - first) % GRID.modulus)[:-5] * GRID.step
    stated = NOISE["noise_multiplier"] * DeviceNoise(0.2, 0.1).excess(10)
    curvature = np.split(changes, 2)[1]  # the same events: nothing but noise differs
    assert 0.6 * np.sqrt(2) * stated < curvature.std() < 1.5 * np.sqrt(2) * stated


def test_with_more_drop_out_than_stated_nothing_is_unmasked(tmp_path, monkeypatch, caplog):
    deployment, grid, _ = a_network(tmp_path, 10, noisy_values())
    server = a_server(deployment, grid)
    seen = sums_seen(monkeypatch, server)
    grid.lost = {(node, TRAINING) for node in list(grid.contexts)[:3]}
    assert server.attempt() is not None  # those who are left try again, with shares for seven
    assert "7 of 10 devices are left, and it takes the noise of 8 (privacy.dropout)" in caplog.text
    assert [devices for _, devices in seen] == [7]
    share = DeviceNoise(0.2, 0.1)
    assert share.honest(7) < share.honest(10)


def test_a_device_signs_no_survivors_whose_noise_is_too_little():
    held = Held(
        token="t", node=1, sign=bytes(32), common=bytes(32), threshold=2, share=b"", shares={},
        signers={}, least=8,
    )  # fmt: skip
    with pytest.raises(
        DataError, match="the noise of fewer than 8 is less than this device agreed"
    ):
        vouch(held, in_order(range(1, 8)))


def test_a_server_that_acts_cannot_have_fewer_sign(tmp_path):
    """It leaves its own check out and asks for the survivors all the same: devices refuse."""
    deployment, grid, _ = a_network(tmp_path, 10, noisy_values())
    server = a_server(deployment, grid)
    server._gathering._tolerance = None
    grid.lost = {(node, TRAINING) for node in list(grid.contexts)[:3]}
    server.attempt()
    said = [
        str(message.content)
        for _, step, message in grid.received
        if step == SURVIVORS
    ]  # fmt: skip
    assert any("less than this device agreed to" in text for text in said)


TERMS = {"rounds": 4, "separation": 1, "turns": 4, "epsilon": 4.2, "delta": 1e-6}
ADDED = {"noise": 2.0, "dropout": 0.2, "colluders": 0.1}


def test_a_device_computes_what_noise_is_worth():
    right = gaussian_epsilon(2.0, 4, 1e-6)
    Terms(**TERMS | ADDED | {"epsilon": right})
    with pytest.raises(ValueError, match=r"worth epsilon 5\.\d+, not 4\.2"):
        Terms(**TERMS | ADDED)
    with pytest.raises(ValueError, match="leave some honest"):
        Terms(**TERMS | ADDED | {"dropout": 0.95, "epsilon": None})


@pytest.mark.parametrize(
    ("name", "value"), [("noise", 1.0), ("dropout", 0.1), ("colluders", 0.0), ("noise", None)]
)
def test_less_than_was_agreed_is_refused(name, value):
    right = {**TERMS, **ADDED, "epsilon": None}
    turns = Turns(Terms(**right))
    with pytest.raises(DataError, match=f"more than this device agreed to: {name}"):
        turns.after(1, Terms(**{**right, name: value}))
    assert turns.agreed.tolerance == DeviceNoise(0.2, 0.1)


def test_an_app_bounds_epsilon_towards_the_server():
    right = {**TERMS, **ADDED, "epsilon": gaussian_epsilon(2.0, 4, 1e-6)}
    with pytest.raises(DataError, match="agrees to at most 1"):
        MostAgreed(epsilon=1.0).agreed(None, Terms(**right))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mechanism": "dp-ftrl", "sampling": None}, "privacy.mechanism: .* independent"),
        ({"figures_share": 0.1}, "privacy.figures_share: .* nothing else"),
        ({"accountant": "pld"}, "privacy.accountant"),
        ({"dropout": 0.95}, "privacy.dropout: .* honest"),
        ({"colluders": 0.4}, "privacy.colluders: from 0 to below a third"),
        ({"noise": "system"}, "privacy.dropout: .* noise = .devices."),
    ],
)
def test_what_devices_noise_does_not_cover_is_refused(tmp_path, change, said):
    with pytest.raises(ConfigError, match=said):
        a_deployment(tmp_path, noisy_values(**change))


def test_it_needs_secure_sums_and_a_fixed_clip_norm(tmp_path):
    chosen = noisy_values()
    chosen["deployment"] |= {"secure_aggregation": False}
    with pytest.raises(ConfigError, match="secure_aggregation: missing"):
        a_deployment(tmp_path, chosen)
    with pytest.raises(ConfigError, match=r"clipping\.norm: missing"):
        a_deployment(tmp_path, noisy_values() | {"clipping": {}})


def test_simulations_draw_all_shares_at_once():
    config = Config.build(
        {
            "scenario": "scratch",
            "rounds": 2,
            "clients_per_round": 10,
            "clipping": {"norm": 1.0},
            "client": {"learning_rate": 0.1},
            "privacy": NOISE,
        }
    )
    data = dataset_in_memory(np.ones((40, 500), np.float32), [[0]] * 40, np.arange(41), 2)
    experiment = build_experiment(config, data)
    mean, excess = experiment.bandit.aggregation, DeviceNoise(0.2, 0.1).excess(10)
    released = mean.mean(np.zeros(20_000, np.int64), 10, 1, 1.0) * 10
    assert released.std() == pytest.approx(2.0 * excess, rel=0.03)
    assert experiment.secret is not None
    assert summary(experiment.privacy, 2)["towards_server"]["turns"] == 2
