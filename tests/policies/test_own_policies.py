"""What a policy of a user's own gives is looked at, before the run and in every round."""

import zlib

import pytest
from command_line import fails_with_one_line, in_this_process

SMALL = [
    "--rounds",
    "4",
    "--set",
    "clients_per_round=4",
    "--set",
    "client.max_examples=4",
    "--set",
    "deploy_every=2",
]

POLICY = """
import numpy as np

class Mine:
    def probabilities(self, prediction, available=None):
        scores = prediction.mean
        n, k = scores.shape
        {body}
"""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return np.full((n, k), 2.0)", ["sum to"]),
        ("return np.full((n, k), np.nan)", ["not numbers"]),
        ("return np.ones((n, 1))", ["shape"]),
        ("return np.full((n, k + 1), 1 / (k + 1))", ["shape"]),
        ("return np.tile([[2.0] + [-1 / (k - 1)] * (k - 1)], (n, 1))", ["negative"]),
        ("return scores.no_such_thing", ["no_such_thing"]),
    ],
)
def test_what_is_no_probability_is_refused_before_the_run(tmp_path, monkeypatch, body, words):
    monkeypatch.chdir(tmp_path)
    module = f"door_{zlib.crc32(body.encode())}"
    (tmp_path / f"{module}.py").write_text(POLICY.format(body=body))
    result = in_this_process(
        "run", "so-scratch-greedy", "--out", "run", "--set", f"policy.name={module}:Mine", *SMALL
    )
    fails_with_one_line(result, "policy.name", *words)
    assert not (tmp_path / "run").exists()


def test_a_policy_that_goes_wrong_later_is_named_with_the_round(tmp_path, monkeypatch):
    """At the door all scores are 0; only with those of a model this one misbehaves."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "late_policy.py").write_text(
        POLICY.format(body="return np.full((n, k), (2.0 if scores.any() else 1.0) / k)")
    )
    result = in_this_process(
        "run", "so-scratch-greedy", "--out", "run", "--set", "policy.name=late_policy:Mine", *SMALL
    )
    fails_with_one_line(result, "policy.name", "Mine", "sum to 2", "round 1")
