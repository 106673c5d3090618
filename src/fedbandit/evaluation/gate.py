"""A deployment gate: a new model goes out only if logs say, with the confidence asked for, that it is not worse.

Clients that keep logs of the deployed policy are asked for sums, about both models at once: what differs between them
is estimated from the same events, so that what they have in common does not blur it.
"""

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from fedbandit.errors import Diverged
from fedbandit.evaluation.gains import GainEstimator
from fedbandit.evaluation.ope.intervals import standard_error, value_of
from fedbandit.evaluation.ope.sums import Bootstrap, Sums, sums_of_terms
from fedbandit.federated.client import Broadcast, ClientWork
from fedbandit.policies import Greedy, Policy
from fedbandit.randomness import Purpose, generator

_NO_BOOTSTRAP = Bootstrap(replicates=0)


@dataclass(frozen=True)
class Verdict:
    """What the logs say of a candidate, in reward per event above the deployed model."""

    passes: bool
    gain: float
    standard_error: float
    lower: float  # the gain is at least this, with the confidence asked for
    effective_sample_size: float
    events: int

    def to_json(self) -> dict[str, Any]:
        return {name: None if isinstance(v, float) and not np.isfinite(v) else v for name, v in vars(self).items()}


def verdict_of(total: Sums | None, confidence: float, margin: float) -> Verdict:
    """What all clients' sums come to, each client one independent unit; nothing passes without events."""
    if total is None or not total.events:
        return Verdict(False, np.nan, np.inf, -np.inf, 0.0, 0)
    gain, error = value_of(total), standard_error(total)
    lower = gain - NormalDist().inv_cdf(confidence) * error if error else gain
    effective = total.importance**2 / total.importance_squares if total.importance_squares else 0.0
    return Verdict(bool(lower >= -margin), gain, error, lower, effective, int(total.events))


def why_impossible(policy: Policy, private: bool) -> str | None:
    """Why no gate can work here, or None."""
    if private:
        return "it decides by sums without noise, which the stated epsilon would not cover"
    if isinstance(policy, Greedy) or getattr(policy, "epsilon", 1) == 0:
        return "a policy that never explores logs nothing about what another model would do"
    return None


@dataclass(frozen=True)
class Gate:
    """Asks `clients` of the pool that are not in the round's cohort; `margin` is how much worse is still good enough.

    The doubly robust estimate takes the deployed model's scores for rewards. It stays right where they are none: it is
    the propensities that keep it so.
    """

    pool: range
    seed: int
    confidence: float = 0.9
    estimator: Literal["ips", "dr"] = "dr"
    clients: int = 64
    margin: float = 0.0
    limit: float | None = None  # cut 1/ρ at this: less variance, and a leaning towards what the deployed model believes

    def judge(self, work: ClientWork, broadcast: Broadcast, candidate: np.ndarray, cohort: np.ndarray) -> Verdict:
        """Whether the candidate may replace the newest deployed model; a function of (seed, round) and the models."""
        total: Sums | None = None
        for clients in work.chunks(self._asked(broadcast.round, cohort)):
            sums = self.client_sums(work, clients, broadcast, candidate)
            total = sums if total is None else total + sums
        return verdict_of(total, self.confidence, self.margin)

    def client_sums(self, work: ClientWork, clients: np.ndarray, broadcast: Broadcast, candidate: np.ndarray) -> Sums:
        """What these clients return: sums over the log they keep of this period, and nothing else."""
        events = work.act(clients, broadcast)
        deployed = broadcast.deployed[max(broadcast.deployed)]
        old_scores, new_scores = (work.learner.scores(model, events.contexts) for model in (deployed, candidate))
        if not np.isfinite(new_scores).all():
            raise Diverged(f"diverged at round {broadcast.round}: the scores of the model to deploy are not finite")
        terms, importance = GainEstimator(self.estimator, self.limit).terms(
            events, work.policy, old_scores, new_scores, broadcast.available
        )
        kept = events.fresh
        bounds = np.concatenate([[0], np.cumsum(kept)])[events.bounds]
        return sums_of_terms(
            clients, bounds, terms[kept], np.ones(int(kept.sum())), importance[kept], importance[kept], _NO_BOOTSTRAP
        )

    def _asked(self, round_number: int, cohort: np.ndarray) -> np.ndarray:
        """Other clients than those that have just trained on the events they would be asked about."""
        others = np.setdiff1d(np.arange(self.pool.start, self.pool.stop), cohort)
        rng = generator(self.seed, Purpose.GATE, round_number)
        return rng.choice(others, min(self.clients, len(others)), replace=False)
