"""The paper's recipe for clip norms, mechanisms compared by their error, and pictures of epsilon
and error.
"""

from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.assembly.privacy import candidates, server_momentum
from fedbandit.config import Config
from fedbandit.core.errors import Diverged
from fedbandit.core.progress import SILENT, ProgressReporter
from fedbandit.data import open_dataset
from fedbandit.privacy.accounting import Ledger
from fedbandit.privacy.reporting import MEANINGLESS, assumptions
from fedbandit.privacy.strategies import (
    Banded,
    Blt,
    Restarted,
    Strategy,
    Tree,
    honaker_variances,
    noise_of_rounds,
)
from fedbandit.results.differences import text_table
from fedbandit.results.plots import empty_figure, require_picture, save_picture, write_heading
from fedbandit.simulation import simulate
from fedbandit.studies.search import one_two_five


@dataclass(frozen=True)
class Tried:
    """One point of the grid; a reward of None has diverged."""

    server_learning_rate: float
    client_learning_rate: float
    running_reward: float | None


@dataclass(frozen=True)
class ClipNorm:
    """A clip norm found without noise, and learning rates that were tried with it."""

    norm: float  # two digits of `settled`
    settled: float  # where adaptive clipping ended
    quantile: float
    rounds: int
    tried: tuple[Tried, ...]

    def in_words(self) -> str:
        """The norm alone on the first line, the rates as a table, and the values to set next."""
        where = f"adaptive clipping at quantile {self.quantile:g} without noise settled at"
        said = [f"{self.norm:g}", f"{where} {self.settled:.4g} in {self.rounds} rounds"]
        rewards = [one.running_reward for one in self.tried if one.running_reward is not None]
        lines = [["server rate", "client rate", "running reward"]]
        for one in self.tried:
            rates = f"{one.server_learning_rate:g}", f"{one.client_learning_rate:g}"
            reward = one.running_reward
            lines.append([*rates, "diverged" if reward is None else f"{reward:.4f}"])
        said += [text_table(lines, left=())] if self.tried else []
        following = f"next: --set clipping.norm={self.norm:g}"
        best = [one for one in self.tried if rewards and one.running_reward == max(rewards)]
        if len(best) == 1:
            following += f" --set server.learning_rate={best[0].server_learning_rate:g}"
            following += f" --set client.learning_rate={best[0].client_learning_rate:g}"
        elif self.tried:
            said.append("no rates are best: several earned exactly the same, or all diverged")
        said.append(following)
        last = "this used the clients' data without privacy: use public data, or account for it"
        return "\n".join([*said, last])


def find_clip_norm(
    config: Config, quantile: float = 0.5, grid: bool = True, progress: ProgressReporter = SILENT
) -> ClipNorm:
    """The norm at which adaptive clipping without noise settles: the median of the last quarter of
    rounds; with `grid`, the configuration with that norm and every pair of rates around its own.
    """
    dataset = open_dataset(config.data.source)
    plain = config.with_values({"privacy": {}, "clipping": {"quantile": quantile, "initial": 0.1}})
    around = (config.server.learning_rate, config.client.learning_rate)
    rates = list(product(*map(_rates_around, around))) if grid else []
    tried = []
    with progress.task("clip norm and rates", 1 + len(rates), unit="runs") as advance:
        norms = simulate(plain, dataset).collect()["clip_norm"]
        settled = float(np.median(norms[-max(1, len(norms) // 4) :]))
        norm = float(f"{settled:.2g}")
        advance(1)
        for server, client in rates:
            point = {"server.learning_rate": server, "client.learning_rate": client}
            member = config.with_values({"clipping.norm": norm, **point})
            reward = None
            with suppress(Diverged):
                reward = float(simulate(member, dataset).collect()["running_reward"][-1])
            tried.append(Tried(server, client, reward))
            advance(1)
    return ClipNorm(norm, settled, quantile, config.rounds, tuple(tried))


def _rates_around(rate: float) -> list[float]:
    """A rate with its lower and upper neighbour in 1, 2, 5, 10, 20, ...

    Examples:
        >>> _rates_around(0.05)
        [0.02, 0.05, 0.1]
    """
    ladder = one_two_five(f"{rate / 11!r}..{rate * 11!r}")
    nearest = int(np.argmin(np.abs(np.log(np.array(ladder) / rate))))
    return ladder[nearest - 1 : nearest + 2]


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
    cohort = f"{plan.clients_per_round} of {plan.population:,} clients a round"
    title = f"noise {plan.noise_multiplier:g}, {cohort}"
    write_heading(
        axes, title, f"{plan.sampling} sampling; adjacency: {assumptions(plan)['adjacency']}"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return save_picture(figure, path)


@dataclass(frozen=True)
class Compared:
    """A mechanism at a budget: the noise that it needs, and what that leaves in the weights."""

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
    """All mechanisms that fit, at the configuration's budget, the one with the least error first.

    Each has the noise that its own accounting asks for at the same epsilon, so their errors can be
    compared: what noise leaves in the weights, through the momentum of the server.
    """
    momentum = server_momentum(config)
    found = []
    for one in candidates(config, population, pretrained=False):
        plan = one.ledger.plan
        errors = plan.update_multiplier * np.sqrt(
            noise_of_rounds(plan.strategy, plan.rounds, momentum)[1]
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
    """Vectors as long as the model that a strategy keeps from round to round."""
    if isinstance(strategy, Restarted):
        return _remembered(strategy.strategy, strategy.period)
    if isinstance(strategy, Tree):
        return rounds.bit_length()
    if isinstance(strategy, Banded):
        return strategy.bands - 1
    return strategy.buffers if isinstance(strategy, Blt) else 0


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
