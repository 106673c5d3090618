"""Secure aggregation: the sum is right, nothing else is seen, and drop-outs are survived."""

import numpy as np
import pytest
from network_builders import Network, a_deployment, coordinator, live, values

pytest.importorskip("flwr")

from flwr.app import RecordDict
from secure_builders import (
    FIRST,
    SHARES,
    SURVIVORS,
    TRAINING,
    UNMASKING,
    a_network,
    a_server,
    lines_of,
    own_parts,
    plain_round,
    secure_values,
)

from fedbandit.deploy.flower.transport import SEALED, from_records
from fedbandit.deploy.masking import primitives as wire
from fedbandit.deploy.masking.primitives import unpacked
from fedbandit.deploy.messages import RequestPoller
from fedbandit.deploy.secure_sums import MODULUS, STEP, reward_error, update_error


def test_gradient_and_curvature_are_one_secure_sum(tmp_path):
    newton = {"algorithm": {"name": "diag-newton"}, "clipping": {"norm": 20.0}, "dtype": "float64"}
    deployment, grid, participants = a_network(tmp_path, given={**secure_values(), **newton})
    server = a_server(deployment, grid)
    assert server.attempt() is not None
    plain = a_deployment(tmp_path / "plain", {**values(), **newton})
    clear = coordinator(plain, Network(dict(enumerate(participants))))
    clear.attempt()
    precision = np.split(clear.state.weights, 2)[1]
    assert precision.max() > 1  # curvature has arrived
    bound = update_error(5, 20.0) / 0.2  # of a sum, divided by the smallest precision
    np.testing.assert_allclose(server.state.weights, clear.state.weights, atol=bound, rtol=0)


def test_statistics_are_one_secure_sum(tmp_path):
    ridge = {"algorithm": {"name": "statistics"}, "clipping": {"norm": 50.0}, "dtype": "float64"}
    deployment, grid, participants = a_network(tmp_path, given={**secure_values(), **ridge})
    server = a_server(deployment, grid)
    assert server.attempt() is not None
    plain = a_deployment(tmp_path / "plain", {**values(), **ridge})
    clear = coordinator(plain, Network(dict(enumerate(participants))))
    clear.attempt()
    bound = np.sqrt(2) * update_error(5, 50.0)
    for name in ("outer", "products"):
        found, expected = (one.state.server_state[name] for one in (server, clear))
        assert np.abs(expected).max() > 1
        np.testing.assert_allclose(found, expected, atol=bound, rtol=0)


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_secure_round_is_the_plain_one_up_to_rounding(tmp_path, adaptive):
    clipping = {"clipping": {"quantile": 0.5, "initial": 0.2}} if adaptive else {}
    deployment, grid, participants = a_network(tmp_path, given={**secure_values(), **clipping})
    server = a_server(deployment, grid)
    found = server.attempt()
    clear = coordinator(
        a_deployment(tmp_path / "plain", {**values(), **clipping}),
        Network(dict(enumerate(participants))),
    )
    expected = clear.attempt()
    for name in (
        "round",
        "events",
        "clients",
        "unclipped",
        "idle",
        "refused",
        "model_versions",
        "clip_norm",
    ):
        assert found[name] == expected[name], name
    bound = update_error(5, found["clip_norm"]) / 5 + 1e-7  # the mean's, and float32's own rounding
    np.testing.assert_allclose(server.state.weights, clear.state.weights, atol=bound, rtol=0)
    assert server.state.clip_norm == pytest.approx(clear.state.clip_norm, rel=1e-12)
    assert found["reward"] == pytest.approx(
        expected["reward"], abs=reward_error(5, deployment.rules.bounds) / found["events"]
    )
    assert found["propensity"] == pytest.approx(
        expected["propensity"], abs=5 * 1000 * STEP / found["events"]
    )


def test_nothing_that_the_server_receives_tells_of_one_device(tmp_path):
    """Everything that reaches the server in a round, looked through for each device's update, rewards and counts."""
    given = secure_values()
    deployment, grid, participants = a_network(tmp_path, number=5, given=given)
    for number, participant in enumerate(participants):
        live(participant, events=3 + number, seed=50 + number)  # as many as no other has
    parts = own_parts(deployment, participants)
    server = a_server(deployment, grid)
    metrics = server.attempt()
    assert metrics["events"] == sum(facts["events"] for facts, _ in parts)

    received = [(node, step, message) for node, step, message in grid.received if step != "install"]
    assert {step for _, step, _ in received} == {"ready", *wire.STEPS}
    assert len(received) == 5 * 5
    vectors = {}
    for node, step, message in received:
        assert set(message.content) <= {"facts", "arrays", SEALED}
        assert not message.has_error()
        facts, arrays = from_records(message.content)
        assert arrays == {}
        allowed = {"protocol", "token"} | (
            {"device", "version", "ready"} if step == "ready" else set()
        )
        assert set(facts) == allowed
        sealed = message.content.config_records.get(SEALED, {})
        expected = {
            "ready": {wire.ANNOUNCEMENT},
            SHARES: {wire.NODES, wire.PARCELS, wire.STATEMENT},
            SURVIVORS: {wire.STATEMENT},
            TRAINING: {wire.MASKED},
            UNMASKING: {wire.NODES, wire.PARCELS},
        }
        assert set(sealed) == expected[step]
        if step == TRAINING:
            vectors[node] = unpacked(sealed[wire.MASKED])
    everything = b"".join(_bytes_of(message) for *_, message in received)
    for _, update in parts:
        for form in (update.astype(np.float32), update, update / deployment.config.clipping.norm):
            assert form.tobytes() not in everything
            assert form[:2].tobytes() not in everything
    # One masked vector, read as if it had no mask, tells nothing: not the update, not a count.
    together = []
    for entries, (facts, update) in zip(vectors.values(), parts, strict=True):
        read = entries * STEP - 1
        together.append((read[:-5], update))
        assert round(read[-4] / STEP) != facts["events"]
        assert round(read[-1] / STEP) != 1
    read, true = np.concatenate(together, axis=1)
    assert abs(np.corrcoef(read, true)[0, 1]) < 5 / np.sqrt(true.size)
    # All of them together do: the sum is right.
    summed = np.sum([update for _, update in parts], axis=0)
    moved = (server.state.weights - deployment.initial).astype(np.float64) * 5
    np.testing.assert_allclose(moved, summed, atol=update_error(5, 1.0) + 1e-6, rtol=0)
    assert np.corrcoef(moved, summed)[0, 1] > 0.999


def test_masked_vectors_look_uniform_over_many_rounds(tmp_path):
    """The same device with the same update: its masked vectors are spread evenly and do not resemble each other."""
    deployment, grid, _ = a_network(
        tmp_path, number=3, given={**secure_values(), "rounds": 20, "deploy_every": 100}
    )
    a_server(deployment, grid).run()
    seen = [
        unpacked(message.content.config_records[SEALED][wire.MASKED])
        for node, step, message in grid.received
        if (node, step) == (FIRST, TRAINING)
    ]
    vectors = np.array(seen) / MODULUS
    assert vectors.shape == (20, 24 + 5)
    assert vectors.mean() == pytest.approx(0.5, abs=5 * np.sqrt(1 / 12 / vectors.size))
    counts, _ = np.histogram(vectors, bins=8, range=(0, 1))
    assert ((counts - vectors.size / 8) ** 2).sum() / (
        vectors.size / 8
    ) < 45  # chi-square of 7 degrees: one in ten million
    between = np.corrcoef(vectors)[np.triu_indices(20, 1)]
    assert abs(between.mean()) < 5 / np.sqrt(29 * between.size)


@pytest.mark.parametrize(
    ("lost", "left"),
    [
        ({(FIRST, "ready")}, 6),
        ({(FIRST + 1, SHARES)}, 6),
        ({(FIRST + 2, TRAINING)}, 6),
        ({(FIRST + 1, TRAINING), (FIRST + 4, TRAINING)}, 5),
        ({(FIRST, SURVIVORS), (FIRST + 5, SURVIVORS)}, 7),
        ({(FIRST, UNMASKING)}, 7),
        ({(FIRST, SHARES), (FIRST + 3, TRAINING), (FIRST + 2, UNMASKING)}, None),
        ({(FIRST, TRAINING), (FIRST + 3, SURVIVORS), (FIRST + 2, SURVIVORS)}, None),
        ({(FIRST, SHARES), (FIRST + 3, TRAINING)}, 5),
        ({(FIRST + 3, SURVIVORS), (FIRST + 2, UNMASKING)}, 7),
        ({(FIRST + 3, TRAINING), (FIRST + 2, UNMASKING)}, 6),
    ],
)
def test_devices_that_drop_out_at_any_step(tmp_path, caplog, lost, left):
    """Five of seven shares recover a mask, so up to two may be lost; vectors that came are summed."""
    deployment, grid, participants = a_network(tmp_path, 7)
    grid.lost = lost
    server = a_server(deployment, grid)
    metrics = server.attempt()
    for node, step in lost:
        words = {"ready": "", TRAINING: ", training", UNMASKING: ", unmasking"}
        assert (
            f"round 1{words.get(step, f', {step}')}: node {node} has not answered in time"
            in caplog.text
        )
    if left is None:
        assert metrics is None
        assert "no secure sum: 4 of 7 shares of node" in caplog.text
        assert server.state.round == 0
        return
    assert metrics["clients"] == left
    gone = {node - FIRST for node, step in lost if step not in (SURVIVORS, UNMASKING)}
    expected = plain_round(
        tmp_path / "plain", [p for i, p in enumerate(participants) if i not in gone]
    )
    bound = update_error(left, 1.0) / left + 1e-7
    np.testing.assert_allclose(server.state.weights, expected.state.weights, atol=bound, rtol=0)
    assert metrics["events"] == 6 * left


@pytest.mark.parametrize("step", ["ready", SHARES, TRAINING])
def test_too_many_drop_outs_give_up_the_attempt_and_nothing_counts(tmp_path, caplog, step):
    deployment, grid, _ = a_network(tmp_path)
    server = a_server(deployment, grid)
    grid.lost = {(FIRST + i, step) for i in range(3)}
    assert server.attempt() is None
    assert "no secure sum: 2 devices" in caplog.text
    assert "it is run again" in caplog.text
    assert not any(asked == UNMASKING for _, asked in grid.steps)
    grid.lost = set()
    assert server.attempt()["events"] == 30
    assert [line["round"] for line in lines_of(deployment)] == [1]
    assert server.attempt()["events"] == 0


def test_a_ring_of_neighbours_in_place_of_all_with_all(tmp_path):
    """With more devices than shares each has a few neighbours; drop-outs among them are survived as well."""
    deployment, grid, participants = a_network(
        tmp_path, number=9, given=secure_values(secure_shares=5)
    )
    grid.lost = {(FIRST + 4, TRAINING)}
    server = a_server(deployment, grid)
    assert server.attempt()["clients"] == 8
    keys = [
        m.content.config_records[SEALED][wire.PARCELS]
        for _, step, m in grid.received
        if step == SHARES
    ]
    assert {len(shares) for shares in keys} == {4}
    expected = plain_round(tmp_path / "plain", [p for i, p in enumerate(participants) if i != 4])
    np.testing.assert_allclose(
        server.state.weights, expected.state.weights, atol=update_error(1, 1.0) + 1e-7, rtol=0
    )


def test_vectors_are_added_up_as_they_come_and_not_held(tmp_path, monkeypatch):
    """A thousand of them would be gigabytes."""
    deployment, grid, _ = a_network(tmp_path)
    kept, ask = {}, RequestPoller.ask

    def noted(self, requests, seconds, what, *more):
        kept[what] = ask(self, requests, seconds, what, *more)
        return kept[what]

    monkeypatch.setattr(RequestPoller, "ask", noted)
    assert a_server(deployment, grid).attempt()["clients"] == 5
    assert [(node, reply.sealed) for node, reply in kept["round 1, training"]] == [
        (FIRST + i, {}) for i in range(5)
    ]


def test_idle_devices_sit_out(tmp_path):
    from fedbandit.deploy import Agent

    deployment, grid, _ = a_network(tmp_path, number=3)
    Agent(tmp_path / "new")
    from flwr.app import Context

    grid.contexts[2000] = Context(1, 2000, {"agent-dir": str(tmp_path / "new")}, RecordDict(), {})
    metrics = a_server(deployment, grid).attempt()
    assert (metrics["clients"], metrics["idle"], metrics["asked"]) == (3, 1, 4)


def test_a_sum_of_too_few_is_not_made(tmp_path, caplog):
    deployment, grid, participants = a_network(tmp_path, number=3)
    participants[2].agent.close()
    (tmp_path / "device-2" / "events.sqlite").unlink()
    server = a_server(deployment, grid)
    assert server.attempt() is None
    assert "2 devices have something to train on, 3 needed" in caplog.text
    assert not any(step == SHARES for _, step in grid.steps)


def _bytes_of(message):
    """All that a message carries, as bytes."""
    parts = []
    for record in message.content.values():
        for value in record.values():
            for item in value if isinstance(value, list) else [value]:
                data = getattr(item, "data", item)
                parts.append(data if isinstance(data, bytes) else repr(data).encode())
    return b"".join(parts)
