"""Small device models, and clocks that tests set by hand."""

from dataclasses import dataclass, field

import numpy as np

from fedbandit.deploy import DeviceModel
from fedbandit.deploy.device.log import LogRow, Reading

WORDS = ("the", "cat", "sat", "on", "a", "mat", "c++")


def text_model(
    version: int = 1, *, actions: int = 4, seed: int = 0, policy=None, vocabulary=WORDS
) -> DeviceModel:
    rng = np.random.default_rng(seed)
    return DeviceModel(
        version=version,
        weights={
            "weight": rng.normal(size=(len(vocabulary), actions)).astype(np.float32),
            "bias": rng.normal(size=actions).astype(np.float32),
        },
        actions=tuple(f"tag{i}" for i in range(actions)),
        kind="sparse",
        shape=(len(vocabulary),),
        policy=policy or {"name": "softmax", "beta": 1.0},
        vocabulary=vocabulary,
    )


def dense_model(
    version: int = 1, *, shape: tuple[int, ...] = (2, 3), actions: int = 4, seed: int = 0
) -> DeviceModel:
    rng = np.random.default_rng(seed)
    return DeviceModel(
        version=version,
        weights={
            "weight": rng.normal(size=(int(np.prod(shape)), actions)).astype(np.float32),
            "bias": rng.normal(size=actions).astype(np.float32),
        },
        actions=tuple(f"a{i}" for i in range(actions)),
        kind="dense",
        shape=shape,
        policy={"name": "epsilon-greedy", "epsilon": 0.4},
    )


@dataclass
class HandClock:
    """Both clocks of a device, set by hand."""

    wall: float = 1_700_000_000.0
    steady: float = 100.0
    boot: str = "first"
    boots: int = field(default=1)

    def __call__(self) -> Reading:
        return Reading(self.wall, self.steady, self.boot)

    def wait(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds

    def set_wall(self, by: float) -> None:
        self.wall += by

    def reboot(self, off_for: float = 10.0) -> None:
        self.boots += 1
        self.wall += off_for
        self.steady, self.boot = 1.0, f"boot {self.boots}"


def a_record(
    version: int = 1, action: int = 0, propensity: float = 0.5, value: float = 1.0
) -> LogRow:
    values = np.float32([value]).tobytes()
    return LogRow(
        version=version, space="space", action=action, propensity=propensity, values=values
    )
