"""What a private deployment has spent, in a file that only grows: each round is charged before anybody can see it.

The server's state could be lost or restored from an old copy; this says which rounds were released all the same.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedbandit.core.errors import DataError
from fedbandit.core.files import keep_names, object_in

NAME = "ledger.jsonl"
_LONGEST = 1024  # bytes in which a line ends
What = Literal["charged", "released", "migrated", "witnessed"]  # the last: released, as devices say


@dataclass(frozen=True)
class Spent:
    """How far a ledger goes."""

    charged: int = (
        0  # the last round that was charged; it may not have come about, and be charged again
    )
    released: int = 0  # the last round that anybody may have seen
    link: str = ""  # what the next line continues


def read_ledger(path: Path) -> Spent | None:
    """What the ledger says, None if there is none; a line that is not what was written is refused."""
    try:
        lines = path.read_bytes().split(b"\n")[
            :-1
        ]  # what has no end was not completed, and nothing followed it
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    spent = Spent()
    for number, line in enumerate(lines, start=1):
        try:
            spent = _after(spent, line)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}: line {number} is damaged ({error}); restore the file from a copy"
            ) from None
    return spent


def append(path: Path, number: int, what: What) -> None:
    """Put one more line on disk, for good, before this returns."""
    body = json.dumps({"round": number, "what": what})
    with open(path, "ab+") as file:
        os.fchmod(file.fileno(), 0o600)
        start = max(0, file.seek(0, os.SEEK_END) - _LONGEST)
        file.seek(start)
        complete, newline, _ = file.read().rpartition(b"\n")
        file.truncate(
            start + len(complete + newline)
        )  # half a line may be left of a server that was killed
        before = object_in(complete.rpartition(b"\n")[2])["link"] if complete else ""
        file.write(f'{{"entry": {body}, "link": "{_link(before, body)}"}}\n'.encode())
        file.flush()
        os.fsync(file.fileno())
    keep_names(path.parent)


def _after(before: Spent, line: bytes) -> Spent:
    found = object_in(line)
    number, what = found["entry"]["round"], found["entry"]["what"]
    if found["link"] != _link(before.link, json.dumps(found["entry"])):
        raise ValueError("it does not continue the line before")
    if what == "charged":
        return Spent(number, before.released, found["link"])
    return Spent(max(number, before.charged), number, found["link"])


def _link(before: str, body: str) -> str:
    return hashlib.sha256(f"{before}{body}".encode()).hexdigest()[:16]
