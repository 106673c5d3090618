"""Log files that a server can write for years: one JSON object a line, with its time; rotated;
nothing said twice.

Every line has `time` (UTC), `level` and `message`, and whatever `extra={"facts": {...}}` adds.
"""

import json
import logging
import time
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path

_BYTES = 5_000_000  # of one file
_KEPT = 3  # older files
_AGAIN = 600.0  # seconds after which a line that still holds is worth repeating


def shown_time(seconds: float) -> str:
    """A time as all files and pages of a deployment show it: UTC, to the second."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def stamped(text: str) -> str:
    """A line for a console that somebody reads the next morning."""
    return f"{shown_time(time.time())} {text}"


class JsonLines(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        when = (
            datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z")
        )
        found: dict[str, object] = {
            "time": when,
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        found |= getattr(record, "facts", {})
        if repeated := getattr(record, "repeated", 0):
            found["repeated"] = repeated
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=False, default=str)


class NoRepeats(logging.Filter):
    """Leaves out what the same place in the code has just said, and says how often when it next
    says anything.
    """

    def __init__(self, seconds: float = _AGAIN) -> None:
        super().__init__()
        self._seconds = seconds
        self._last: dict[
            str, tuple[str, float, int]
        ] = {}  # template -> text, when, how often left out since

    def filter(self, record: logging.LogRecord) -> bool:
        text, (before, when, left_out) = (
            record.getMessage(),
            self._last.get(str(record.msg), ("", 0.0, 0)),
        )
        if text == before and record.created - when < self._seconds and not record.exc_info:
            self._last[str(record.msg)] = (text, when, left_out + 1)
            return False
        self._last[str(record.msg)] = (text, record.created, 0)
        record.repeated = left_out
        return True


def rotating(path: Path, size: int = _BYTES, kept: int = _KEPT) -> logging.Handler:
    """A handler for such a file of at most `size` bytes, and as many in each of `kept`
    older ones.
    """
    handler = RotatingFileHandler(
        path, maxBytes=size, backupCount=kept, encoding="utf-8", delay=True
    )
    handler.setFormatter(JsonLines())
    handler.addFilter(NoRepeats())
    return handler
