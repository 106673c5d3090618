"""All state that crosses a round, in one object, and how it is kept: one safetensors file, written atomically."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbandit.core.errors import DataError
from fedbandit.core.files import write_bytes

if TYPE_CHECKING:
    from fedbandit.federated.server import Step


@dataclass(frozen=True)
class State:
    """What a simulation has learned and counted after `round` rounds."""

    round: int
    weights: np.ndarray  # the training model, flat
    deployed: dict[int, np.ndarray]  # models that clients may still hold, by version
    optimizer: dict[str, np.ndarray]
    clip_norm: float
    reward_total: float = 0.0  # over rounds that had events
    rewarded_rounds: int = 0
    extra: dict[str, Any] = field(default_factory=dict)  # JSON of parts that keep state of their own

    @property
    def running_reward(self) -> float | None:
        return self.reward_total / self.rewarded_rounds if self.rewarded_rounds else None

    def after(
        self,
        step: "Step",
        deployed: dict[int, np.ndarray],
        reward: float | None,
        extra: dict[str, Any] | None = None,
    ) -> "State":
        """The state one round later, with the server's step taken and the round's reward counted (None: no events)."""
        return State(
            round=self.round + 1,
            weights=step.weights,
            deployed=deployed,
            optimizer=step.optimizer,
            clip_norm=step.clip_norm,
            reward_total=self.reward_total + (reward or 0.0),
            rewarded_rounds=self.rewarded_rounds + (reward is not None),
            extra=self.extra if extra is None else extra,
        )


def save_state(state: State, path: Path) -> None:
    """Write the state so that the file is either complete or not there."""
    from safetensors.numpy import save

    tensors = {"weights": state.weights}
    tensors |= {f"deployed/{version}": weights for version, weights in state.deployed.items()}
    tensors |= {f"optimizer/{name}": value for name, value in state.optimizer.items()}
    scalars = {
        "round": state.round,
        "clip_norm": state.clip_norm,
        "reward_total": state.reward_total,
        "rewarded_rounds": state.rewarded_rounds,
        "extra": state.extra,
    }
    write_bytes(path, save(tensors, metadata={"state": json.dumps(scalars)}))


def load_state(path: Path) -> State:
    """Read what `save_state` wrote; a damaged file raises `DataError`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            scalars = json.loads(file.metadata()["state"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        return State(
            weights=tensors["weights"],
            deployed={int(version): weights for version, weights in _under("deployed/", tensors).items()},
            optimizer=_under("optimizer/", tensors),
            **scalars,
        )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: damaged checkpoint: {error}") from None


def _under(prefix: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
