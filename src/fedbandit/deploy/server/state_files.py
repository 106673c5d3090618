"""A generation of the server's state: its arrays in files, written whole and read back by their checksums.

The noise has a file of its own: it may survive where the weights do not. Knows nothing of folders as a whole.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.core.files import pack, unpack, write_bytes
from fedbandit.deploy.server.database import Generation
from fedbandit.federated.state import DamagedState, State, read_state, state_bytes

_SCALARS = ("round", "clip_norm", "reward_total", "rewarded_rounds", "events", "extra")


def facts_of(state: State, devices: int) -> dict[str, Any]:
    """Everything of a state that is not an array."""
    scalars = {name: getattr(state, name) for name in _SCALARS}
    return {**scalars, "deployed": sorted(state.deployed), "devices": devices}


def with_facts(state: State, generation: Generation) -> State:
    """The arrays of one state with the facts of another generation."""
    return replace(state, **{name: generation.facts[name] for name in _SCALARS})


def write_files(
    folder: Path, number: int, state: State, memory: Mapping[int, np.ndarray]
) -> dict[str, str]:
    """Put a generation's files on disk; their names, with their checksums."""
    payloads = {_state_name(number): state_bytes(state)}
    if memory:
        payloads[_noise_name(number)] = pack({str(at): value for at, value in memory.items()}, {})
    for name, payload in payloads.items():
        write_bytes(folder / name, payload)
    return {name: hashlib.sha256(payload).hexdigest() for name, payload in payloads.items()}


def read_arrays(folder: Path, generation: Generation) -> State:
    """The state as it was written; `DamagedState` where that is lost."""
    name = _state_name(generation.number)
    return read_state(_bytes(folder, generation, name), folder / name)


def read_memory(folder: Path, generation: Generation) -> dict[int, np.ndarray]:
    """The memory of the noise. Nothing can take its place: the rounds to come would be less private than stated."""
    name = _noise_name(generation.number)
    if name not in generation.files:
        return {}
    try:
        return {int(at): value for at, value in unpack(_bytes(folder, generation, name))[0].items()}
    except (DamagedState, ValueError) as damage:
        problem = "without this memory of the noise no round is as private as promised"
        raise DataError(f"{damage}; {problem}; restore the file from a copy") from None


def _state_name(number: int) -> str:
    return f"state-{number}.safetensors"


def _noise_name(number: int) -> str:
    return f"noise-{number}.safetensors"


def _bytes(folder: Path, generation: Generation, name: str) -> bytes:
    """The bytes that were written under that name; a file that cannot be read says nothing about them."""
    path = folder / name
    try:
        payload = path.read_bytes()
    except FileNotFoundError:
        raise DamagedState(f"{path}: is gone") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if hashlib.sha256(payload).hexdigest() != generation.files[name]:
        raise DamagedState(f"{path}: damaged: its checksum does not match")
    return payload
