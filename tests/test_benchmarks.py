"""The cost model: its arithmetic by hand, and its bytes against those of real chunks."""

import pytest
from benchmarks.cluster_cost import WorkMeasurement, measure, predict

from fedbandit.data.embedded import topics


def test_a_round_by_hand():
    measured = WorkMeasurement(
        weight_bytes=1000, seconds_per_client=0.5, clients_per_chunk=4, sum_bytes=200
    )
    cost = predict(measured, clients=90, machines=3, cores=2, deploy_every=10, gigabits=8e-6)
    assert cost.chunks == 23
    assert cost.bytes_out == pytest.approx(3 * 1000 * 1.1)
    assert cost.bytes_back == 23 * 200
    assert cost.work_seconds == pytest.approx(90 * 0.5 / 6)
    assert cost.wire_seconds == pytest.approx((3300 + 4600) / 1000)
    assert cost.seconds == cost.wire_seconds


def test_workers_without_a_chunk_do_not_help():
    measured = WorkMeasurement(
        weight_bytes=1, seconds_per_client=1.0, clients_per_chunk=10, sum_bytes=1
    )
    few, many = (
        predict(measured, clients=20, machines=m, cores=1, deploy_every=1, gigabits=1)
        for m in (2, 50)
    )
    assert few.work_seconds == many.work_seconds == 10


def test_text_sends_back_the_rows_it_touched(tmp_path):
    path = topics.generate(tmp_path / "text", users=80, words=1000)
    found = measure(str(path), "linear", clients=40)
    assert found.weight_bytes == 4 * 50 * 1001
    assert (
        0 < found.sum_bytes < found.weight_bytes + 4 * 1000
    )  # every row at most once, and its number
    assert found.seconds_per_client > 0
