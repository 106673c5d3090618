"""Where an agent's random numbers come from: the operating system, or addresses as in a simulation."""

import os
from dataclasses import dataclass

from fedbandit.randomness import Purpose, uniforms


def system_uniform() -> float:
    """A float64 in [0, 1) that nobody can foresee."""
    return (int.from_bytes(os.urandom(8), "little") >> 11) * 2.0**-53


@dataclass
class SimulatedDraws:
    """The draws that the simulator makes for one client, so that an agent can be compared with it action by action.

    `client` is the client's index in the training split; `time` is the round (simple mode) or the period (population
    mode). Within a time the draws are numbered from 0.
    """

    seed: int
    client: int
    time: int
    position: int = 0

    def start(self, time: int) -> None:
        """Go on with another round or period."""
        self.time, self.position = time, 0

    def __call__(self) -> float:
        drawn = uniforms(self.seed, Purpose.ACTIONS, self.time, self.client, self.position)
        self.position += 1
        return float(drawn)
