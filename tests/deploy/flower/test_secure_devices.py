"""Secure aggregation: what a device that is set to secure sums refuses to go along with."""

import pytest
from network_builders import values

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message
from flwr.common.secure_aggregation.secaggplus_constants import Key, Stage
from secure_builders import FIRST, a_network, a_server, clear_task

from fedbandit.deploy.flower.client_app import bad_terms
from fedbandit.deploy.flower.transport import SEALED, from_records, to_records
from fedbandit.deploy.secure_sums import LEVELS, MODULUS


def clear_request(deployment, kind="train.fedbandit_round", node=FIRST):
    task = clear_task(deployment.folder.parent)
    return Message(to_records(task.facts, task.arrays), dst_node_id=node, message_type=kind, ttl=60.0)


@pytest.mark.parametrize("kind", ["train.fedbandit_round", "train.default", "train"])
def test_a_device_set_to_sums_refuses_to_send_its_update_in_clear(tmp_path, kind):
    deployment, grid, _ = a_network(tmp_path)
    [reply] = grid.send_and_receive([clear_request(deployment, kind)])
    facts, arrays = from_records(reply.content)
    assert set(facts) == {"protocol", "token", "problem"}
    assert arrays == {}
    assert "secure sums only" in facts["problem"] or "not a message of SecAgg+" in facts["problem"]


def test_a_device_not_set_to_sums_answers_in_clear_under_the_one_name_for_it(tmp_path):
    deployment, grid, _ = a_network(tmp_path, secure=False)
    [reply] = grid.send_and_receive([clear_request(deployment)])
    assert set(from_records(reply.content)[1]) == {"update"}
    [reply] = grid.send_and_receive([clear_request(deployment, "train.default")])
    assert from_records(reply.content)[1] == {}


@pytest.mark.parametrize("kind", ["train.fedbandit_distil", "query.fedbandit_distil", "evaluate"])
def test_a_kind_of_message_that_a_later_server_has_is_not_trained_on(tmp_path, kind):
    """Flower itself answers with an error, which servers count as a failure of the node."""
    deployment, grid, _ = a_network(tmp_path, secure=False)
    [reply] = grid.send_and_receive([clear_request(deployment, kind)])
    assert reply.has_error()
    assert not reply.has_content()


def test_another_name_for_training_is_refused_by_name(tmp_path):
    deployment, grid, _ = a_network(tmp_path, secure=False)
    [reply] = grid.send_and_receive([clear_request(deployment, "train.default")])
    facts, arrays = from_records(reply.content)
    assert "does not know requests of the kind 'train.default'" in facts["problem"]
    assert arrays == {}


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
        (setup(mod_range=2**32), "mod_range"),
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
