"""The paper's recipe for clip norms, mechanisms compared by their error, and pictures of epsilon
and error.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.assembly.privacy import candidates, server_momentum
from fedbandit.config import Config
from fedbandit.core.errors import Diverged
from fedbandit.data import FederatedDataset
from fedbandit.privacy.accounting import Ledger
from fedbandit.privacy.reporting import MEANINGLESS, assumptions
from fedbandit.privacy.strategies import (
    Banded,
    Blt,
    Restarted,
    Strategy,
    Tree,
    honaker_variances,
    noise_of_weights,
)
from fedbandit.results.plots import empty_figure, require_picture, save_picture, write_heading
from fedbandit.simulation.simulate import simulate

_LADDER = (1.0, 2.0, 5.0)  # the paper's grids are of this form, times powers of ten


@dataclass(frozen=True)
class Tried:
    """One point of the grid; a reward of None has diverged."""

    server_learning_rate: float
    client_learning_rate: float
    running_reward: float | None


def estimate_norm(
    config: Config, dataset: FederatedDataset | None = None, quantile: float = 0.5
) -> float:
    """The norm at which adaptive clipping without noise settles: the median of the last quarter of
    rounds.
    """
    plain = config.with_values({"privacy": {}, "clipping": {"quantile": quantile, "initial": 0.1}})
    norms = simulate(plain, dataset).collect()["clip_norm"]
    return float(np.median(norms[-max(1, len(norms) // 4) :]))


def rates_around(rate: float) -> tuple[float, ...]:
    """A rate with its lower and upper neighbour in 1, 2, 5, 10, 20, ..."""
    ladder = [step * 10.0**power for power in range(-6, 4) for step in _LADDER]
    nearest = int(np.argmin(np.abs(np.log(np.array(ladder) / rate))))
    return tuple(float(f"{ladder[i]:g}") for i in (nearest - 1, nearest, nearest + 1))


def try_rates(
    config: Config, norm: float, dataset: FederatedDataset | None = None
) -> Iterator[Tried]:
    """Run the configuration with the norm fixed, for every pair of rates around its own."""
    for server in rates_around(config.server.learning_rate):
        for client in rates_around(config.client.learning_rate):
            member = config.with_values(
                {
                    "clipping.norm": norm,
                    "server.learning_rate": server,
                    "client.learning_rate": client,
                }
            )
            try:
                reward = float(simulate(member, dataset).collect()["running_reward"][-1])
            except Diverged:
                reward = None
            yield Tried(server, client, reward)


def rounded(norm: float) -> float:
    """Two digits, as one would write a clip norm down."""
    return float(f"{norm:.2g}")


_EXACT_POINTS = 12  # a privacy loss distribution takes a second each


def draw_epsilon(ledger: Ledger, path: Path) -> Path:
    """Epsilon by RDP after every round, and by privacy loss distributions at some, saved by the
    path's suffix.
    """
    require_picture(path)
    plan = ledger.plan
    rounds = np.unique(np.linspace(1, plan.rounds, min(plan.rounds, 200)).astype(int))
    # Closer together at the beginning, where epsilon bends.
    some = np.unique(1 + np.square(np.linspace(0, 1, _EXACT_POINTS)) * (plan.rounds - 1)).astype(
        int
    )
    by_rdp = [ledger.epsilon(int(number)) for number in rounds]
    by_pld = [ledger.tight_epsilon(int(number)) for number in some]
    figure = empty_figure(7.2, 4.2)
    axes = figure.add_subplot()
    axes.plot(rounds, by_rdp, color="#0072B2", linewidth=1.6, label="RDP")
    axes.plot(some, by_pld, color="#D55E00", linewidth=1.6, marker="o", markersize=3, label="PLD")
    if max(by_rdp) > MEANINGLESS:
        axes.axhspan(
            MEANINGLESS, max(by_rdp), color="#eeeeee", zorder=0, label="no meaningful guarantee"
        )
    axes.set(
        xlabel="round",
        ylabel=f"epsilon at delta = {plan.delta:g}",
        ylim=(0, None),
        xlim=(1, plan.rounds),
    )
    title = f"noise {plan.noise_multiplier:g}, {plan.clients_per_round} of {plan.population:,} clients a round"
    write_heading(
        axes, title, f"{plan.sampling} sampling; adjacency: {assumptions(plan)['adjacency']}"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return save_picture(figure, path)


@dataclass(frozen=True)
class Compared:
    """What a mechanism needs to meet a budget, and what it leaves in the weights."""

    name: str
    noise_multiplier: float
    errors: (
        np.ndarray
    )  # [rounds]: standard deviation of the weights' noise after each, in clip norms on the sum
    memory: int  # vectors as long as the model

    @property
    def error(self) -> float:
        """Root mean square over all rounds."""
        return float(np.sqrt(np.mean(self.errors**2)))


def compare_mechanisms(config: Config, population: int) -> list[Compared]:
    """All mechanisms that fit, at the configuration's budget, the one with the least error first."""
    momentum = server_momentum(config)
    found = []
    for one in candidates(config, population, pretrained=False):
        plan = one.ledger.plan
        errors = plan.update_multiplier * np.sqrt(
            noise_of_weights(plan.strategy, plan.rounds, momentum)
        )
        found.append(
            Compared(
                one.name, plan.noise_multiplier, errors, _remembered(plan.strategy, plan.rounds)
            )
        )
        if isinstance(plan.strategy, Tree) and momentum == 0:
            errors = plan.noise_multiplier * np.sqrt(honaker_variances(plan.rounds))
            name = "dp-ftrl by Honaker's estimator (for comparison; not offered)"
            found.append(
                Compared(
                    name, plan.noise_multiplier, errors, _remembered(plan.strategy, plan.rounds)
                )
            )
    return sorted(found, key=lambda one: one.error)


def _remembered(strategy: Strategy, rounds: int) -> int:
    if isinstance(strategy, Restarted):
        return _remembered(strategy.strategy, strategy.period)
    if isinstance(strategy, Tree):
        return rounds.bit_length()
    return (
        strategy.bands - 1
        if isinstance(strategy, Banded)
        else strategy.buffers
        if isinstance(strategy, Blt)
        else 0
    )


_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


def draw_errors(found: list[Compared], config: Config, population: int, path: Path) -> Path:
    """The noise of the weights after every round, one line a mechanism; of banded-mf the best of
    each sampling.
    """
    require_picture(path)
    shown: dict[str, Compared] = {}
    for one in found:  # the best first
        kind = (one.name.split()[0], one.name.rpartition("(")[2])
        shown.setdefault(" ".join(kind), one)
    figure = empty_figure(7.2, 4.6)
    axes = figure.add_subplot()
    rounds = np.arange(1, config.rounds + 1)
    for colour, one in zip(_COLOURS, reversed(shown.values()), strict=False):
        label = f"{one.error:.3g}  {one.name.partition(' (for comparison')[0]}"
        jagged = one.name.startswith(
            "dp-ftrl"
        )  # a tree's noise jumps with the binary digits of the round
        style: dict[str, Any] = (
            {"linewidth": 0.5, "alpha": 0.6, "zorder": 1}
            if jagged
            else {"linewidth": 1.6, "zorder": 2}
        )
        axes.plot(rounds, one.errors, color=colour, label=label, **style)
    axes.set(
        xlabel="round",
        ylabel="noise of the weights, in clip norms",
        yscale="log",
        xlim=(1, config.rounds),
    )
    private, cohort = config.privacy, config.clients_per_round
    title = f"Noise at epsilon {private.epsilon:g}, {cohort} of {population:,} clients a round"
    write_heading(
        axes,
        title,
        f"delta {private.delta:g}; standard deviation after each round (root mean square in front)",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return save_picture(figure, path)
