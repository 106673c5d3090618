"""What a device remembers of its rounds: its name, and up to where its rewards have been counted. One small file.

Written before anything leaves the device that depends on it.
"""

import json
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fedbandit.files import write_json


@dataclass(frozen=True)
class Card:
    """A device's name, its mark, and what its last secure round will have counted if it came about."""

    device: str = field(default_factory=lambda: uuid.uuid4().hex)
    counted: int = 0
    pending: dict[str, int] = field(default_factory=dict)  # token of a round -> the mark if its sum was taken


def read_card(path: Path) -> Card:
    """The card in the file; the first time, a new one, which must be written before anybody hears of it."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        card = Card()
        write_card(path, card)
        return card
    pending = {str(token): int(mark) for token, mark in kept.get("pending", {}).items()}
    return Card(str(kept["device"]), int(kept["counted"]), pending)


def write_card(path: Path, card: Card) -> None:
    """Keep the card, or raise `OSError` and keep the old one."""
    write_json(path, asdict(card))
