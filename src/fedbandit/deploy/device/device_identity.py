"""A device's card: the file by which a server knows it again, and by which it knows what has been counted.

Checked when it is read and before it is written; a damaged one is refused by name, never replaced in silence.
"""

import json
import logging
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fedbandit.core.errors import DataError
from fedbandit.core.files import write_json
from fedbandit.deploy.device.participation import Turns, read_turns

_logger = logging.getLogger("fedbandit.deploy")


def make_private_folder(folder: Path) -> None:
    """Make the folder, or take an existing one, with all that stands in it, from everybody else."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True, mode=0o700)
    _restrict(folder, 0o700)
    for path in folder.iterdir():
        if path.is_file() and not path.is_symlink():
            make_private(path)


def make_private(path: Path) -> None:
    """Let only its owner read and write a file."""
    _restrict(path, 0o600)


def _restrict(path: Path, mode: int) -> None:
    try:
        if path.stat().st_mode & 0o777 & ~mode:
            path.chmod(mode)
    except FileNotFoundError:
        pass  # another process has cleared it away
    except OSError as error:
        _logger.warning(
            "%s: others may read it, and that cannot be changed: %s", path, error.strerror
        )


_LONGEST = 64  # characters of a name or a token, as servers take them


_MOST = 2**63  # what SQLite counts to


_LARGEST_FILE = 1 << 20  # bytes; an honest card has a few hundred


@dataclass(frozen=True)
class Card:
    """A device's name, its mark, its last part in secure sums, and its turns in private rounds."""

    device: str = field(default_factory=lambda: uuid.uuid4().hex)
    counted: int = 0
    pending: Mapping[str, int] = field(
        default_factory=dict
    )  # token of a round -> the mark if its sum was taken
    private: Turns | None = (
        None  # what it agreed to and has done in private rounds; None: it never was in any
    )
    user: str | None = (
        None  # whose device it is, by a name that means nothing to anybody else; None: nobody said
    )
    masked: int | None = None  # the round of its last masked vector, whose token is in `pending`
    summed: int | None = None  # the last round in which it let a sum be unmasked

    def __post_init__(self) -> None:
        if not is_token(self.device):
            raise DataError(f"device: not a name of 1 to {_LONGEST} characters")
        if not is_mark(self.counted):
            raise DataError("counted: not a count")
        if not all(value is None or is_mark(value) for value in (self.masked, self.summed)):
            raise DataError("masked, summed: not rounds")
        if not isinstance(self.pending, dict) or not all(
            is_token(t) and is_mark(m) for t, m in self.pending.items()
        ):
            raise DataError("pending: not counts by the tokens of rounds")
        if self.user is not None and not is_token(self.user):
            raise DataError(f"user: not a name of 1 to {_LONGEST} characters")


def is_token(value: object) -> bool:
    """Whether it can name a device or a round."""
    return isinstance(value, str) and 0 < len(value) <= _LONGEST


def is_mark(value: object) -> bool:
    """Whether it can be a place in the order of a log."""
    return type(value) is int and 0 <= value < _MOST


def read_card(path: Path) -> Card:
    """The card in the file; the first time, a new one, which must be written before it is used."""
    try:
        with open(path, "rb") as file:
            kept: Any = json.loads(file.read(_LARGEST_FILE))
    except FileNotFoundError:
        card = Card()
        write_card(path, card)
        return card
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)[:100]) from None
    if not isinstance(kept, dict):
        raise _damaged(path, f"a {type(kept).__name__} where a card was expected")
    try:
        private = read_turns(kept.get("private"))
        pending = kept.get("pending", {})
        more = {name: kept.get(name) for name in ("user", "masked", "summed")}
        return Card(kept.get("device", ""), kept.get("counted"), pending, private, **more)  # type: ignore[arg-type]
    except DataError as problem:
        raise _damaged(path, str(problem)) from None


def name_user(folder: Path, user: str) -> None:
    """Say, once, whose device the one with that agent's folder is; all devices of one person get the same name."""
    path = folder / "device.json"
    if not is_token(user):
        raise DataError(f"user: not a name of 1 to {_LONGEST} characters")
    card = read_card(path)
    if card.user not in (None, user):
        raise DataError(
            f"{path}: a device of user {card.user}; move the file away, and the device joins as a new one"
        )
    if card.user is None:
        write_card(path, replace(card, user=user))


def write_card(path: Path, card: Card) -> None:
    """Keep the card, or raise `OSError` and keep the old one."""
    write_json(path, {name: value for name, value in asdict(card).items() if value is not None})
    make_private(path)


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path}: damaged ({what}); move it away, and the device joins as a new one")
