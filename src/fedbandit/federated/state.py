"""All state that crosses a round, in one object, and how it is kept: one safetensors file, written
atomically.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from fedbandit.core.errors import DataError
from fedbandit.core.files import packed, read_packed, unpack, write_atomically
from fedbandit.core.prediction import Progress
from fedbandit.federated.pipeline import Vectors

if TYPE_CHECKING:  # who only reads a state need not wait for the compiled optimisers
    from fedbandit.federated.server import Step


class DamagedState(DataError):
    """A checkpoint that was read, and whose bytes are not those that were written."""


@dataclass(frozen=True)
class Version:
    """A deployed model: its weights, and how far the run had come, which decides the rule that
    ships with it.
    """

    weights: np.ndarray  # flat
    progress: Progress = field(default_factory=Progress)


@dataclass(frozen=True)
class State:
    """All that has been learned and counted after `round` rounds."""

    round: int
    weights: np.ndarray  # the training model, flat
    deployed: dict[int, Version]  # models that clients may still hold, by version
    server_state: Vectors  # what the algorithm keeps between rounds
    clip_norm: float
    reward_total: float = 0.0  # over rounds that had events
    rewarded_rounds: int = 0
    events: int = 0  # logged so far
    extra: dict[str, Any] = field(
        default_factory=dict
    )  # JSON of parts that keep state of their own

    @property
    def running_reward(self) -> float | None:
        return self.reward_total / self.rewarded_rounds if self.rewarded_rounds else None

    def after(
        self,
        step: "Step",
        weights: np.ndarray,
        deployed: dict[int, Version],
        reward: float | None,
        events: int,
        extra: dict[str, Any] | None = None,
    ) -> "State":
        """The state one round later: the step taken, the round's events and reward counted (None:
        no events).
        """
        return State(
            round=self.round + 1,
            weights=weights,
            deployed=deployed,
            server_state=step.server_state,
            clip_norm=step.clip_norm,
            reward_total=self.reward_total + (reward or 0.0),
            rewarded_rounds=self.rewarded_rounds + (reward is not None),
            events=self.events + events,
            extra=self.extra if extra is None else extra,
        )


def save_state(state: State, path: Path, **marks: str) -> None:
    """Write the state with its checksum, so that the file is either complete or not there.

    Marks stand beside it in the file: `run`, the id of what it is the state of, and for a
    checkpoint `metrics`, the digest of the metrics up to its round.
    """
    parts = _parts(state, marks)
    write_atomically(path, lambda file: file.writelines(parts))


def state_bytes(state: State) -> bytes:
    """The bytes of the state's file, with their checksum."""
    return b"".join(_parts(state, {}))


def _parts(state: State, marks: Mapping[str, str]) -> tuple[bytes, memoryview]:
    tensors = {"weights": state.weights}
    tensors |= {f"deployed/{number}": version.weights for number, version in state.deployed.items()}
    # The model itself is usually among what an algorithm keeps; it is written once.
    tensors |= {
        f"kept/{name}": value
        for name, value in state.server_state.items()
        if value is not state.weights
    }
    scalars = {
        "round": state.round,
        "clip_norm": state.clip_norm,
        "reward_total": state.reward_total,
        "rewarded_rounds": state.rewarded_rounds,
        "events": state.events,
        "progress": {
            number: asdict(version.progress) for number, version in state.deployed.items()
        },
        "same_as_weights": [
            name for name, value in state.server_state.items() if value is state.weights
        ],
        "extra": state.extra,
    }
    return packed(tensors, {**marks, "state": json.dumps(scalars)})


def load_state(path: Path) -> State:
    """Read what `save_state` wrote; see `load_marked`, which also says what it is the state of."""
    return load_marked(path)[0]


def load_marked(path: Path) -> tuple[State, dict[str, str]]:
    """Read what `save_state` wrote, and the marks beside it.

    `DamagedState` is raised for a file that was read and is not what was written. A file that could
    not be read (no permission, too many open files) says nothing about its contents; it is another
    `DataError`.
    """
    try:
        payload = read_packed(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DamagedState(f"{path}: damaged checkpoint: {error}") from None
    return _read(payload, path)


def read_state(payload: bytes, path: Path) -> State:
    """The state in the bytes of that file; `DamagedState` where they are not those that were
    written.
    """
    return _read(payload, path)[0]


def _read(payload: bytes, path: Path) -> tuple[State, dict[str, str]]:
    try:
        tensors, texts = unpack(payload)
        scalars = _Scalars.model_validate(json.loads(texts.pop("state")))
        return _checked(scalars, tensors), texts
    except KeyError as error:
        raise DamagedState(f"{path}: damaged checkpoint: {error} is missing") from None
    except ValidationError as error:
        first = error.errors()[0]
        said = " ".join(map(str, (*first["loc"], first["msg"])))
        raise DamagedState(f"{path}: damaged checkpoint: {said}") from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise DamagedState(f"{path}: damaged checkpoint: {error}") from None


_Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Scalars(BaseModel, strict=True, extra="forbid"):
    """The numbers of a checkpoint, each one that a run can have come to."""

    round: _Count
    clip_norm: Annotated[float, Field(ge=0)]  # infinite: no clipping
    reward_total: FiniteFloat
    rewarded_rounds: _Count
    events: _Count
    progress: dict[Annotated[str, Field(pattern=r"^\d+$")], dict[str, _Count]]  # by version
    same_as_weights: list[str]  # names in the server's state
    extra: dict[str, Any]


def _checked(scalars: _Scalars, tensors: Mapping[str, np.ndarray]) -> State:
    """The state, once every type and shape is one that a run can have come to."""
    weights = tensors["weights"]
    for name, array in tensors.items():
        if name != "weights" and not name.startswith("deployed/"):
            continue
        kind = (array.shape, array.dtype)
        if array.ndim != 1 or array.dtype.kind != "f" or kind != (weights.shape, weights.dtype):
            raise ValueError(f"{name} has type {array.dtype} and shape {array.shape}")
        if not np.isfinite(array).all():
            raise ValueError(f"{name} holds values that are not finite")
    if scalars.rewarded_rounds > scalars.round:
        raise ValueError(f"rewarded_rounds is {scalars.rewarded_rounds} in round {scalars.round}")
    return State(
        round=scalars.round,
        weights=weights,
        deployed={
            int(number): Version(array, Progress(**scalars.progress[number]))
            for number, array in _under("deployed/", tensors).items()
        },
        server_state=dict.fromkeys(scalars.same_as_weights, weights) | _under("kept/", tensors),
        clip_norm=scalars.clip_norm,
        reward_total=scalars.reward_total,
        rewarded_rounds=scalars.rewarded_rounds,
        events=scalars.events,
        extra=scalars.extra,
    )


def _under(prefix: str, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
