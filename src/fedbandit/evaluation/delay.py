"""What delay costs: the regret measured in a realisable environment, and how well the regression was solved.

Regret is exact in expectation: within a period the deployed policy does not change, so it is computed, not sampled.
"""

from dataclasses import dataclass

import numpy as np

from fedbandit.config import Config
from fedbandit.data.realizable import RealizableEnvironment, features_of
from fedbandit.engines import Engine
from fedbandit.evaluation.regret import policy_value
from fedbandit.federated.client import Broadcast
from fedbandit.models import Layout
from fedbandit.policies import Greedy
from fedbandit.simulation.simulate import simulate


@dataclass(frozen=True)
class Measured:
    """One run: deployed every so many rounds, what an event lost on average, and the oracle's error."""

    deploy_every: int
    samples: int  # events in a full period
    periods: int
    regret: float  # per event, in reward
    last_regret: float  # of the model deployed last
    optimization_error: float  # ε_fed, in squared reward: mean over the deployments after which rounds follow


def measure(config: Config, environment: RealizableEnvironment, engine: Engine) -> Measured:
    """Play the configuration in the environment and compute the expected regret of every event."""
    simulation = simulate(config, environment.dataset, engine=engine)
    phase, layout = simulation.experiment.bandit, simulation.experiment.layout
    work, clients = phase.work, phase.cohorts.pool
    truth = environment.mean_rewards
    best = policy_value(work.split, clients, Greedy(), truth, truth)
    fit = LeastSquares.empty(environment)
    regret = lost = 0.0
    events = 0
    errors: list[float] = []
    while simulation.state.round < config.rounds:
        state = simulation.state
        number = state.round + 1
        if state.round % config.deploy_every == 0:
            deployed = state.deployed[max(state.deployed)]
            scores = lambda rows: work.learner.scores(deployed, work.split.contexts(rows))  # noqa: B023, E731
            regret = best - policy_value(work.split, clients, work.policy, scores, truth)
            if state.round:
                errors.append(fit.excess(layout, deployed))
        stage = phase.scenario.stage(number)
        broadcast = Broadcast(number, state.weights, state.deployed, state.clip_norm, stage.rewards, stage.available)
        logged = work.act(phase.cohorts.draw(number), broadcast)  # the very events that the round will train on
        fit = fit.with_events(features_of(logged.contexts), logged.actions, logged.rewards)
        lost, events = lost + regret * len(logged), events + len(logged)
        next(iter(simulation))
    if not errors:  # one single period: the model that would have been deployed next
        errors.append(fit.excess(layout, simulation.state.weights))
    periods = -(-config.rounds // config.deploy_every)
    samples = round(events / config.rounds * config.deploy_every)
    return Measured(config.deploy_every, samples, periods, lost / events, regret, float(np.mean(errors)))


@dataclass(frozen=True)
class LeastSquares:
    """All that a linear regression of rewards needs to know of a log, per action: sums that add."""

    squares: np.ndarray  # [K, d + 1, d + 1]
    products: np.ndarray  # [K, d + 1]
    rewards: float  # sum of squared rewards
    events: int

    @classmethod
    def empty(cls, environment: RealizableEnvironment) -> "LeastSquares":
        features, k = environment.weight.shape
        return cls(np.zeros((k, features + 1, features + 1)), np.zeros((k, features + 1)), 0.0, 0)

    def with_events(self, contexts: np.ndarray, actions: np.ndarray, rewards: np.ndarray) -> "LeastSquares":
        x = np.column_stack([contexts, np.ones(len(contexts))])
        squares, products = self.squares.copy(), self.products.copy()
        for action in np.unique(actions):
            rows = actions == action
            squares[action] += x[rows].T @ x[rows]
            products[action] += x[rows].T @ rewards[rows].astype(np.float64)
        return LeastSquares(
            squares, products, self.rewards + float((rewards.astype(np.float64) ** 2).sum()), self.events + len(rewards)
        )

    def excess(self, layout: Layout, weights: np.ndarray) -> float:
        """By how much the mean squared error of a linear model on this log exceeds the smallest possible one."""
        params = layout.split(weights.astype(np.float64))
        ours = np.vstack([params["weight"], params["bias"]]).T
        best = np.stack(
            [np.linalg.lstsq(s, p, rcond=None)[0] for s, p in zip(self.squares, self.products, strict=True)]
        )
        return max(0.0, self._error(ours) - self._error(best))

    def _error(self, coefficients: np.ndarray) -> float:
        fitted = np.einsum("ka,kab,kb->", coefficients, self.squares, coefficients)
        return float(fitted - 2 * (coefficients * self.products).sum() + self.rewards) / max(1, self.events)
