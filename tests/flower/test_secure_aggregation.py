"""Secure aggregation: the sum is right, nothing else is seen, drop-outs are survived, and each reward counts once."""

import json
import logging

import numpy as np
import pytest
from network_builders import Network, a_deployment, coordinator, live, values

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.secaggplus_constants import Key, Stage
from secure_builders import KEYS, SHARES, TRAINING, UNMASKING, a_network, a_server, secure_values

from fedbandit.deploy.flower.gathering import PlainReports
from fedbandit.deploy.flower.records import SEALED, from_records, to_records
from fedbandit.deploy.flower.secure_client import bad_terms
from fedbandit.deploy.flower.secure_sums import LEVELS, MODULUS, STEP, reward_error, update_error
from fedbandit.deploy.flower.store import Store
from fedbandit.errors import ConfigError

FIRST = 1000  # the first node


def lines_of(deployment):
    return [json.loads(line) for line in (deployment.folder / "metrics.jsonl").read_text().splitlines()]


def plain_round(folder, participants):
    """The same devices' next round without secure aggregation: its server, after one round."""
    server = coordinator(a_deployment(folder, values()), Network(dict(enumerate(participants))))
    server.attempt()
    return server


def clear_task(folder):
    """What a server without secure aggregation asks for in its first round."""
    deployment = a_deployment(folder, values())
    return PlainReports(deployment, None)._task(deployment.start(), 0, 1, "token")


def own_parts(deployment, participants):
    """What each device would have sent in clear."""
    task, found = clear_task(deployment.folder.parent), []
    for participant in participants:
        facts, arrays = participant.answer("train", task.facts, task.arrays)
        found.append((facts, arrays["update"].astype(np.float64)))
    return found


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_secure_round_is_the_plain_one_up_to_rounding(tmp_path, adaptive):
    clipping = {"clipping": {"quantile": 0.5, "initial": 0.2}} if adaptive else {}
    deployment, grid, participants = a_network(tmp_path, given={**secure_values(), **clipping})
    server = a_server(deployment, grid)
    found = server.attempt()
    clear = coordinator(
        a_deployment(tmp_path / "plain", {**values(), **clipping}), Network(dict(enumerate(participants)))
    )
    expected = clear.attempt()
    for name in ("round", "events", "clients", "unclipped", "idle", "refused", "model_versions", "clip_norm"):
        assert found[name] == expected[name], name
    bound = update_error(5, found["clip_norm"]) / 5 + 1e-7  # the mean's, and float32's own rounding
    np.testing.assert_allclose(server.state.weights, clear.state.weights, atol=bound, rtol=0)
    assert server.state.clip_norm == pytest.approx(clear.state.clip_norm, rel=1e-12)
    assert found["reward"] == pytest.approx(
        expected["reward"], abs=reward_error(5, deployment.rules.bounds) / found["events"]
    )
    assert found["propensity"] == pytest.approx(expected["propensity"], abs=5 * 1000 * STEP / found["events"])


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
    assert {step for _, step, _ in received} == {"ready", KEYS, SHARES, TRAINING, UNMASKING}
    assert len(received) == 5 * 5
    vectors = {}
    for node, step, message in received:
        assert set(message.content) <= {"facts", "arrays", SEALED}
        assert not message.has_error()
        facts, arrays = from_records(message.content)
        assert arrays == {}
        allowed = {"token", "device", "version", "ready"} if step == "ready" else {"token"}
        assert set(facts) == allowed
        sealed = message.content.config_records.get(SEALED, {})
        expected = {
            "ready": set(),
            KEYS: {Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2},
            SHARES: {Key.DESTINATION_LIST, Key.CIPHERTEXT_LIST},
            TRAINING: {Key.MASKED_PARAMETERS},
            UNMASKING: {Key.NODE_ID_LIST, Key.SHARE_LIST},
        }
        assert set(sealed) == expected[step]
        if step == TRAINING:
            vectors[node] = [bytes_to_ndarray(part) for part in sealed[Key.MASKED_PARAMETERS]]
    everything = b"".join(_bytes_of(message) for *_, message in received)
    for _, update in parts:
        for form in (update.astype(np.float32), update, update / deployment.config.clipping.norm):
            assert form.tobytes() not in everything
            assert form[:2].tobytes() not in everything
    # One masked vector, read as if it had no mask, tells nothing: not the update, not a count, not the weight.
    together = []
    for (weight, entries), (facts, update) in zip(vectors.values(), parts, strict=True):
        read = entries * STEP - 1
        together.append((read[:-5], update))
        assert round(read[-4] / STEP) != facts["events"]
        assert round(read[-1] / STEP) != 1
        assert weight[0] != LEVELS
        assert entries.min() >= 0
        assert entries.max() < MODULUS
    read, true = np.concatenate(together, axis=1)
    assert abs(np.corrcoef(read, true)[0, 1]) < 5 / np.sqrt(true.size)
    # All of them together do: the sum is right.
    summed = np.sum([update for _, update in parts], axis=0)
    moved = (server.state.weights - deployment.initial).astype(np.float64) * 5
    np.testing.assert_allclose(moved, summed, atol=update_error(5, 1.0) + 1e-6, rtol=0)
    assert np.corrcoef(moved, summed)[0, 1] > 0.999


def test_masked_vectors_look_uniform_over_many_rounds(tmp_path):
    """The same device with the same update: its masked vectors are spread evenly and do not resemble each other."""
    deployment, grid, _ = a_network(tmp_path, number=3, given={**secure_values(), "rounds": 20, "deploy_every": 100})
    a_server(deployment, grid).run()
    seen = [
        bytes_to_ndarray(message.content.config_records[SEALED][Key.MASKED_PARAMETERS][1])
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
        ({(FIRST, "ready")}, 4),
        ({(FIRST, KEYS)}, 4),
        ({(FIRST + 1, SHARES)}, 4),
        ({(FIRST + 2, TRAINING)}, 4),
        ({(FIRST + 1, TRAINING), (FIRST + 4, TRAINING)}, 3),
        ({(FIRST, UNMASKING)}, 5),
        ({(FIRST, KEYS), (FIRST + 3, TRAINING), (FIRST + 2, UNMASKING)}, None),
        ({(FIRST, KEYS), (FIRST + 3, TRAINING)}, 3),
        ({(FIRST + 3, TRAINING), (FIRST + 2, UNMASKING)}, 4),
    ],
)
def test_devices_that_drop_out_at_any_step(tmp_path, caplog, lost, left):
    """Three of five shares recover a mask, so up to two may be lost; the sum is that of those who sent theirs."""
    deployment, grid, participants = a_network(tmp_path)
    grid.lost = lost
    server = a_server(deployment, grid)
    metrics = server.attempt()
    for node, step in lost:
        words = {"ready": "", KEYS: ", keys", SHARES: ", shares", TRAINING: ", training", UNMASKING: ", unmasking"}
        assert f"round 1{words[step]}: node {node} has not answered in time" in caplog.text
    if left is None:
        assert metrics is None
        assert "no secure sum: 2 of 5 shares of node" in caplog.text
        assert server.state.round == 0
        return
    assert metrics["clients"] == left
    gone = {node - FIRST for node, step in lost if step != UNMASKING}
    expected = plain_round(tmp_path / "plain", [p for i, p in enumerate(participants) if i not in gone])
    bound = update_error(left, 1.0) / left + 1e-7
    np.testing.assert_allclose(server.state.weights, expected.state.weights, atol=bound, rtol=0)
    assert metrics["events"] == 6 * left


@pytest.mark.parametrize("step", [KEYS, SHARES, TRAINING])
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
    deployment, grid, participants = a_network(tmp_path, number=9, given=secure_values(secure_shares=5))
    grid.lost = {(FIRST + 4, TRAINING)}
    server = a_server(deployment, grid)
    assert server.attempt()["clients"] == 8
    keys = [m.content.config_records[SEALED][Key.CIPHERTEXT_LIST] for _, step, m in grid.received if step == SHARES]
    assert {len(shares) for shares in keys} == {4}
    expected = plain_round(tmp_path / "plain", [p for i, p in enumerate(participants) if i != 4])
    np.testing.assert_allclose(server.state.weights, expected.state.weights, atol=update_error(1, 1.0) + 1e-7, rtol=0)


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
    assert not any(step == KEYS for _, step in grid.steps)


# Each reward once


def test_each_reward_is_counted_in_one_round_whoever_is_lost(tmp_path):
    """Aborted attempts and lost answers at every step; at the end each reward was counted exactly once."""
    deployment, grid, participants = a_network(tmp_path, given={**secure_values(), "rounds": 60})
    rng = np.random.default_rng(7)
    store = Store(deployment.folder)
    server = a_server(deployment, grid, store)
    made = 5 * 6
    for attempt in range(15):
        steps = ("ready", KEYS, SHARES, TRAINING, UNMASKING)
        grid.lost = {(FIRST + int(rng.integers(5)), steps[rng.integers(5)]) for _ in range(rng.integers(5))}
        live(participants[attempt % 5], events=2, seed=attempt)
        made += 2
        server.attempt()
        if rng.random() < 0.3:
            store.close()
            store = Store(deployment.folder)
            server = a_server(deployment, grid, store)
    grid.lost = set()
    server.attempt()
    lines = lines_of(deployment)
    assert 3 < len(lines) < 16
    assert sum(line["events"] for line in lines) == made


@pytest.mark.parametrize("moment", ["checkpoint", "publish"])
def test_a_server_killed_around_its_checkpoint_counts_each_reward_once(tmp_path, monkeypatch, moment):
    deployment, grid, participants = a_network(tmp_path)
    store = Store(deployment.folder)
    server = a_server(deployment, grid, store)
    server.attempt()
    live(participants[0], events=4, seed=1)

    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(store, moment, die)
        with pytest.raises(Killed):
            server.attempt()
    store.close()
    live(participants[1], events=3, seed=2)
    second = a_server(deployment, grid)
    second.run()
    assert [line["events"] for line in lines_of(deployment)] == [30, *([7, 0] if moment == "checkpoint" else [4, 3]), 0]


def test_a_device_without_room_for_its_mark_drops_out(tmp_path, monkeypatch, caplog):
    """What could be counted twice later is not sent."""
    import fedbandit.deploy.flower.card as card_module

    deployment, grid, participants = a_network(tmp_path, number=4)
    server = a_server(deployment, grid)
    server.attempt()
    live(participants[0], events=2)
    write = card_module.write_atomically

    def no_room(path, fill):
        if path.parent.name == "device-0":
            raise OSError(28, "No space left on device")
        write(path, fill)

    with monkeypatch.context() as patch:
        patch.setattr(card_module, "write_atomically", no_room)
        metrics = server.attempt()
    assert (metrics["clients"], metrics["events"], metrics["refused"]) == (3, 0, {"failed": 1})
    assert "No space left on device" in caplog.text
    assert server.attempt()["events"] == 2


def test_more_events_than_a_device_may_report_wait_and_larger_rewards_are_cut(tmp_path):
    given = secure_values(max_events=4, max_reward=0.5)
    deployment, grid, participants = a_network(tmp_path, number=3, given=given)
    server = a_server(deployment, grid)
    lines = [server.attempt() for _ in range(3)]
    assert [line["events"] for line in lines] == [12, 6, 0]
    ones = sum(participant.agent.events().events.rewards.sum() for participant in participants)
    counted = sum((line["reward"] or 0.0) * line["events"] for line in lines)
    assert counted == pytest.approx(0.5 * ones, abs=2 * reward_error(3, deployment.rules.bounds))


def test_one_device_behind_two_nodes_is_in_the_sum_once(tmp_path, caplog):
    deployment, grid, _ = a_network(tmp_path, number=3)
    from flwr.app import Context

    grid.contexts[2000] = Context(1, 2000, dict(grid.contexts[FIRST].node_config), RecordDict(), {})
    metrics = a_server(deployment, grid).attempt()
    assert (metrics["clients"], metrics["events"], metrics["refused"]) == (3, 18, {"twice": 1})


# What a device refuses


def clear_request(deployment, kind="train.fedbandit_round", node=FIRST):
    task = clear_task(deployment.folder.parent)
    return Message(to_records(task.facts, task.arrays), dst_node_id=node, message_type=kind, ttl=60.0)


@pytest.mark.parametrize("kind", ["train.fedbandit_round", "train.default", "train"])
def test_a_device_set_to_sums_refuses_to_send_its_update_in_clear(tmp_path, kind):
    deployment, grid, _ = a_network(tmp_path)
    [reply] = grid.send_and_receive([clear_request(deployment, kind)])
    facts, arrays = from_records(reply.content)
    assert set(facts) == {"token", "problem"}
    assert arrays == {}
    assert "secure sums only" in facts["problem"] or "not a message of SecAgg+" in facts["problem"]


def test_a_device_not_set_to_sums_answers_in_clear_under_the_one_name_for_it(tmp_path):
    deployment, grid, _ = a_network(tmp_path, secure=False)
    [reply] = grid.send_and_receive([clear_request(deployment)])
    assert set(from_records(reply.content)[1]) == {"update"}
    [reply] = grid.send_and_receive([clear_request(deployment, "train.default")])
    assert from_records(reply.content)[1] == {}


def test_a_server_without_secure_sums_gets_nothing_from_devices_set_to_them(tmp_path, caplog):
    deployment, grid, _ = a_network(tmp_path, given=values())
    server = a_server(deployment, grid)
    assert server.attempt() is None
    assert caplog.text.count("could not train: this device takes part in secure sums only") == 5


def test_the_middle_of_the_protocol_does_not_come_first(tmp_path):
    deployment, grid, _ = a_network(tmp_path)
    request = clear_request(deployment, "train")
    request.content.config_records[SEALED] = ConfigRecord(
        {Key.STAGE: Stage.COLLECT_MASKED_VECTORS, Key.CIPHERTEXT_LIST: [b"a", b"b"], Key.SOURCE_LIST: [1, 2]}
    )
    [reply] = grid.send_and_receive([request])
    assert reply.has_error()


def setup(**changed):
    terms = {"sample_num": 5, "share_num": 5, "threshold": 3, "max_weight": 1.0}
    ranges = {"clipping_range": 1.0, "target_range": LEVELS, "mod_range": MODULUS}
    return {"stage": "setup", **terms, **ranges, **changed}


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (setup(), None),
        (setup(threshold=2), "not more than half"),
        (setup(threshold=6), "not more than half"),
        (setup(share_num=2, threshold=2), "too few"),
        (setup(clipping_range=1e-6), "clipping_range"),
        (setup(target_range=2**31), "target_range"),
        (setup(mod_range=2**23), "mod_range"),
        (setup(max_weight=1000.0), "max_weight"),
        ({"stage": "share_keys", "1": [b"", b""], "2": [b"", b""]}, "2 devices are too few"),
        ({"stage": "collect_masked_vectors", "srcs": [2, 2], "ctxts": [b"", b""]}, "2 devices are too few"),
        ({"stage": "unmask", "active_nids": [1, 2, 3], "dead_nids": [4]}, None),
        ({"stage": "unmask", "active_nids": [1, 2, 3], "dead_nids": [3]}, "both secrets"),
        ({"stage": "unmask", "active_nids": [2, 3, 4], "dead_nids": []}, "dropped out"),
        ({"stage": "unmask", "active_nids": [1, 2], "dead_nids": [3]}, "2 devices are too few"),
        ({"stage": "all"}, "no such step"),
    ],
)
def test_terms_that_a_device_does_not_accept(said, reason):
    found = bad_terms(said, own=1)
    assert found is None if reason is None else reason in found


# What the server refuses


def replaced(change):
    """A fault that changes the masked entries of an answer."""

    def fault(reply):
        from flwr.common import ndarray_to_bytes

        weight, entries = (
            bytes_to_ndarray(part) for part in reply.content.config_records[SEALED][Key.MASKED_PARAMETERS]
        )
        parts = change(weight, entries)
        reply.content.config_records[SEALED][Key.MASKED_PARAMETERS] = [ndarray_to_bytes(part) for part in parts]

    return fault


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weight, entries: (weight, entries + np.eye(1, len(entries), 28, dtype=int)[0]), "6 devices are in it"),
        (lambda weight, entries: (weight, entries + 2**30 * (np.arange(len(entries)) < 20)), "norm"),
        (lambda weight, entries: (weight * 2, entries), "did not weigh one each"),
    ],
)
def test_a_sum_that_honest_devices_cannot_come_to_is_refused_as_a_whole(tmp_path, caplog, change, message):
    deployment, grid, _ = a_network(tmp_path)
    grid.broken = {(FIRST, TRAINING): replaced(change)}
    server = a_server(deployment, grid)
    assert server.attempt() is None
    assert "the sum is refused" in caplog.text
    assert message in caplog.text
    grid.broken = {}
    assert server.attempt()["events"] == 30


@pytest.mark.parametrize(
    "change",
    [
        lambda weight, entries: (weight, entries[:-1]),
        lambda weight, entries: (weight, entries.astype(np.float64)),
        lambda weight, entries: (weight,),
    ],
)
def test_a_device_whose_masked_vector_is_garbage_is_left_out(tmp_path, caplog, change):
    deployment, grid, _ = a_network(tmp_path)
    grid.broken = {(FIRST, TRAINING): replaced(change)}
    metrics = a_server(deployment, grid).attempt()
    assert (metrics["clients"], metrics["refused"]) == (4, {"garbage": 1})
    assert f"node {FIRST} refused: garbage: training: " in caplog.text


def test_a_wrong_share_gives_up_the_attempt(tmp_path, caplog):
    def wrong(reply):
        sealed = reply.content.config_records[SEALED]
        sealed[Key.SHARE_LIST] = [share[:4] + bytes(len(share) - 4) for share in sealed[Key.SHARE_LIST]]

    deployment, grid, _ = a_network(tmp_path)
    grid.broken = {(FIRST, UNMASKING): wrong}
    server = a_server(deployment, grid)
    assert server.attempt() is None
    assert "no secure sum" in caplog.text
    assert server.state.round == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"clients_per_round": 1024}, "clients_per_round: at most 1023 devices"),
        ({"deployment": secure_values(min_reports=2)["deployment"]}, "deployment.min_reports"),
        ({"deployment": secure_values(report_goal=59)["deployment"]}, "deployment.report_goal"),
        ({"deployment": secure_values(secure_threshold=0.5)["deployment"]}, "deployment.secure_threshold"),
        ({"deployment": secure_values(max_events=2**22)["deployment"]}, "deployment.max_events"),
        (
            {
                "privacy": {"mechanism": "dp-fedavg", "noise_multiplier": 1.0},
                "deployment": secure_values(population=500)["deployment"],
            },
            "deployment.secure_aggregation: not with privacy",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, given, message):
    with pytest.raises(ConfigError, match=message):
        a_deployment(tmp_path, {**secure_values(), **given})


def test_a_living_deployment_does_not_change_to_or_from_secure_sums(tmp_path):
    deployment, grid, _ = a_network(tmp_path)
    store = Store(deployment.folder)
    a_server(deployment, grid, store)
    store.close()
    with pytest.raises(ConfigError, match="began with another secure aggregation"):
        coordinator(a_deployment(tmp_path, values()), Network({}))


def test_status_says_that_it_is_on(tmp_path):
    from fedbandit.deploy.flower.status import in_lines, read_status

    deployment, grid, _ = a_network(tmp_path)
    a_server(deployment, grid).attempt()
    status = read_status(deployment.folder)
    assert status["secure_aggregation"] is True
    assert "aggregation    secure: only sums are seen here" in in_lines(status)
    assert status["devices"] == 5


def test_a_report_goal_ends_the_training_step(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    deployment, grid, _ = a_network(
        tmp_path, given={**secure_values(report_goal=4, round_seconds=1e6), "clients_per_round": 5}
    )
    grid.lost = {(FIRST, TRAINING)}
    assert a_server(deployment, grid).attempt()["clients"] == 4


def _bytes_of(message):
    """All that a message carries, as bytes."""
    parts = []
    for record in message.content.values():
        for value in record.values():
            for item in value if isinstance(value, list) else [value]:
                data = getattr(item, "data", item)
                parts.append(data if isinstance(data, bytes) else repr(data).encode())
    return b"".join(parts)
