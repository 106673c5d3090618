"""SQL that changes a device's log behind its back: named, counted or refused, never taken for what happened."""

import json
import logging
import sqlite3
from contextlib import closing

import numpy as np
import pytest
from device_builders import text_model

from fedbandit.core.errors import DataError
from fedbandit.deploy import Agent, LogUnavailable, Outcome, Retention
from fedbandit.deploy.device import log as log_file

EVENTS = 6
ENDLESS = (
    "WITH RECURSIVE endless(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM endless) SELECT n AS"
    " sequence, 0.0 AS made, 0 AS nonce, 1 AS version, '' AS space, 0 AS action, 1.0 AS propensity,"
    " 1.0 AS reward, n AS settled, NULL AS available, NULL AS ids, x'' AS vals, NULL AS catalogue,"
    " NULL AS items, NULL AS own, 0 AS mark FROM endless"
)


@pytest.fixture
def folder(tmp_path):
    """A folder whose agent has logged and rewarded a few events."""
    with Agent(tmp_path, uniform=np.random.default_rng(0).random) as agent:
        agent.install(text_model())
        for number in range(EVENTS):
            agent.reward(agent.choose("cat mat").event_id, number / 10)
    return tmp_path


def mutate(folder, *statements):
    with closing(sqlite3.connect(folder / "events.sqlite")) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()


def read(folder):
    with Agent(folder) as agent:
        return agent.events()


def test_a_sound_log_says_nothing(folder, caplog):
    with caplog.at_level(logging.WARNING, "fedbandit.deploy"):
        found = read(folder)
    assert (len(found), found.damaged, caplog.text) == (EVENTS, 0, "")


def test_a_sequence_from_nowhere_prunes_no_other_event(folder):
    """The next append took 2**53 for the newest event, and deleted all that lay too far below it."""
    mutate(folder, f"UPDATE events SET sequence = {2**53} WHERE sequence = 3")
    with Agent(folder) as agent:
        agent.reward(agent.choose("cat").event_id, 1.0)
        found = agent.events()
    assert found.sequence.tolist() == [1, 2, 4, 5, 6, 7]
    assert found.damaged


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE log SET elapsed = 1e300",
        "UPDATE log SET elapsed = elapsed + 1e6",
        "UPDATE log SET rewarded = 0",
        "UPDATE log SET last = 900",
        "UPDATE log SET held = 0, total = 0",
        "UPDATE log SET rules = replace(rules, '1024', '2')",
        "DELETE FROM log",
        "DROP TABLE log",
        "DROP TABLE events",
        "CREATE VIEW more AS SELECT 1",
        "CREATE TRIGGER t AFTER INSERT ON events BEGIN DELETE FROM events; END",
        "CREATE VIRTUAL TABLE x USING fts5(a)",
    ],
)
def test_a_log_whose_head_or_parts_are_others_is_refused_in_one_line(folder, statement):
    mutate(folder, statement)
    with pytest.raises(DataError, match=r"events\.sqlite: damaged") as error:
        Agent(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("most", [10**30, 2.5, True, 0])
def test_rules_that_no_log_can_keep_are_refused(folder, most):
    with pytest.raises(ValueError, match="max_events"):
        Retention(max_events=most)
    rules = json.dumps({"max_events": most})
    row = "elapsed, wall, steady, boot, rewarded, rules, last, held, total"
    mutate(folder, f"UPDATE log SET rules = '{rules}'")
    db = sqlite3.connect(folder / "events.sqlite")
    mark = log_file.mark_of(db.execute(f"SELECT {row} FROM log").fetchone())  # signed anew
    db.execute("UPDATE log SET mark = ?", (mark,))
    db.commit()
    db.close()
    with pytest.raises(DataError, match="max_events"):
        Agent(folder)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE events SET reward = 1e38 WHERE sequence = 2",
        "UPDATE events SET reward = 0.9 WHERE sequence = 2",
        "UPDATE events SET propensity = 0.5 WHERE sequence = 2",
        "UPDATE events SET action = (action + 1) % 4 WHERE sequence = 2",
        "UPDATE events SET made = 0 WHERE sequence = 2",
        "UPDATE events SET nonce = 1 WHERE sequence = 2",
        "UPDATE events SET vals = x'0000803f0000803f' WHERE sequence = 2",
        "UPDATE events SET mark = mark + 1 WHERE sequence = 2",
    ],
)
def test_a_changed_row_is_set_aside_and_counted(folder, statement, caplog):
    mutate(folder, statement)
    with caplog.at_level(logging.WARNING, "fedbandit.deploy"):
        found = read(folder)
    assert found.sequence.tolist() == [1, 3, 4, 5, 6] or found.damaged
    assert found.damaged >= 1
    assert "event log: " in caplog.text


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM events WHERE sequence = 2",
        "DELETE FROM events",
        "INSERT INTO events SELECT 99, made, nonce, version, space, action, propensity, reward,"
        " settled, available, ids, vals, catalogue, items, own, mark FROM events WHERE sequence = 1",
        "UPDATE events SET sequence = 7 WHERE sequence = 2",
    ],
)
def test_rows_that_go_or_come_are_counted(folder, statement, caplog):
    mutate(folder, statement)
    with caplog.at_level(logging.WARNING, "fedbandit.deploy"):
        found = read(folder)
    assert found.damaged >= 1
    assert "missing or not its own" in caplog.text or "checksum" in caplog.text


def test_an_endless_view_is_refused_and_not_asked(folder):
    mutate(folder, "DROP TABLE events", f"CREATE VIEW events AS {ENDLESS}")
    with pytest.raises(DataError, match="is not part of a log"):
        Agent(folder)


def test_an_endless_query_is_ended(folder, monkeypatch):
    """Whatever makes it so: here a view that appears while the log is open."""
    monkeypatch.setattr(log_file, "_LONGEST", 0.3)
    with Agent(folder, timeout=0.1, on_log_failure="raise") as agent:
        agent.events()
        mutate(folder, "DROP TABLE events", f"CREATE VIEW events AS {ENDLESS}")
        with pytest.raises((LogUnavailable, DataError)):
            agent.totals()


def test_no_mutation_of_a_row_is_silent(folder):
    """Two hundred random changes: each leaves the same events, or is refused, or is counted."""
    before, rng = read(folder), np.random.default_rng(5)
    with open(folder / "events.sqlite", "rb") as file:
        payload = file.read()
    assert not (folder / "events.sqlite-wal").exists()
    columns = [name.split()[0] for name in log_file._ADDED["events"]]
    columns += [
        "sequence",
        "made",
        "nonce",
        "version",
        "space",
        "action",
        "propensity",
        "reward",
        "settled",
    ]
    columns += ["available", "ids", "vals"]
    values = ["NULL", "0", "1", "-1", "2.5", "1e300", f"{2**53}", "'text'", "x'00'", "x'0000803f'"]
    for _ in range(200):
        (folder / "events.sqlite").write_bytes(payload)
        column, value = rng.choice(columns), rng.choice(values)
        try:
            mutate(
                folder,
                f"UPDATE events SET {column} = {value} WHERE sequence = {rng.integers(1, 7)}",
            )
            found = read(folder)
        except (sqlite3.IntegrityError, DataError):
            continue
        same = np.array_equal(found.events.rewards, before.events.rewards) and np.array_equal(
            found.sequence, before.sequence
        )
        assert found.damaged or found.left_out or same, (column, value)


def test_a_log_of_0_2_is_taken_over_with_all_its_events(folder):
    dropped = [
        f"ALTER TABLE events DROP COLUMN {name}" for name in ("catalogue", "items", "own", "mark")
    ]
    dropped += [f"ALTER TABLE log DROP COLUMN {name}" for name in ("last", "held", "total", "mark")]
    mutate(folder, *dropped, "PRAGMA user_version = 1")
    with Agent(folder) as agent:
        found = agent.events()
        assert (len(found), found.damaged) == (EVENTS, 0)
        decision = agent.choose("cat")
        assert decision.event_id.startswith(f"{EVENTS + 1}-")
        assert agent.reward(decision.event_id, 1.0) is Outcome.RECORDED
    assert len(read(folder)) == EVENTS + 1
