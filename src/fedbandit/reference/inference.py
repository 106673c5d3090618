"""Algorithm 2, bandit inference on a client: score, explore, draw, log. One event at a time.

Also which examples a client meets and which model answers, in simple mode (Algorithm 4) and for a
lasting population (Algorithm 1 and section 3.2). Knows nothing of training.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np

from fedbandit.core.ragged import Ragged
from fedbandit.core.randomness import Purpose, bits, uniforms
from fedbandit.data.dataset import Split
from fedbandit.reference.models import ReferenceModel, Weights

Explore = Callable[[np.ndarray], np.ndarray]
"""Scores of the K actions in, their probabilities out."""
Reward = Callable[[list[int], int], float]
"""The labels of an example and an action in, the mean reward out."""
Pay = Callable[[float, np.ndarray], float]
"""The mean reward of an action in, with a uniform number of its own; the reward out."""


def pay_the_mean(mean: float, uniform: np.ndarray) -> float:
    """No chance is involved: the paper's tables."""
    return mean


def pay_a_click(mean: float, uniform: np.ndarray) -> float:
    """1 with the mean as probability, else 0."""
    return 1.0 if uniform < mean else 0.0


@dataclass(frozen=True)
class Visit:
    """A client meets one of its examples; `time` and `position` address the draw of its action."""

    row: int
    time: int
    position: int
    version: int  # which deployed model θ_i the client holds
    round: int  # when it happens; of a period, its first round
    fresh: bool  # of the current period; older events were already counted in the reward


@dataclass(frozen=True)
class Event:
    """A line of the log B_c: context, action, reward, propensity."""

    context: Any
    action: int
    reward: float
    propensity: float
    scores: np.ndarray  # [K], of the model that chose
    all_rewards: np.ndarray  # [K], means: seen only by full-information training
    fresh: bool


def bandit_inference(
    client: int,
    visits: list[Visit],
    split: Split,
    model: ReferenceModel,
    deployed: list[Weights],
    explore: Explore,
    reward: Reward,
    pay: Pay,
    seed: int,
) -> list[Event]:
    """Algorithm 2: the client's log B_c."""
    log = []
    for visit in visits:
        x, labels = context_of(split, visit.row), labels_of(split, visit.row)
        scores = model.scores(deployed[visit.version], x)
        probabilities = explore(scores)
        action = draw(
            probabilities,
            float(uniforms(seed, Purpose.ACTIONS, visit.time, client, visit.position)),
        )
        everything = np.array([reward(labels, a) for a in range(len(probabilities))])
        address = (visit.round, client, visit.position, action)
        chance = uniforms(seed, Purpose.WORLD, crc32(b"click"), *address)
        log.append(
            Event(
                x,
                action,
                pay(everything[action], chance),
                probabilities[action],
                scores,
                everything,
                visit.fresh,
            )
        )
    return log


def make_policy(name: str, parameters: dict[str, float]) -> Explore:
    """The exploration rule that a configuration names."""
    rules = {
        "greedy": epsilon_greedy,
        "epsilon-greedy": epsilon_greedy,
        "softmax": softmax,
        "falcon": falcon,
    }
    rule = rules[name]
    if name == "greedy":
        parameters = {"epsilon": 0.0}
    return lambda scores: rule(scores, **parameters)


def epsilon_greedy(scores: np.ndarray, epsilon: float = 0.05) -> np.ndarray:
    """1 - ε + ε/K for the greedy action, ε/K for each other."""
    actions = len(scores)
    p = np.full(actions, epsilon / actions)
    p[np.argmax(scores)] += 1 - epsilon
    return p


def softmax(scores: np.ndarray, beta: float = 0.05) -> np.ndarray:
    """Proportional to exp(score / β); the best score is taken off first, which changes nothing but
    overflow.
    """
    p = np.exp((scores - np.max(scores)) / beta)
    return np.asarray(p / np.sum(p))


def falcon(scores: np.ndarray, mu: float = 100.0, gamma: float = 1000.0) -> np.ndarray:
    """1 / (μ + γ · gap) for each other action, the rest for the greedy one; rescaled where there is
    no rest.
    """
    best = int(np.argmax(scores))
    p = np.zeros(len(scores))
    for a in range(len(scores)):
        if a != best:
            p[a] = 1 / (mu + gamma * (scores[best] - scores[a]))
    others = np.sum(p)
    if others > 1:
        return p / others
    p[best] = 1 - others
    return p


def draw(probabilities: np.ndarray, uniform: float) -> int:
    """The first action at which the running sum of the probabilities exceeds the uniform number."""
    reached = 0.0
    for action, p in enumerate(probabilities):
        reached += p
        if reached > uniform:
            return action
    return int(np.flatnonzero(probabilities)[-1])  # rounding left the sum just below 1


def simple_visits(
    split: Split, client: int, t: int, seed: int, deploy_every: int, max_examples: int | None
) -> list[Visit]:
    """A new log in every round, by the newest deployed model."""
    rows = shuffled_examples(split, client, t, seed)[:max_examples]
    return [Visit(row, t, j, (t - 1) // deploy_every, t, True) for j, row in enumerate(rows)]


def population_visits(
    split: Split,
    client: int,
    t: int,
    seed: int,
    deploy_every: int,
    events_per_period: int,
    cache_size: int,
    pull_probability: float,
    longest_lag: int,
) -> list[Visit]:
    """A cache that lasts: the newest `cache_size` events, whichever model made them.

    It reaches back at most as many periods as it takes to fill it at `events_per_period`.
    """
    now = (t - 1) // deploy_every
    reach = int(np.ceil(cache_size / events_per_period))
    cache = []
    for period in range(max(0, now - reach + 1), now + 1):
        version = held_version(client, period, seed, pull_probability, longest_lag)
        rows = shuffled_examples(split, client, period, seed)[:events_per_period]
        first = period * deploy_every + 1
        cache += [
            Visit(row, period, j, version, first, period == now) for j, row in enumerate(rows)
        ]
    return cache[-cache_size:]


def held_version(
    client: int, period: int, seed: int, pull_probability: float, longest_lag: int
) -> int:
    """The model that a client holds in a period: that of the last period in which it
    fetched one.
    """
    for asked in range(period, max(-1, period - longest_lag), -1):
        if uniforms(seed, Purpose.PULLS, asked, client) < pull_probability:
            return asked
    return max(0, period - longest_lag)


def shuffled_examples(split: Split, client: int, time: int, seed: int) -> list[int]:
    """The client's rows of the split, in a random order that belongs to (seed, time, client)."""
    first, last = int(split.offsets[client]), int(split.offsets[client + 1])
    keys = [int(bits(seed, Purpose.EXAMPLES, time, client, i)) for i in range(last - first)]
    return [first + i for i in sorted(range(last - first), key=lambda i: keys[i])]


def context_of(split: Split, row: int) -> Any:
    """A flat float64 vector, or a list of (word, value) for text."""
    features = split.features
    if isinstance(features, Ragged):
        assert features.values is not None
        begin, end = features.offsets[row], features.offsets[row + 1]
        return [(int(features.ids[j]), float(features.values[j])) for j in range(begin, end)]
    return split.shared(np.array([row]))[0].astype(np.float64).reshape(-1)  # type: ignore[index]


def labels_of(split: Split, row: int) -> list[int]:
    """The labels of an example."""
    begin, end = split.labels.offsets[row], split.labels.offsets[row + 1]
    return [int(label) for label in split.labels.ids[begin:end]]
