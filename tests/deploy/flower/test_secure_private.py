"""Secure aggregation with differential privacy: only sums are seen, and what comes of them is as private as planned."""

from dataclasses import replace

import numpy as np
import pytest
from network_builders import a_deployment, live, values

pytest.importorskip("flwr")

from secure_builders import (
    FIRST,
    TRAINING,
    UNMASKING,
    a_network,
    a_server,
    lines_of,
    own_parts,
    secure_values,
)
from simulated_devices import (
    CLIENTS,
    SECURE_TRAINING,
    deployment_values,
    experiment,
    live_a_period,
    open_agent,
)
from test_agreement import simulated_round
from test_secure_server import added

from fedbandit.core.errors import ConfigError
from fedbandit.deploy.flower.transport import from_records
from fedbandit.deploy.secure_sums import LEVELS, STEP, update_error
from fedbandit.deploy.server.deployment import build_deployment
from fedbandit.deploy.server.gathering import OlderThanSeen
from fedbandit.deploy.server.private_metrics import RoundNoise, reported_with_noise
from fedbandit.deploy.server.secure_gathering import SecureSums
from fedbandit.deploy.server.status import read_status
from fedbandit.deploy.server.store import Store, read_ledger
from fedbandit.privacy.noise import SECURE, GridMean, GridNoise

FIXED = {"mechanism": "dp-fedavg", "noise_multiplier": 0.5, "sampling": "fixed"}
TURNS = {"mechanism": "dp-ftrl", "noise_multiplier": 0.5, "sampling": "min-separation"}


def private_values(privacy=FIXED, population=5, clients=5, rounds=4, **rules):
    given = secure_values(population=population, min_reach=0.0, **rules)
    return {**given, "privacy": privacy, "clients_per_round": clients, "rounds": rounds}


@pytest.fixture
def known_noise(monkeypatch):
    """The noise of every round, as it was added to the sum of whole steps."""
    drawn, draw = [], GridNoise.update

    def update(self, number, like):
        drawn.append(draw(self, number, like))
        return drawn[-1]

    monkeypatch.setattr(GridNoise, "update", update)
    return drawn


@pytest.fixture
def seen(monkeypatch):
    """What the server learns in every round, before there is noise on it: metrics do not say."""
    found, gather = [], SecureSums.gather

    def recorded(self, *args):
        found.append(gather(self, *args))
        return found[-1]

    monkeypatch.setattr(SecureSums, "gather", recorded)
    return found


def make_idle(participant):
    participant.agent.close()
    (participant.agent.folder / "events.sqlite").unlink()


@pytest.mark.parametrize("clip_norm", [1.0, 0.05])
def test_a_private_secure_round_is_the_central_sum_and_the_noise_that_was_drawn(
    tmp_path, known_noise, clip_norm
):
    given = {**private_values(), "clipping": {"norm": clip_norm}}
    deployment, grid, participants = a_network(tmp_path, given=given)
    parts = own_parts(deployment, participants)  # for a clip norm of 1
    norms = [max(1.0, np.linalg.norm(update) / clip_norm) for _, update in parts]
    expected = sum(update / norm for (_, update), norm in zip(parts, norms, strict=True))
    server = a_server(deployment, grid)
    metrics = server.attempt()
    [noise] = known_noise
    assert np.abs(noise).max() > 0.1 / STEP
    moved = (server.state.weights - deployment.initial).astype(np.float64) * 5
    bound = (
        2 * update_error(5, clip_norm) * np.sqrt(24) + 1e-6
    )  # rounded, and clipped to a little less
    np.testing.assert_allclose(moved, expected + noise * STEP * clip_norm, atol=bound, rtol=0)
    assert metrics["epsilon"] == pytest.approx(deployment.ledger.epsilon(1))
    assert metrics["clients"] == 5


@pytest.mark.parametrize(
    ("mechanism", "more"),
    [
        ("dp-fedavg", {}),
        ("dp-ftrl", {}),
        ("blt", {}),
        ("banded-mf", {"sampling": "min-separation", "separation": 1}),
    ],
)
def test_each_round_is_the_simulators_up_to_rounding_and_the_noise_that_was_drawn(
    tmp_path, known_noise, mechanism, more
):
    rounds, clipping = 3, {"clipping": {"norm": 0.3}}
    privacy = {"mechanism": mechanism, "noise_multiplier": 0.5, "sampling": "fixed", **more}
    rules = {**secure_values(population=4)["deployment"], "min_reach": 0.0}
    rules = {key: value for key, value in rules.items() if key not in ("state", "actions", "shape")}
    given, words = deployment_values(
        rounds, "server", rules, **SECURE_TRAINING, **clipping, privacy=privacy
    )
    (tmp_path / "words.txt").write_text("\n".join(words))
    deployment, simulated = (
        build_deployment(given, tmp_path),
        experiment(rounds, **SECURE_TRAINING, **clipping),
    )
    from secure_builders import RecordingGrid

    from fedbandit.deploy.flower.client_app import make_client_app

    app = make_client_app(
        open_agent=lambda context: open_agent(
            context.node_config["agent-dir"], context.node_config["client"]
        ),
        after_install=lambda agent, context: live_a_period(
            agent, context.node_config["client"], simulated
        ),
        secure_aggregation=True,
    )
    given = {"unsigned-keys": True}
    configs = [
        {"agent-dir": str(tmp_path / f"device-{client}"), "client": client, **given}
        for client in CLIENTS
    ]
    server = a_server(deployment, RecordingGrid(app, configs))
    for _ in range(rounds):
        before = server.state
        assert server.attempt()["clients"] == len(CLIENTS)
        expected = simulated_round(before, rounds, **SECURE_TRAINING, **clipping)
        noise = known_noise[-1] * STEP * 0.3 / len(CLIENTS)
        bound = 2 * update_error(1, 0.3) * np.sqrt(noise.size) + 1e-6
        np.testing.assert_allclose(
            server.state.weights, expected.weights + noise, atol=bound, rtol=0
        )
    assert len(known_noise) == rounds


def test_epsilon_in_the_status_is_the_plans(tmp_path):
    deployment, grid, _ = a_network(tmp_path, given=private_values())
    a_server(deployment, grid).run()
    status = read_status(deployment.folder)
    assert status["round"] == 4
    assert status["privacy"]["epsilon_rdp"] == deployment.ledger.epsilon(4)
    assert status["privacy"]["epsilon_pld"] is None
    assert status["secure_aggregation"] is True


def test_correlated_noise_is_whole_and_goes_on_after_a_restart(tmp_path):
    """Over eight rounds the noise of a tree is that of one node, if its memory has survived."""
    privacy = {**TURNS, "sampling": "fixed", "noise_multiplier": 1000.0}
    deployment, grid, _ = a_network(tmp_path, given=private_values(privacy, rounds=8))
    total = np.zeros(24)
    for number in range(1, 9):
        store = Store(deployment.folder)
        server = a_server(deployment, grid, store)
        steps = [each * (1000.0 / SECURE.step) for each in server._memory.values()]
        assert all(np.abs(each - np.rint(each)).max() < 1e-3 for each in steps)
        assert bool(server._memory) is (number > 1)
        before = server.state.weights
        server.attempt()
        total += 5 * (server.state.weights - before).astype(np.float64)
        store.close()
    # eight independent rounds would have a deviation of 1000 * sqrt(8); the tree's root has 1000
    assert 500 < total.std() < 1700


def test_devices_without_events_send_zeros_and_nobody_can_tell_them_from_others(
    tmp_path, known_noise, seen
):
    deployment, grid, participants = a_network(tmp_path, given=private_values())
    parts = own_parts(deployment, participants)
    for participant in participants[3:]:
        make_idle(participant)
    store = Store(deployment.folder)
    server = a_server(deployment, grid, store)
    metrics = server.attempt()
    assert (seen[0].accepted, seen[0].idle, seen[0].events) == (3, 2, 18)
    assert (metrics["asked"], metrics["clients"], metrics["idle"], metrics["events"]) == (
        5,
        5,
        None,
        None,
    )
    moved = (server.state.weights - deployment.initial).astype(np.float64) * 5
    expected = sum(update for _, update in parts[:3]) + known_noise[0] * STEP
    np.testing.assert_allclose(moved, expected, atol=20 * update_error(5, 1.0), rtol=0)
    said = [
        set(from_records(m.content)[0].items()) for _, step, m in grid.received if step == "ready"
    ]
    assert len(said) == 5
    assert all(("ready", True) in facts for facts in said)
    by_step = [step for _, step, _ in grid.received]
    assert {by_step.count(step) for step in by_step} == {
        5
    }  # each answers every step, the install included
    marks = store.marks(
        [p._card.read_text().split('"device": "')[1].split('"')[0] for p in participants]
    )
    assert [mark.turn for mark in marks.values()] == [1] * 5


def test_what_fails_on_a_devices_log_counts_as_nothing_and_not_as_a_drop_out(
    tmp_path, monkeypatch, caplog, seen
):
    """Otherwise a device's data would decide whether it is in the sum, and whether there is one."""
    from fedbandit.deploy.device.participant import Participant

    deployment, grid, participants = a_network(
        tmp_path, number=3, given=private_values(population=3, clients=3)
    )
    fit, folder = Participant._fit, participants[0].agent.folder

    def fails(self, *args):
        if self.agent.folder == folder:
            raise ValueError("the update is not finite")
        return fit(self, *args)

    monkeypatch.setattr(Participant, "_fit", fails)
    a_server(deployment, grid).attempt()
    assert (seen[0].accepted, seen[0].idle, seen[0].refused) == (2, 1, {})
    assert "this device answers as with an empty log: the update is not finite" in caplog.text


def test_a_device_that_does_not_know_of_zeros_takes_no_part(tmp_path, monkeypatch, caplog):
    from fedbandit.deploy.device import device_identity as instructions

    monkeypatch.setattr(instructions, "_UNDERSTOOD", instructions._UNDERSTOOD - {"zeros"})
    deployment, grid, _ = a_network(tmp_path, given=private_values())
    assert a_server(deployment, grid).attempt() is None
    assert (
        caplog.text.count(
            "refused: could not train: the server's request: required: 'zeros', which this"
        )
        == 5
    )


def test_a_round_without_privacy_does_not_ask_for_zeros(tmp_path):
    deployment, grid, _ = a_network(tmp_path)
    said = []
    grid.push_messages = lambda messages, push=grid.push_messages: (
        said.extend(messages) or push(messages)
    )
    a_server(deployment, grid).attempt()
    assert not any("zeros" in from_records(message.content)[0] for message in said)


def test_devices_rest_between_their_turns_whether_or_not_they_had_anything_to_train_on(tmp_path):
    """Nine devices, three of them idle, in blocks of three: each has its turn in every third round from its first."""
    privacy = {**TURNS, "separation": 3}
    given = private_values(privacy, population=9, clients=3, rounds=6)
    deployment, grid, participants = a_network(tmp_path, number=9, given=given)
    for participant in participants[::3]:
        make_idle(participant)
    server = a_server(deployment, grid)
    server._select = lambda _, nodes, number: list(nodes)[:3]
    asked = []
    for _ in range(6):
        before = len(grid.steps)
        assert server.attempt()["refused"] == {}
        asked.append({node for node, step in grid.steps[before:] if step == TRAINING})
    assert asked[0] | asked[1] | asked[2] == set(grid.contexts)
    assert asked == asked[:3] * 2
    assert all(line["refused"] is None for line in lines_of(deployment))  # not for others


def test_a_device_under_another_node_is_refused_while_it_rests(tmp_path, caplog):
    privacy = {**TURNS, "separation": 2}
    deployment, grid, _ = a_network(
        tmp_path, number=3, given=private_values(privacy, population=6, clients=3)
    )
    server = a_server(deployment, grid)
    assert server.attempt()["clients"] == 3
    grid.contexts = {node + 50: context for node, context in grid.contexts.items()}
    for node, context in grid.contexts.items():
        context.__dict__["_node_id" if "_node_id" in context.__dict__ else "node_id"] = node
    assert server.attempt() is None  # nobody is left for this round
    assert caplog.text.count("not its turn") == 3
    assert "took part in round 1" in caplog.text


@pytest.mark.parametrize("entries", [slice(0, 20), slice(20, 24), slice(25, 28), slice(28, 29)])
def test_an_impossible_sum_is_brought_back_to_what_is_possible_and_not_refused(
    tmp_path, caplog, entries
):
    """A refusal would let one device more decide whether the others are revealed."""

    def lie(size):
        numbers = np.zeros(size)
        numbers[entries] = 2**37
        return numbers

    deployment, grid, _ = a_network(tmp_path, given=private_values({**FIXED, "figures_share": 0.2}))
    grid.broken = {(FIRST, TRAINING): added(lie)}
    server = a_server(deployment, grid)
    metrics = server.attempt()
    assert metrics is not None
    assert "refused" not in caplog.text
    assert metrics["update_norm"] * 5 < 3 * 5  # three times the clip norms of all five, at the most
    assert metrics["clients"] == 5
    assert metrics["reward"] is None or abs(metrics["reward"]) <= 1


def test_where_shares_are_lacking_those_who_are_left_try_again_among_themselves(tmp_path, caplog):
    """Seven devices, of which five would have to stay: the four that did make a sum of their own."""
    deployment, grid, _ = a_network(
        tmp_path, number=7, given=private_values(population=7, clients=7)
    )
    grid.lost = {(FIRST + i, TRAINING) for i in range(3)}
    metrics = a_server(deployment, grid).attempt()
    assert metrics["clients"] == 4
    assert "4 of 7 shares of node" in caplog.text
    assert "those who are left try again" in caplog.text


def test_too_few_devices_are_drawn_anew_and_nothing_is_spent(tmp_path, caplog):
    poisson = {"mechanism": "dp-fedavg", "noise_multiplier": 0.5}
    given = private_values(poisson, max_dropout=0.0)
    given["deployment"]["min_reach"] = (
        1.0  # all five are drawn: nobody decides whether there are three
    )
    deployment, grid, _ = a_network(tmp_path, given=given)
    server = a_server(deployment, grid)
    grid.lost = {(FIRST + i, TRAINING) for i in range(3)}
    assert server.attempt() is None
    assert "it is run again" in caplog.text
    assert read_ledger(deployment.folder / "ledger.jsonl") is None
    grid.lost = {(FIRST, UNMASKING)}
    assert server.attempt()["clients"] == 5
    assert read_ledger(deployment.folder / "ledger.jsonl").released == 1


def test_an_adaptive_clip_norm_follows_a_noisy_whole_count(tmp_path, monkeypatch):
    """Idle devices count for neither side; the noise of the count is the only other thing that moves the norm."""
    seen, share = [], GridMean.unclipped

    def unclipped(self, below, accepted, number):
        seen.append((below, accepted, share(self, below, accepted, number)))
        return seen[-1][-1]

    monkeypatch.setattr(GridMean, "unclipped", unclipped)
    monkeypatch.setattr(GridNoise, "whole_count", lambda self, deviation: 1)
    given = {
        **private_values({**FIXED, "noise_multiplier": 0.4}),
        "clipping": {"quantile": 0.5, "initial": 100.0},
    }
    deployment, grid, participants = a_network(tmp_path, given=given)
    make_idle(participants[4])
    server = a_server(deployment, grid)
    server.attempt()
    assert seen == [(4, 4, pytest.approx((2 * 4 - 4 + 1) / 10 + 0.5))]
    assert server.state.clip_norm < 100


@pytest.mark.parametrize(
    ("privacy", "rules", "message"),
    [
        (
            {"accountant": "pld", "epsilon": 5.0},
            {},
            "privacy.accountant: pld does not know the discrete noise",
        ),
        (
            {"sampling": "poisson"},
            {},
            "deployment.min_reports: a draw of fewer than 3 .* no number would do",
        ),
        (
            {},
            {"max_dropout": 0.1},
            "deployment.max_dropout: is for private secure sums with Poisson",
        ),
        (
            {"noise_multiplier": 1e6},
            {},
            "privacy.noise_multiplier: .* do not fit into one secure sum",
        ),
        ({}, {"report_goal": 4}, "deployment.report_goal: in a private deployment"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, privacy, rules, message):
    with pytest.raises(ConfigError, match=message):
        a_deployment(tmp_path, private_values({**FIXED, **privacy}, **rules))


def test_a_plan_whose_redraws_are_negligible_is_charged_for_them(tmp_path):
    """The documented plan: 15 devices are needed in a sum where 46 are expected at the least."""
    poisson = {"mechanism": "dp-fedavg", "epsilon": 4.0}
    rules = {"min_reports": 15, "min_reach": 0.9, "max_dropout": 0.2}
    given = private_values(poisson, population=342_477, clients=64, rounds=1600)
    given["deployment"] |= rules
    plan = a_deployment(tmp_path, given).ledger
    assert plan.redraws.connected == int(0.8 * np.ceil(0.9 * 342_477))
    charged = 1600 * plan.redraw_chance
    assert 0 < charged < 1e-8
    assert plan.epsilon(1600) == pytest.approx(4.0, rel=1e-3)
    assert replace(plan, redraws=None).epsilon(1600) < plan.epsilon(1600)
    given["deployment"]["min_reports"] = 20
    with pytest.raises(ConfigError, match=r"fewer than 20 .* at most 15 would do"):
        a_deployment(tmp_path, given)


@pytest.mark.parametrize("mechanism", ["dp-fedavg", "dp-ftrl", "banded-mf", "blt", "best"])
def test_every_mechanism_of_deployments_goes_with_secure_sums(tmp_path, mechanism):
    given = private_values(
        {"mechanism": mechanism, "epsilon": 8.0}, population=400, clients=20, rounds=10
    )
    if mechanism == "dp-fedavg":
        given["privacy"]["sampling"] = "min-separation"
    found = a_deployment(tmp_path, given)
    assert found.ledger.discrete is (mechanism in ("dp-fedavg", "dp-ftrl"))
    assert isinstance(found.noise(0, {}), GridNoise)
    assert found.ledger.plan.update_multiplier / STEP < 2**48
    assert found.promises()["secure aggregation"] is True
    assert LEVELS * STEP == 2


def test_rewards_are_counted_once_over_idle_and_failed_rounds(tmp_path, seen):
    deployment, grid, participants = a_network(tmp_path, given=private_values(rounds=6))
    server = a_server(deployment, grid)
    server.attempt()
    assert seen[-1].events == 30
    grid.lost = {(FIRST + i, TRAINING) for i in range(3)}
    live(participants[4], events=2, seed=3)
    assert server.attempt() is None
    grid.lost = set()
    server.attempt()
    server.attempt()
    assert [found.events for found in seen[-2:]] == [2, 0]


def test_one_device_does_not_wrap_a_figure_that_others_have_brought_to_the_edge(tmp_path, seen):
    """Noise comes first: with and without the device, what is reported differs by its part, modulo the same."""
    privacy = {**FIXED, "noise_multiplier": 0.01, "figures_share": 0.5}
    deployment, grid, _ = a_network(tmp_path, given=private_values(privacy))
    a_server(deployment, grid).attempt()
    bounds, said = deployment.rules.bounds, []
    for events in (2**39 - 1, -(2**39)):  # the numbers on both sides of the edge
        noise = RoundNoise(deployment.ledger.plan, 1, {}, deployment.noise)
        noise._drawn[:] = 10**8  # steps: some events
        said.append(
            reported_with_noise(replace(seen[0], events=events), noise, bounds, {})[0]["events"]
        )
    assert said[1] - said[0] == 1


@pytest.mark.parametrize("mechanism", ["dp-fedavg", "dp-ftrl", "blt"])
def test_figures_that_the_plan_pays_for_are_reported_with_noise_and_resumed(
    tmp_path, seen, mechanism
):
    """Their noise is on a grid of theirs, and is kept beside that of the model."""
    privacy = {
        "mechanism": mechanism,
        "noise_multiplier": 1e-3,
        "sampling": "fixed",
        "figures_share": 0.5,
    }
    deployment, grid, _ = a_network(tmp_path, given=private_values(privacy, max_events=6))
    for number in range(1, 4):
        store = Store(deployment.folder)
        metrics = a_server(deployment, grid, store).attempt()
        store.close()
        noise = metrics["noise"]["events"]
        assert 0 < noise < 0.1
        assert abs(metrics["events"] - seen[-1].events) <= 1 + 6 * noise
        assert seen[-1].events == (30 if number == 1 else 0)


def test_a_living_deployment_keeps_its_noise_on_the_grid(tmp_path):
    deployment, grid, _ = a_network(tmp_path, given=private_values())
    store = Store(deployment.folder)
    a_server(deployment, grid, store)
    store.close()
    plain = values(population=5, min_reach=0.0) | {"privacy": FIXED, "clients_per_round": 5}
    with pytest.raises(ConfigError, match="was started with different secure aggregation"):
        a_deployment(tmp_path, plain).resumed(Store(deployment.folder).load().state)


def test_an_old_copy_of_the_server_is_told_by_devices_that_have_seen_later_rounds(tmp_path):
    deployment, grid, _ = a_network(tmp_path, given=private_values())
    server = a_server(deployment, grid)
    server.attempt()
    server.attempt()
    again = a_server(a_deployment(tmp_path / "copy", private_values()), grid)
    with pytest.raises(OlderThanSeen, match="5 devices have seen round 2"):
        again.attempt()
