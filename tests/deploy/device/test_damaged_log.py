"""A damaged log is refused with one clear line that names the file, and never taken for a new, empty one."""

import logging
import sqlite3

import pytest
from device_builders import text_model

from fedbandit.core.errors import DataError
from fedbandit.deploy import Agent, Outcome


@pytest.fixture
def log_path(tmp_path):
    with Agent(tmp_path) as agent:
        agent.install(text_model())
        for _ in range(200):
            agent.reward(agent.choose("cat mat").event_id, 1.0)
    path = tmp_path / "events.sqlite"
    assert path.stat().st_size > 3 * 4096
    return path


def truncate(keep):
    return lambda data: data[:keep]


def overwrite(start, stop):
    return lambda data: data[:start] + b"\xa5" * (stop - start) + data[stop:]


@pytest.mark.parametrize(
    "damage",
    [
        truncate(0),
        truncate(50),
        truncate(4096),
        truncate(2 * 4096 + 100),
        overwrite(0, 100),
        overwrite(4096, 8192),
    ],
    ids=["empty", "half a header", "one page", "in a page", "header", "page"],
)
def test_damage_is_named_in_one_line(log_path, damage):
    log_path.write_bytes(damage(log_path.read_bytes()))
    damaged = log_path.read_bytes()
    with pytest.raises(DataError) as error:
        Agent(log_path.parent)
    assert str(error.value).startswith(str(log_path))
    assert "\n" not in str(error.value)
    assert "move it away" in str(error.value)
    assert log_path.read_bytes() == damaged  # left as found, for whoever wants to rescue something


def test_another_database_is_not_an_event_log(tmp_path):
    with sqlite3.connect(tmp_path / "events.sqlite") as db:
        db.execute("CREATE TABLE mine (x)")
    db.close()
    with pytest.raises(DataError, match="not an event log"):
        Agent(tmp_path)


def test_a_log_of_a_later_format_is_refused(log_path):
    db = sqlite3.connect(log_path)
    db.execute("PRAGMA user_version = 3")
    db.close()
    with pytest.raises(DataError, match="made by a newer fedbandit, format 3"):
        Agent(log_path.parent)


def test_what_was_not_yet_in_the_log_does_not_spoil_a_new_one(log_path):
    """Somebody removes the log but not the file with its newest entries."""
    log_path.with_name("events.sqlite-wal").write_bytes(b"left behind")
    log_path.unlink()
    with pytest.raises(DataError, match=r"events\.sqlite-wal"):
        Agent(log_path.parent)


def test_an_app_in_service_goes_on_choosing_over_a_log_that_breaks(log_path, caplog):
    agent = Agent(log_path.parent)
    event = agent.choose("cat").event_id
    agent.close()
    log_path.write_bytes(overwrite(0, 8192)(log_path.read_bytes()))
    with caplog.at_level(logging.WARNING, "fedbandit.deploy"):
        decision = agent.choose("cat")
        assert agent.reward(event, 1.0) is Outcome.NOT_STORED
    assert not decision.logged
    assert str(log_path) in decision.problem
    assert str(log_path) in caplog.text
    agent.close()
