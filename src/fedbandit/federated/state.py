"""All state that crosses a round, in one object, and how it is kept: one safetensors file, written atomically."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.core.files import write_bytes
from fedbandit.core.prediction import Progress
from fedbandit.federated.pipeline import Vectors

if TYPE_CHECKING:  # who only reads a state need not wait for the compiled optimisers
    from fedbandit.federated.server import Step


@dataclass(frozen=True)
class Version:
    """A deployed model: its weights, and how far the run had come, which decides the rule that ships with it."""

    weights: np.ndarray  # flat
    progress: Progress = field(default_factory=Progress)


@dataclass(frozen=True)
class State:
    """What has been learned and counted after `round` rounds."""

    round: int
    weights: np.ndarray  # the training model, flat
    deployed: dict[int, Version]  # models that clients may still hold, by version
    kept: Vectors  # what the algorithm keeps between rounds
    clip_norm: float
    reward_total: float = 0.0  # over rounds that had events
    rewarded_rounds: int = 0
    events: int = 0  # logged so far
    extra: dict[str, Any] = field(default_factory=dict)  # JSON of parts that keep state of their own

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
        """The state one round later: the step taken, the round's events and reward counted (None: no events)."""
        return State(
            round=self.round + 1,
            weights=weights,
            deployed=deployed,
            kept=step.kept,
            clip_norm=step.clip_norm,
            reward_total=self.reward_total + (reward or 0.0),
            rewarded_rounds=self.rewarded_rounds + (reward is not None),
            events=self.events + events,
            extra=self.extra if extra is None else extra,
        )


def save_state(state: State, path: Path) -> None:
    """Write the state so that the file is either complete or not there."""
    from safetensors.numpy import save

    tensors = {"weights": state.weights}
    tensors |= {f"deployed/{number}": version.weights for number, version in state.deployed.items()}
    # The model itself is usually among what an algorithm keeps; it is written once.
    tensors |= {f"kept/{name}": value for name, value in state.kept.items() if value is not state.weights}
    scalars = {
        "round": state.round,
        "clip_norm": state.clip_norm,
        "reward_total": state.reward_total,
        "rewarded_rounds": state.rewarded_rounds,
        "events": state.events,
        "progress": {number: asdict(version.progress) for number, version in state.deployed.items()},
        "same_as_weights": [name for name, value in state.kept.items() if value is state.weights],
        "extra": state.extra,
    }
    write_bytes(path, save(tensors, metadata={"state": json.dumps(scalars)}))


def load_state(path: Path) -> State:
    """Read what `save_state` wrote, now or in version 0.1; a damaged file raises `DataError`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            scalars = json.loads(file.metadata()["state"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        if "progress" not in scalars:
            scalars, tensors = _from_0_1(scalars, tensors)
        progress, same = scalars.pop("progress"), scalars.pop("same_as_weights")
        weights = tensors["weights"]
        return State(
            weights=weights,
            deployed={
                int(number): Version(array, Progress(**progress[number]))
                for number, array in _under("deployed/", tensors).items()
            },
            kept=dict.fromkeys(same, weights) | _under("kept/", tensors),
            **scalars,
        )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: damaged checkpoint: {error}") from None


def _from_0_1(scalars: dict[str, Any], tensors: dict[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A state of version 0.1, which knew one algorithm: its optimiser's vectors, and a server's memory of noise."""
    moved = {}
    for name, value in tensors.items():
        own = name.removeprefix("optimizer/")
        if own == name:
            moved[name] = value
        else:
            moved["kept/" + (own if own.startswith("noise/") else f"optimizer/{own}")] = value
    numbers = _under("deployed/", tensors)
    progress = {number: asdict(Progress(version=int(number))) for number in numbers}
    return {**scalars, "events": 0, "progress": progress, "same_as_weights": ["weights"]}, moved


def _under(prefix: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
