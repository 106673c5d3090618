"""Worlds beyond the paper's tables: clicks, linear and logistic rewards, users' tastes.

Each is built for every stage of a scenario with what the scenario's labels pay, the data set's
header, and the parameters of `[environment]`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from fedbandit.core.contexts import Features
from fedbandit.core.ragged import Ragged
from fedbandit.core.randomness import Purpose, generator, normals
from fedbandit.data.dataset import Header
from fedbandit.environments.changes import changed_like
from fedbandit.environments.met import Environment, Met, highest


@dataclass(frozen=True)
class Bernoulli:
    """Clicks: an action that pays r on average in `environment` is clicked with a probability.

    It grows linearly from `least` at r = 0 to `most` at r = 1. Rewards that exceed 1 are divided
    by the highest one first.

    Examples:
        >>> from fedbandit.environments import per_label
        >>> Bernoulli(per_label([1.0, 4.0])).note
        'rewards are divided by 4, the highest, to be probabilities of clicks'
    """

    environment: Environment
    least: float = 0.0
    most: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.least < self.most <= 1:
            raise ValueError(f"least: 0 <= least < most <= 1, not {self.least} and {self.most}")

    @property
    def note(self) -> str | None:
        """A remark for the run's summary."""
        most = highest(self.environment)
        said = "rewards are divided by {:g}, the highest, to be probabilities of clicks"
        return said.format(most) if most > 1 else None

    def rewards(self, met: Met, actions: np.ndarray) -> np.ndarray:
        """1 where the action is clicked, else 0: float32 [n]."""
        return _clicked(met, met.chosen(self.expected(met), actions), actions)

    def expected(self, met: Met) -> np.ndarray:
        """The probability of a click on every action: float32 [n, K]."""
        means = self.environment.expected(met)
        if means is None:
            raise ValueError("clicks need an environment that knows its expected rewards")
        scale = (self.most - self.least) / max(1.0, highest(self.environment))
        return np.asarray(self.least + scale * means.astype(np.float64), np.float32)


@dataclass(frozen=True)
class Linear:
    """Rewards 0.5 + strength · θ_a'x + noise, with x scaled to length 1 and θ_a standard normal.

    The model of Li et al. (2010), "A contextual-bandit approach to personalized news article
    recommendation". The linear model of fedbandit can represent it on text and images, whose
    contexts it sees at length 1.
    """

    theta: np.ndarray = field(repr=False)  # float64 [features, K]
    strength: float = 0.2
    noise: float = 0.1
    highest = np.inf

    def rewards(self, met: Met, actions: np.ndarray) -> np.ndarray:
        """The mean of the chosen action plus normal noise: float32 [n]."""
        means = 0.5 + self.strength * _chosen_product(met.contexts.shared, self.theta, actions)
        drawn = means + self.noise * met.normals("noise", met.items(actions))
        return np.asarray(drawn, np.float32)

    def expected(self, met: Met) -> np.ndarray:
        """0.5 + strength · θ'x: float32 [n, K]."""
        return np.float32(0.5) + np.float32(self.strength) * _products(
            met.contexts.shared, self.theta
        )


@dataclass(frozen=True)
class Logistic:
    """Clicks with probability σ(bias + strength · θ_a'x), x and θ as in `Linear`."""

    theta: np.ndarray = field(repr=False)  # float64 [features, K]
    strength: float = 2.0
    bias: float = -1.0

    def rewards(self, met: Met, actions: np.ndarray) -> np.ndarray:
        """1 where the action is clicked, else 0: float32 [n]."""
        products = _chosen_product(met.contexts.shared, self.theta, actions)
        return _clicked(met, _sigmoid(self.bias + self.strength * products), actions)

    def expected(self, met: Met) -> np.ndarray:
        """The probability of a click on every action: float32 [n, K]."""
        return _sigmoid(self.bias + self.strength * _products(met.contexts.shared, self.theta))


@dataclass(frozen=True)
class Preferences:
    """Users have tastes, items have traits: mean reward σ(bias + strength · taste_c'trait_a).

    Contexts and labels play no part. `shared` is how much of their tastes users have in common;
    a single model can learn that part, and the rest only what is personal. `clicks = False` pays
    the mean itself.
    """

    dimensions: int = 8
    strength: float = 3.0
    bias: float = -1.0
    shared: float = 0.5
    clicks: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.shared <= 1 or self.dimensions < 1:
            raise ValueError(f"shared: from 0 to 1, with dimensions >= 1, not {self.shared}")

    def rewards(self, met: Met, actions: np.ndarray) -> np.ndarray:
        """1 where the action is clicked, else 0, or the mean itself: float32 [n]."""
        means = self._means(met.clients, met.items(actions))
        return _clicked(met, means, actions) if self.clicks else means

    def expected(self, met: Met) -> np.ndarray:
        """The mean reward of every action: float32 [n, K]."""
        return self._means(met.spread(met.clients), met.items())

    def _means(self, clients: np.ndarray, items: np.ndarray) -> np.ndarray:
        (users, user), (things, thing) = _distinct(clients), _distinct(items)
        axes = np.arange(self.dimensions)[:, None]
        traits = normals(self.seed, Purpose.WORLD, 0, axes, things)
        own = normals(self.seed, Purpose.WORLD, 1, axes, users)
        common = normals(self.seed, Purpose.WORLD, 2, axes)
        tastes = np.sqrt(self.shared) * common + np.sqrt(1 - self.shared) * own
        # Added in one order, so that a mean does not depend on what else is asked.
        total = sum(taste[:, None] * trait for taste, trait in zip(tastes, traits, strict=True))
        means = _sigmoid(self.bias + self.strength * total / np.sqrt(self.dimensions))
        return np.asarray(means[user, thing])


def _distinct(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct ids, ascending, and the place of each id among them; without sorting."""
    present = np.zeros(ids.max(initial=-1) + 1, bool)
    present[ids] = True
    return np.flatnonzero(present), (np.cumsum(present) - 1)[ids]


def _clicked(met: Met, chances: np.ndarray, actions: np.ndarray) -> np.ndarray:
    draws = met.uniforms("click", met.items(actions))
    return (draws < chances).astype(np.float32)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)), np.float32)


def _chosen_product(contexts: Features, theta: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """x'θ_a for one action per context, x at length 1: float64 [n]."""
    if isinstance(contexts, Ragged):
        rows, values = _unit_entries(contexts)
        products = values * theta[contexts.ids, actions[rows]]
        return np.bincount(rows, products, minlength=len(contexts))
    return np.asarray((_unit_rows(contexts) * theta.T[actions]).sum(axis=1))


def _products(contexts: Features, theta: np.ndarray) -> np.ndarray:
    """x'θ_a for every action, x at length 1: float32 [n, K]."""
    if not isinstance(contexts, Ragged):
        return np.asarray(_unit_rows(contexts) @ theta, np.float32)
    found = np.empty((len(contexts), theta.shape[1]), np.float32)
    rows, values = _unit_entries(contexts)
    for action, column in enumerate(theta.T):
        products = values * column[contexts.ids]
        found[:, action] = np.bincount(rows, products, minlength=len(contexts))
    return found


def _unit_entries(contexts: Ragged) -> tuple[np.ndarray, np.ndarray]:
    """The row and the value of each entry, rows scaled to length 1."""
    rows = contexts.row_of_entry()
    values = np.ones(len(rows)) if contexts.values is None else contexts.values.astype(np.float64)
    squares = np.bincount(rows, values**2, minlength=len(contexts))
    return rows, values / np.sqrt(np.where(squares > 0, squares, 1))[rows]


def _unit_rows(contexts: np.ndarray) -> np.ndarray:
    flat = contexts.reshape(len(contexts), -1).astype(np.float64)
    lengths = np.sqrt((flat**2).sum(axis=1, keepdims=True))
    return np.asarray(flat / np.where(lengths > 0, lengths, 1))


def _theta(header: Header, seed: int) -> np.ndarray:
    features = int(np.prod(header.shape))
    return generator(seed, Purpose.WORLD).standard_normal((features, header.num_actions))


def labels_alone(labels: Environment, header: Header) -> Environment:
    """The scenario's reward tables: the paper's world."""
    return labels


def bernoulli(
    labels: Environment, header: Header, least: float = 0.0, most: float = 1.0
) -> Environment:
    """Clicks whose probabilities are the rewards of the scenario's tables."""
    return Bernoulli(labels, least, most)


def linear(
    labels: Environment,
    header: Header,
    strength: float = 0.2,
    noise: float = 0.1,
    seed: int = 0,
) -> Environment:
    """Rewards linear in the context, with normal noise; θ is drawn from `seed`."""
    return changed_like(labels, Linear(_theta(header, seed), strength, noise))


def logistic(
    labels: Environment,
    header: Header,
    strength: float = 2.0,
    bias: float = -1.0,
    seed: int = 0,
) -> Environment:
    """Clicks whose log-odds are linear in the context; θ is drawn from `seed`."""
    return changed_like(labels, Logistic(_theta(header, seed), strength, bias))


def preferences(
    labels: Environment,
    header: Header,
    dimensions: int = 8,
    strength: float = 3.0,
    bias: float = -1.0,
    shared: float = 0.5,
    clicks: bool = True,
    seed: int = 0,
) -> Environment:
    """Users' tastes meet actions' traits, both drawn from `seed`."""
    made = Preferences(dimensions, strength, bias, shared, clicks, seed)
    return changed_like(labels, made)


BUILT_IN: dict[str, Callable[..., Environment]] = {
    "labels": labels_alone,
    "bernoulli": bernoulli,
    "linear": linear,
    "logistic": logistic,
    "preferences": preferences,
}
