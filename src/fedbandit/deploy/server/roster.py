"""The roster of registered nodes in the server's folder, which an operator carries to the devices.

The server reads it to leave out early whom devices would not believe. Devices read their own copies, never this one.
"""

from pathlib import Path

from fedbandit.core.errors import DataError
from fedbandit.core.files import write_text
from fedbandit.deploy.masking.announcements import Roster, roster_line

ROSTER = "roster.pub"


def read_roster(state: Path) -> Roster | None:
    """The registered nodes' keys; None where nodes have none."""
    text = _text(state)
    return None if text is None else Roster.of(text, str(state / ROSTER))


def check_key(public_key: Path) -> None:
    """Refuse a file that is no node's public key."""
    try:
        roster_line(public_key.read_bytes(), "", str(public_key))
    except OSError as error:
        raise DataError(f"{public_key}: {error.strerror}") from None


def add_node(state: Path, public_key: Path, name: str, node: str) -> None:
    """Put a node's key on the roster, under its name and number; in place of the line that the key had."""
    line = roster_line(public_key.read_bytes(), f"{name} node={node}", str(public_key))
    key = " ".join(line.split()[:2])
    others = [known for known in _lines(state) if not known.startswith(f"{key} ")]
    write_text(state / ROSTER, "\n".join([*others, line]) + "\n")


def remove_node(state: Path, node: str) -> bool:
    """Take the key of a node from the roster; whether it was on it."""
    lines = _lines(state)
    left = [line for line in lines if line.split()[-1] != f"node={node}"]
    if len(left) == len(lines):
        return False
    comment = "# registered nodes, one a line"  # a roster without any key is an error, a missing one is none
    write_text(state / ROSTER, "\n".join(left or [comment]) + "\n")
    return True


def _lines(state: Path) -> list[str]:
    return [
        line
        for line in (_text(state) or "").splitlines()
        if line.strip() and not line.startswith("#")
    ]


def _text(state: Path) -> str | None:
    path = state / ROSTER
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {error}") from None
