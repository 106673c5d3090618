"""Damaged rows of an otherwise readable log: set aside by name and counted; the others train as if they were alone."""

import logging
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from device_builders import WORDS, dense_model, text_model

from fedbandit.core.errors import DataError
from fedbandit.deploy import Agent

EVENTS = 5
BAD = 3  # the sequence number of the row that is damaged


def lived(folder, model, context):
    """A folder whose agent has logged and rewarded a few events."""
    with Agent(folder, uniform=np.random.default_rng(0).random) as agent:
        agent.install(model)
        for _ in range(EVENTS):
            agent.reward(agent.choose(context, available=[0, 1, 3]).event_id, 1.0)
    return folder


def damage(folder, column, value):
    db = sqlite3.connect(folder / "events.sqlite")
    db.execute(f"UPDATE events SET {column} = ? WHERE sequence = ?", (value, BAD))
    db.commit()
    db.close()


def ids(*numbers):
    return struct.pack(f"<{len(numbers)}i", *numbers)


def values(*numbers):
    return struct.pack(f"<{len(numbers)}f", *numbers)


ANY = [  # column, what it is changed to, what is said of it
    ("action", 10**9, "action"),
    ("action", -1, "action"),
    ("action", 2, "available"),  # was not among those that could be chosen
    ("action", "two", "action"),
    ("propensity", 0.0, "propensity"),
    ("propensity", 1.5, "propensity"),
    ("propensity", -0.5, "propensity"),
    ("propensity", "likely", "propensity"),
    ("reward", 1e39, "reward"),
    ("reward", float("inf"), "reward"),
    ("reward", b"much", "reward"),
    ("settled", None, "settled"),
    ("settled", 2**62, "settled"),
    ("version", -1, "version"),
    ("version", "new", "version"),
    ("available", b"", "available"),
    ("available", b"\x00", "available"),
    ("available", b"\xff\xff", "available"),
    ("available", "text", "available"),
    ("vals", values(float("nan"), 1.0), "values"),
    ("vals", values(1.0), "values"),
    ("vals", b"abc", "values"),
    ("vals", "text", "values"),
]
TEXT = [
    ("ids", ids(1, 2500), "word ids"),
    ("ids", ids(1, 1 << 30), "word ids"),
    ("ids", ids(-5, 1), "word ids"),
    ("ids", ids(5, 1), "word ids"),
    ("ids", ids(1, 1), "word ids"),
    ("ids", ids(1), "word ids"),
    ("ids", b"\x01", "word ids"),
    ("ids", None, "word ids"),
]
DENSE = [("vals", values(*range(7)), "values"), ("ids", ids(1, 5), "word ids")]


@pytest.mark.parametrize(
    ("model", "context", "column", "value", "said"),
    [(text_model(), "cat mat", *case) for case in ANY + TEXT]
    + [(dense_model(), np.arange(6.0), *case) for case in ANY + DENSE],
)
def test_a_damaged_row_is_set_aside_and_shifts_no_other(
    tmp_path, caplog, model, context, column, value, said
):
    lived(tmp_path, model, context)
    damage(tmp_path, column, value)
    with Agent(tmp_path) as agent, caplog.at_level(logging.WARNING, "fedbandit.deploy"):
        found = agent.events()
    assert found.damaged == 1
    assert found.sequence.tolist() == [1, 2, 4, 5]
    assert f"event {BAD}: {said}" in caplog.text
    for i in range(4):
        if model.kind == "sparse":
            row = found.events.contexts.shared.slice(i, i + 1)
            assert [WORDS[word] for word in row.ids] == ["cat", "mat"]
            np.testing.assert_allclose(row.values, 2**-0.5)
        else:
            np.testing.assert_array_equal(
                found.events.contexts.shared[i].reshape(-1), np.arange(6.0)
            )


def test_text_that_is_no_text_does_not_close_the_log(tmp_path):
    lived(tmp_path, text_model(), "cat")
    db = sqlite3.connect(tmp_path / "events.sqlite")
    db.execute("UPDATE events SET space = CAST(? AS TEXT) WHERE sequence = ?", (b"\xff\xfe", BAD))
    db.commit()
    db.close()
    with Agent(tmp_path) as agent:
        found = agent.events()
    assert (len(found), found.left_out, found.damaged) == (4, 1, 0)


TRAINER = """
import sys
sys.path.insert(0, sys.argv[2])
import numpy as np
from fedbandit.deploy import Agent
from fedbandit.deploy.device.participant import Participant
agent = Agent(sys.argv[1])
model = agent.model
flat = np.concatenate([model.weights["weight"].ravel(), model.weights["bias"]])
learning = {"objective": "regression", "objective_parameters": {}, "dtype": "float32",
            "client": {"learning_rate": 0.1, "batch_size": 2, "epochs": 1}, "freeze": ["bias"]}
facts = {"token": "t", "space": model.space, "learning": learning, "clip_norm": 0.5, "counted": None}
facts["bounds"] = {"events": 1000, "reward": 1.0}
facts, arrays = Participant(agent).answer("train", facts, {"weights": flat[:-4]})
print(facts["trained"], facts["events"], np.isfinite(arrays["update"]).all())
"""


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("ids", ids(1, 1 << 30)),
        pytest.param("action", 10**9, marks=pytest.mark.slow),
        pytest.param("ids", ids(1, 2500), marks=pytest.mark.slow),
    ],
)
def test_one_flipped_bit_does_not_end_the_training_process(tmp_path, column, value):
    """Frozen parameters are trained by torch, whose native code reads wherever an id points."""
    lived(tmp_path, text_model(), "cat mat")
    damage(tmp_path, column, value)
    command = [
        sys.executable,
        "-c",
        TRAINER,
        str(tmp_path),
        str(Path(__file__).parents[2] / "helpers"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "True 4 True"), done.stderr


@pytest.mark.parametrize("value", [1e39, -1e39, float("inf"), float("nan"), 10**400])
def test_a_reward_beyond_float32_is_refused(tmp_path, value):
    with Agent(tmp_path) as agent:
        agent.install(text_model())
        event = agent.choose("cat").event_id
        with pytest.raises(ValueError, match="reward"):
            agent.reward(event, value)
        assert agent.totals().waiting == 1


@pytest.mark.parametrize(
    ("column", "value"),
    [("rules", "[]"), ("rules", "{"), ("rules", '{"max_events": -1}'), ("elapsed", "long")],
)
def test_rules_that_cannot_be_read_are_named_in_one_line(tmp_path, column, value):
    lived(tmp_path, text_model(), "cat")
    db = sqlite3.connect(tmp_path / "events.sqlite")
    db.execute(f"UPDATE log SET {column} = ?", (value,))
    db.commit()
    db.close()
    with pytest.raises(DataError, match=r"events\.sqlite: damaged") as error:
        Agent(tmp_path)
    assert "\n" not in str(error.value)
