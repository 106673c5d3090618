"""The worlds that fedbandit has: the paper's tables, clicks, linear and logistic rewards, tastes.

Those of `BUILT_IN` are built for every stage of a scenario with what the scenario's labels pay, the
data set's header, and the parameters of `[environment]`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from fedbandit.core.contexts import unit_rows
from fedbandit.core.errors import ConfigError
from fedbandit.core.ragged import Ragged
from fedbandit.core.randomness import Purpose, generator, normals, uniforms
from fedbandit.data.dataset import Header
from fedbandit.environments.met import Environment, Met, highest, observed


@dataclass(frozen=True)
class RewardTable:
    """For each label l: action l earns `exact[l]`, action `near[l]` earns `near_value[l]`, others
    0.

    An example with several labels earns the best of what its labels give.
    """

    exact: np.ndarray  # float32 [K]
    near: np.ndarray  # int32 [K], -1 for none
    near_value: np.ndarray  # float32 [K]

    @property
    def num_actions(self) -> int:
        return len(self.exact)

    @property
    def highest(self) -> float:
        """The largest reward that can be earned."""
        return float(max(self.exact.max(), self.near_value.max()))

    def rewards(self, met: Met, actions: np.ndarray) -> np.ndarray:
        """The reward of one action per example: float32 [n]."""
        labels, rows = met.labels, met.labels.row_of_entry()
        earned = np.zeros(len(actions), np.float32)
        for answers, values in ((labels.ids, self.exact), (self.near[labels.ids], self.near_value)):
            right = actions[rows] == answers
            np.maximum.at(earned, rows[right], values[labels.ids[right]])
        return earned

    def expected(self, met: Met) -> np.ndarray:
        """The reward of every action: float32 [n, K] or [m]."""
        labels, rewards = met.labels, np.zeros(met.shape, np.float32)
        flat = rewards.reshape(-1)
        starts = np.arange(len(met)) * met.num_actions if met.bounds is None else met.bounds[:-1]
        first = starts[labels.row_of_entry()]  # labels are places among a decision's actions
        for answers, values in ((labels.ids, self.exact), (self.near[labels.ids], self.near_value)):
            some = answers >= 0
            np.maximum.at(flat, (first + answers)[some], values[labels.ids[some]])
        return rewards


def exact_match(num_actions: int) -> RewardTable:
    """1 for a right label, 0 otherwise."""
    return per_label(np.ones(num_actions))


def per_label(values: np.ndarray) -> RewardTable:
    """`values[l]` for the right label l, 0 otherwise."""
    k = len(values)
    return RewardTable(
        np.asarray(values, np.float32), np.full(k, -1, np.int32), np.zeros(k, np.float32)
    )


def with_near_miss(table: RewardTable, near: dict[int, int], value: float) -> RewardTable:
    """The same table, and `value` for answering `near[l]` where the label is l."""
    targets, values = table.near.copy(), table.near_value.copy()
    for label, action in near.items():
        targets[label], values[label] = action, value
    return RewardTable(table.exact, targets, values)


def relabelled(num_actions: int, target: dict[int, int]) -> RewardTable:
    """1 for answering `target[l]` in place of l (and not l itself); exact match for the other
    labels.
    """
    exact = np.ones(num_actions, np.float32)
    exact[list(target)] = 0
    return with_near_miss(per_label(exact), target, 1.0)


@dataclass(frozen=True)
class ChangedWorld:
    """Another environment with something changed; what is not changed is as beneath."""

    environment: Environment

    @property
    def highest(self) -> float:
        """The largest reward that can be earned."""
        return highest(self.environment)

    def observed(self, met: Met, actions: np.ndarray) -> np.ndarray | None:
        """Whether each reward ever arrives: bool [n]; None: all do."""
        return observed(self.environment, met, actions)


@dataclass(frozen=True)
class Renamed(ChangedWorld):
    """An environment whose actions have traded places: action a pays what `roles[a]` paid."""

    roles: np.ndarray  # int64 [K], a permutation

    def rewards(self, met: Met, actions: np.ndarray) -> np.ndarray:
        return self.environment.rewards(met, self.roles[actions])

    def expected(self, met: Met) -> np.ndarray | None:
        means = self.environment.expected(met)
        return None if means is None else means[:, self.roles]

    def observed(self, met: Met, actions: np.ndarray) -> np.ndarray | None:
        return observed(self.environment, met, self.roles[actions])


@dataclass(frozen=True)
class Liked(ChangedWorld):
    """An environment whose rewards are worth more to some clients than to others.

    Half of the clients belong to the first group, half of the others to the second, and so on;
    the last two groups are alike.
    """

    worth: np.ndarray  # float32 [groups, K]: factors of the rewards of each action
    seed: int = 0

    @property
    def highest(self) -> float:
        return highest(self.environment) * float(self.worth.max())

    def groups(self, clients: np.ndarray) -> np.ndarray:
        """The group of each client: int64 [n]."""
        smaller = 0.5 ** np.arange(1, len(self.worth))
        draws = uniforms(self.seed, Purpose.GROUPS, clients)
        return np.asarray((draws[:, None] < smaller).sum(axis=1))

    def rewards(self, met: Met, actions: np.ndarray) -> np.ndarray:
        factors = self.worth[self.groups(met.clients), actions]
        return np.asarray(self.environment.rewards(met, actions) * factors)

    def expected(self, met: Met) -> np.ndarray | None:
        means = self.environment.expected(met)
        return None if means is None else means * self.worth[self.groups(met.clients)]


@dataclass(frozen=True)
class NewTastes(ChangedWorld):
    """A world of candidates whose tastes have changed: their axes have traded places.

    The axes are those of users' tastes in `Preferences`, the item's features in `Linear` and
    `Logistic`: what has `turned(order)`. Each change moves a `share` of them round in a ring.

    Examples:
        >>> world = NewTastes(Preferences(dimensions=4), changes=1, share=1.0)
        >>> sorted(world.turned_world.order)
        [0, 1, 2, 3]
    """

    changes: int
    share: float = 1.0
    seed: int = 0

    @cached_property
    def turned_world(self) -> Any:
        """The environment beneath with its axes in their new order."""
        world: Any = self.environment
        order = ring_order(world.axes, self.changes, self.share, self.seed)
        return world.turned(order) if self.changes else world

    def rewards(self, met: Met, actions: np.ndarray) -> np.ndarray:
        """The rewards of the turned world: float32 [n]."""
        return np.asarray(self.turned_world.rewards(met, actions))

    def expected(self, met: Met) -> np.ndarray:
        """The mean reward of every candidate in the turned world: float32 [m]."""
        return np.asarray(self.turned_world.expected(met))


def ring_order(size: int, changes: int, share: float, seed: int) -> np.ndarray:
    """The places int64 [size] after some changes; each moves a share of them round in a ring."""
    order, moved = np.arange(size), max(2, round(share * size))
    for change in range(1, changes + 1):
        ring = generator(seed, Purpose.DRIFT, change).permutation(size)[:moved]
        order[ring] = order[np.roll(ring, 1)]
    return order


def changed_like(labels: Environment, environment: Environment) -> Environment:
    """An environment with the changes that a scenario has laid over its tables.

    A class of your own that has changes like these keeps what it changes in a field `environment`.
    """
    layer: Any = labels
    if not hasattr(layer, "environment"):
        return environment
    changed: Environment = replace(layer, environment=changed_like(layer.environment, environment))
    return changed


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

    def observed(self, met: Met, actions: np.ndarray) -> np.ndarray | None:
        """As in the environment beneath."""
        return observed(self.environment, met, actions)


class Stated:
    """Rewards that the data set itself states for every action, as the values of its labels.

    Every example has all its actions as labels, in order: so `from_coba` makes data sets.
    """

    def rewards(self, met: Met, actions: np.ndarray) -> np.ndarray:
        """The reward that the example states for the chosen action: float32 [n]."""
        return np.asarray(_stated(met)[met.labels.offsets[:-1] + actions])

    def expected(self, met: Met) -> np.ndarray:
        """The same for every action: float32 [n, K] or [m]."""
        return _stated(met).reshape(met.shape)

    highest = np.inf


def _stated(met: Met) -> np.ndarray:
    """A reward for every action of every decision, one decision after the other: float32."""
    if met.labels.values is None:
        raise ConfigError("environment.name: stated: the data set states no rewards of actions")
    return met.labels.values


@dataclass(frozen=True)
class _Theta:
    """Worlds with a θ for each feature, whose features can trade places."""

    theta: np.ndarray = field(repr=False)  # float64 [features, K]; over candidates [features, 1]

    @property
    def axes(self) -> int:
        """The number of features."""
        return len(self.theta)

    def turned(self, order: np.ndarray) -> Self:
        """The same world with the features' θ in another order."""
        return replace(self, theta=self.theta[order])


@dataclass(frozen=True)
class Linear(_Theta):
    """Rewards 0.5 + strength · θ_a'x + noise, with x scaled to length 1 and θ_a standard normal.

    The model of Li et al. (2010), "A contextual-bandit approach to personalized news article
    recommendation". The linear model of fedbandit can represent it on text and images, whose
    contexts it sees at length 1. Over candidates one θ meets the features x of each item.
    """

    strength: float = 0.2
    noise: float = 0.1
    highest = np.inf

    def rewards(self, met: Met, actions: np.ndarray) -> np.ndarray:
        """The mean of the chosen action plus normal noise: float32 [n]."""
        means = 0.5 + self.strength * _chosen_product(met, self.theta, actions)
        drawn = means + self.noise * met.normals("noise", met.items(actions))
        return np.asarray(drawn, np.float32)

    def expected(self, met: Met) -> np.ndarray:
        """0.5 + strength · θ'x: float32 [n, K]."""
        return np.float32(0.5) + np.float32(self.strength) * _products(met, self.theta)


@dataclass(frozen=True)
class Logistic(_Theta):
    """Clicks with probability σ(bias + strength · θ_a'x), x and θ as in `Linear`."""

    strength: float = 2.0
    bias: float = -1.0

    def rewards(self, met: Met, actions: np.ndarray) -> np.ndarray:
        """1 where the action is clicked, else 0: float32 [n]."""
        products = _chosen_product(met, self.theta, actions)
        return _clicked(met, _sigmoid(self.bias + self.strength * products), actions)

    def expected(self, met: Met) -> np.ndarray:
        """The probability of a click on every action: float32 [n, K]."""
        return _sigmoid(self.bias + self.strength * _products(met, self.theta))


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
    order: tuple[int, ...] | None = None  # of the tastes' axes, after changes

    @property
    def axes(self) -> int:
        """The number of axes of tastes and traits."""
        return self.dimensions

    def turned(self, order: np.ndarray) -> "Preferences":
        """The same world with the tastes' axes in another order; items keep their traits."""
        return replace(self, order=tuple(order.tolist()))

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
        """The mean reward of each pair of client and item, in any shape: float32."""
        (users, user), (things, thing) = _distinct(clients), _distinct(items)
        axes = np.arange(self.dimensions)[:, None]
        traits = normals(self.seed, Purpose.WORLD, 0, axes, things)
        own = normals(self.seed, Purpose.WORLD, 1, axes, users)
        common = normals(self.seed, Purpose.WORLD, 2, axes)
        tastes = np.sqrt(self.shared) * common + np.sqrt(1 - self.shared) * own
        tastes = tastes if self.order is None else tastes[list(self.order)]
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
    """1 where an addressed draw falls below the chance, else 0: float32 [n]."""
    draws = met.uniforms("click", met.items(actions))
    return (draws < chances).astype(np.float32)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) in float32."""
    return np.asarray(1 / (1 + np.exp(-x)), np.float32)


def _chosen_product(met: Met, theta: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """x'θ_a for one action per decision, x at length 1: float64 [n]."""
    x, columns = met.contexts.shared, actions
    if met.contexts.candidates is not None:  # one θ, over the features of items
        x, columns = met.contexts.candidates.chosen(actions).features, np.zeros_like(actions)
    if isinstance(x, Ragged):
        rows, values = x.row_of_entry(), x.unit().values
        return np.bincount(rows, values * theta[x.ids, columns[rows]], minlength=len(x))
    return np.asarray((unit_rows(x) * theta.T[columns]).sum(axis=1))


def _products(met: Met, theta: np.ndarray) -> np.ndarray:
    """x'θ_a for every action, x at length 1: float32 [n, K] or [m]."""
    shown = met.contexts.candidates
    x = met.contexts.shared if shown is None else shown.features
    if isinstance(x, Ragged):
        rows, values = x.row_of_entry(), x.unit().values
        found = np.empty((len(x), theta.shape[1]), np.float32)
        for action, column in enumerate(theta.T):
            found[:, action] = np.bincount(rows, values * column[x.ids], minlength=len(x))
    else:
        found = np.asarray(unit_rows(x) @ theta, np.float32)
    return found.reshape(met.shape)


def _theta(header: Header, seed: int) -> np.ndarray:
    """Standard normal [features, K], over candidates [features of an item, 1]."""
    items = header.items
    shape, columns = (header.shape, header.num_actions) if items is None else (items.shape, 1)
    return generator(seed, Purpose.WORLD).standard_normal((int(np.prod(shape)), columns))


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


def stated(labels: Environment, header: Header) -> Environment:
    """Rewards that the data set states for every action."""
    return changed_like(labels, Stated())


BUILT_IN: dict[str, Callable[..., Environment]] = {
    "labels": labels_alone,
    "bernoulli": bernoulli,
    "linear": linear,
    "logistic": logistic,
    "preferences": preferences,
    "stated": stated,
}
