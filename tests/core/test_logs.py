"""Log files: JSON with times, rotated, and nothing said twice."""

import json
import logging

import pytest

from fedbandit.core.logs import NoRepeats, rotating, shown_time


@pytest.fixture
def logger():
    logger = logging.Logger("test")
    yield logger
    for handler in list(logger.handlers):
        handler.close()


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_its_time_level_and_facts(tmp_path, logger):
    logger.addHandler(rotating(tmp_path / "log"))
    logger.warning("round %d: late", 3, extra={"facts": {"round": 3}})
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("stopped")
    first, second = lines_of(tmp_path / "log")
    assert (first["level"], first["message"], first["round"]) == ("warning", "round 3: late", 3)
    assert first["time"].endswith("Z")
    assert len(first["time"]) == len("2026-01-01T00:00:00.000Z")
    assert "ValueError: broken" in second["exception"]


def test_a_file_is_rotated_and_old_ones_go(tmp_path, logger):
    logger.addHandler(rotating(tmp_path / "log", size=1000, kept=2))
    for number in range(200):
        logger.info("line %d", number)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["log", "log.1", "log.2"]
    assert all(file.stat().st_size <= 1000 for file in files)
    assert lines_of(tmp_path / "log")[-1]["message"] == "line 199"


def test_what_still_holds_is_said_once_in_ten_minutes():
    repeats, said = NoRepeats(seconds=600), []
    for second in range(1300):
        record = logging.LogRecord(
            "x", logging.INFO, "", 0, "waiting: %d nodes", (2 + (second >= 1000),), None
        )
        record.created = 1e9 + second
        if repeats.filter(record):
            said.append((second, record.getMessage(), record.repeated))
    assert said == [
        (0, "waiting: 2 nodes", 0),
        (600, "waiting: 2 nodes", 599),
        (1000, "waiting: 3 nodes", 399),
    ]


def test_two_places_do_not_hide_each_other():
    repeats = NoRepeats()
    said = [
        repeats.filter(logging.LogRecord("x", logging.INFO, "", 0, text, (), None))
        for text in ("a", "b", "a", "b")
    ]
    assert said == [True, True, False, False]


def test_times_are_shown_in_utc():
    assert shown_time(0) == "1970-01-01T00:00:00Z"
