"""Plain updates travel compressed, with the same bits; a bomb in their place is never unpacked."""

import zlib

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord

from fedbandit.core.errors import DataError
from fedbandit.deploy.flower.transport import from_records, to_records


def an_update(rows=10_000, actions=50, words=400, seed=0):
    """What a device with a few texts sends: most words are not in them. As large as in the docs."""
    rng = np.random.default_rng(seed)
    update = np.zeros((rows + 1, actions), np.float32)
    touched = rng.choice(rows, words, replace=False)
    update[touched, rng.integers(0, actions, (12, words))] = rng.normal(size=(12, words)) * 1e-2
    return update.reshape(-1)


def travelling(content):
    arrays = sum(len(array.data) for array in content.array_records["arrays"].values())
    packed = content.config_records.get("zlib", {}).values()
    return arrays + sum(len(part) for part in packed if isinstance(part, bytes))


def test_a_sparse_update_of_two_megabytes_travels_in_less_than_100_kb():
    update = an_update()
    assert update.nbytes > 2_000_000
    content = to_records({"token": "t"}, {"update": update}, compress=True)
    assert travelling(content) <= 100_000
    facts, arrays = from_records(content, update.nbytes)
    assert facts == {"token": "t"}
    assert arrays["update"].dtype == update.dtype
    np.testing.assert_array_equal(arrays["update"], update)


def test_what_does_not_get_smaller_and_what_nobody_asked_to_compress_travels_as_it_is():
    noise = np.frombuffer(np.random.default_rng(0).bytes(8000), np.uint8)
    for compress in (True, False):
        content = to_records({}, {"update": noise}, compress=compress)
        assert travelling(content) > noise.nbytes
        np.testing.assert_array_equal(from_records(content, 0)[1]["update"], noise)
    zeros = to_records({}, {"update": np.zeros(1000)})
    assert travelling(zeros) > 8000


@pytest.mark.parametrize(
    ("payload", "like"),
    [
        (zlib.compress(bytes(10**8)), '["<f4", [25000000]]'),
        (zlib.compress(bytes(400)), '["<f4", [7]]'),
        (zlib.compress(bytes(400))[:-3], '["<f4", [100]]'),
        (b"garbage", '["<f4", [1]]'),
        (zlib.compress(bytes(400)), '["O", [50]]'),
        (zlib.compress(bytes(400)), "x"),
    ],
)
def test_a_compressed_array_that_is_none_is_refused(payload, like):
    content = to_records({}, {})
    content.config_records["zlib"] = ConfigRecord({"update": payload, "update like": like})
    with pytest.raises(DataError, match="unreadable"):
        from_records(content, 4000)


def test_devices_compress_and_servers_count_what_travelled(tmp_path):
    from network_builders import ACTIONS, a_deployment, devices, values
    from secure_builders import RecordingGrid, a_server

    from fedbandit.deploy.flower.client_app import make_client_app
    from fedbandit.federated.state import Version

    (tmp_path / "words.txt").write_text("\n".join(f"w{i}" for i in range(5000)))
    rules = {"state": "server", "actions": ACTIONS, "vocabulary": "words.txt"}
    deployment = a_deployment(tmp_path, values() | {"deployment": rules})
    participants = devices(tmp_path, 3)
    for participant in participants.values():
        participant.agent.install(deployment.device_model(Version(deployment.initial), 0))
        decision = participant.agent.choose("w1 w2 w3")
        participant.agent.reward(decision.event_id, 1.0)
    configs = [{"agent-dir": str(p.agent.folder)} for p in participants.values()]
    server = a_server(deployment, RecordingGrid(make_client_app(), configs))
    sizes, heard = [], server._watch.heard
    server._watch.heard = lambda node, reply: (
        sizes.append((reply.size, sum(a.nbytes for a in reply.arrays.values())))
        or heard(node, reply)
    )
    assert server.attempt()["clients"] == 3
    trained = [(size, whole) for size, whole in sizes if whole]
    assert len(trained) == 3
    assert all(size < whole / 50 for size, whole in trained)
