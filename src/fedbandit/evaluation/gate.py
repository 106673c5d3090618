"""The gate: may a new model be deployed? Judged from what the clients' logs say of it in place of
the old one.

The gate of simulations and of real devices share the estimator. A client returns sums, and nothing
else.
"""

from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedbandit.acting import Actor, NotFinite
from fedbandit.core.errors import Diverged
from fedbandit.core.prediction import at_actions, over_actions
from fedbandit.core.randomness import Purpose, generator
from fedbandit.evaluation.estimators import Bootstrap, Sums, sums_of_terms
from fedbandit.events import Events
from fedbandit.federated.state import Version
from fedbandit.policies import Policy, describe

if TYPE_CHECKING:  # devices share the estimator, and have no compiled kernels
    from fedbandit.federated.clients import Broadcast, ClientWork


@dataclass(frozen=True)
class GainEstimator:
    """Weighs each event by inverse propensities, or doubly robust with the old model's scores for
    rewards.

    With p and p' the probabilities of the old and the new model, q what the old one predicts, r the
    reward of the action a taken with propensity ρ: the gain of an event is
    Σ_b (p'_b - p_b) q_b + (p'_a - p_a) / ρ · (r - q_a), with q = 0 for inverse propensities. Its mean
    is the true gain whatever q is, as long as propensities are right.
    """

    kind: Literal["ips", "dr"] = "dr"
    limit: float | None = None  # 1/ρ is cut at this
    most: float | None = None  # the size at which rewards, and what stands for them, are cut

    def terms(
        self,
        events: Events,
        deployed: Actor,
        candidate: Actor,
        available: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The gains of the candidate, and importance weights: float64 [n] each, unbiased without
        limits.

        `available` [K] or [n, K] is what could be chosen; without it, everything.
        """
        believed, old = deployed.distribution(events.contexts, available)
        _, new = candidate.distribution(events.contexts, available)
        predicted = self._cut(believed.mean) if self.kind == "dr" else np.zeros_like(believed.mean)
        change = new - old
        inverse = (
            1 / events.propensities
            if self.limit is None
            else np.minimum(1 / events.propensities, self.limit)
        )

        def taken(values: np.ndarray) -> np.ndarray:
            return at_actions(values, events.actions, believed.bounds).astype(np.float64)

        surprise = self._cut(events.rewards) - taken(predicted)
        modelled = over_actions(change * predicted, believed.bounds)
        return modelled + taken(change) * inverse * surprise, taken(new) / events.propensities

    @property
    def largest(self) -> float:
        """The largest size of one event's gain; infinite unless both limits are set."""
        if self.limit is None or self.most is None:
            return np.inf
        # No probability changes by more than 1, and all changes together move the prediction by no
        # more than its range.
        return self.limit * self.most if self.kind == "ips" else 2 * self.most * (1 + self.limit)

    def _cut(self, rewards: np.ndarray) -> np.ndarray:
        return (
            rewards if self.most is None else np.clip(rewards, -self.most, self.most, dtype=float)
        )


_NO_BOOTSTRAP = Bootstrap(replicates=0)


@dataclass(frozen=True)
class Verdict:
    """Verdict of the logs on a candidate, in reward per event above the deployed model."""

    passes: bool
    gain: float
    standard_error: float
    lower: float  # the gain is at least this, with the confidence asked for
    effective_sample_size: float
    events: int

    def to_json(self) -> dict[str, Any]:
        return {
            name: None if isinstance(v, float) and not np.isfinite(v) else v
            for name, v in vars(self).items()
        }


def verdict_of(total: Sums | None, confidence: float, margin: float) -> Verdict:
    """The verdict of all clients' sums, each client one independent unit; nothing passes without
    events.
    """
    if total is None or not total.events:
        return Verdict(False, np.nan, np.inf, -np.inf, 0.0, 0)
    gain, error = total.value, total.standard_error
    lower = gain - NormalDist().inv_cdf(confidence) * error if error else gain
    effective, events = total.effective_sample_size, int(total.events)
    return Verdict(bool(lower >= -margin), gain, error, lower, effective, events)


def why_impossible(policy: Policy, private: bool) -> str | None:
    """Why no gate can work here, or None."""
    if private:
        return "it decides by sums without noise, which the stated epsilon would not cover"
    rule = describe(policy)
    if rule.get("floor", 0) == 0 and (rule["name"] == "greedy" or rule.get("epsilon", 1) == 0):
        return "a policy that never explores logs nothing about what another model would do"
    return None


@dataclass(frozen=True)
class Gate:
    """Asks `clients` of the pool that are not in the round's cohort; `margin` is how much worse is
    still good enough.

    The doubly robust estimate takes the deployed model's scores for rewards. It stays right where
    they are none: it is the propensities that keep it so.
    """

    pool: range
    seed: int
    confidence: float = 0.9
    estimator: Literal["ips", "dr"] = "dr"
    clients: int = 64
    margin: float = 0.0
    # cuts 1/ρ: less variance, and a leaning towards what the deployed model believes
    limit: float | None = None

    def judge(
        self, work: "ClientWork", broadcast: "Broadcast", candidate: Version, cohort: np.ndarray
    ) -> Verdict:
        """Whether the candidate may replace the newest deployed model; a function of (seed, round)
        and the models.
        """
        total: Sums | None = None
        for clients in work.chunks(self._asked(broadcast.round, cohort)):
            sums = self.client_sums(work, clients, broadcast, candidate)
            total = sums if total is None else total + sums
        return verdict_of(total, self.confidence, self.margin)

    def client_sums(
        self, work: "ClientWork", clients: np.ndarray, broadcast: "Broadcast", candidate: Version
    ) -> Sums:
        """The sums of these clients over the log they keep of this period: all that leaves them."""
        events = work.act(clients, broadcast)
        deployed = broadcast.deployed[max(broadcast.deployed)]
        try:
            terms, importance = GainEstimator(self.estimator, self.limit).terms(
                events, work.actor(deployed), work.actor(candidate), events.available
            )
        except NotFinite:
            raise Diverged(
                f"diverged at round {broadcast.round}: the scores of the model to deploy are not"
                " finite"
            ) from None
        kept = events.fresh
        bounds = np.concatenate([[0], np.cumsum(kept)])[events.bounds]
        return sums_of_terms(
            clients,
            bounds,
            terms[kept],
            np.ones(int(kept.sum())),
            importance[kept],
            importance[kept],
            _NO_BOOTSTRAP,
        )

    def _asked(self, round_number: int, cohort: np.ndarray) -> np.ndarray:
        """Other clients than those that have just trained on the events they would be asked about."""
        others = np.setdiff1d(np.arange(self.pool.start, self.pool.stop), cohort)
        rng = generator(self.seed, Purpose.GATE, round_number)
        return rng.choice(others, min(self.clients, len(others)), replace=False)
