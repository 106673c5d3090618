"""States of older formats: one file, `state.safetensors`, with all devices in its header. They cannot be made again.

A migration can be killed at any moment: the old file stays until the new database has its name.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.core.files import write_bytes
from fedbandit.deploy.server.database import Mark
from fedbandit.deploy.server.deployment import split_plan
from fedbandit.federated.state import State, load_state

OLD = "state.safetensors"
SET_ASIDE = "migrated-state.safetensors"
# An older fedbandit takes this for a damaged state and refuses it, instead of resuming from before the migration.
_NOTE = b"This deployment has moved to server.sqlite, which fedbandit 0.2 and later read.\n"
_PER_DEVICE = ("counted", "last_turn", "settled")
_NOISE = "noise/"


def has_old_state(folder: Path) -> bool:
    """Whether there is a state of an older format, and not the note that stands for one."""
    return _bytes(folder / OLD) not in (None, _NOTE)


def old_state(folder: Path) -> tuple[State, dict[int, np.ndarray], dict[str, Mark]]:
    """The state, the memory of its noise, and what it remembers of each device."""
    state = load_state(folder / OLD)
    counted, turns, settled = (_by_device(folder, state.extra, name) for name in _PER_DEVICE)
    names = counted.keys() | turns.keys() | settled.keys()
    marks = {
        name: Mark(counted.get(name, 0), turns.get(name), settled.get(name))
        for name in sorted(names)
    }
    memory = {int(k.removeprefix(_NOISE)): v for k, v in state.kept.items() if k.startswith(_NOISE)}
    kept = {name: value for name, value in state.kept.items() if not name.startswith(_NOISE)}
    extra = {name: value for name, value in state.extra.items() if name not in _PER_DEVICE}
    promises = dict(extra["promises"])
    if promises.get("privacy") is not None:
        promises["privacy"] = split_plan(promises["privacy"])
    return replace(state, kept=kept, extra={**extra, "promises": promises}), memory, marks


def set_aside(folder: Path) -> None:
    """Once the database has its name: keep the old file under another one, and leave a note in its place."""
    old, kept = folder / OLD, folder / SET_ASIDE
    payload = _bytes(old)
    if payload is None or payload == _NOTE:
        return
    if _bytes(kept) not in (None, payload):
        raise DataError(f"{old}: is another state than the one that was migrated; move it away")
    write_bytes(kept, payload)
    write_bytes(old, _NOTE)


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _by_device(folder: Path, extra: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = extra.get(name, {})
    kind = str if name == "settled" else int
    if not isinstance(found, dict) or not all(type(value) is kind for value in found.values()):
        raise DataError(f"{folder / OLD}: damaged checkpoint: {name} is not by device")
    return found
