"""Matrices and errors of correlated noise, written out: what tests compare strategies by."""

import numpy as np

from fedbandit.privacy.strategies import Strategy, noise_of_rounds, squared_sensitivities


def noise_matrix(strategy: Strategy, rounds: int) -> np.ndarray:
    """C⁻¹ [rounds, rounds], as the strategy itself makes it: row t is the noise of round t in terms of Z."""
    rows, memory = [], {}
    for number, fresh in enumerate(np.eye(rounds), start=1):
        noise, memory = strategy.step(number, fresh, memory)
        rows.append(noise)
    return np.stack(rows)


def prefix_error(strategy: Strategy, rounds: int, separation: int, momentum: float = 0.0) -> float:
    """Root mean square noise of the weights over all rounds, in clip norms, at an overall noise multiplier of 1."""
    variance = float(noise_of_rounds(strategy, rounds, momentum)[1].mean())
    return float(np.sqrt(variance * squared_sensitivities(strategy, rounds, separation)[-1]))
