"""Broken promises for audits: each replaces a real part of rounds by one that does not keep the plan."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np

from fedbandit.core import randomness
from fedbandit.deploy.server import gathering, private_metrics, rounds
from fedbandit.federated import cohorts, pipeline
from fedbandit.federated.learners import linear
from fedbandit.privacy import noise, strategies
from fedbandit.studies.privacy_audit import TARGETS

Patch = tuple[object, str, object]


@dataclass(frozen=True)
class Violation:
    """What to replace, in which of the default cases, and which targets it is in."""

    case: str
    targets: tuple[str, ...]
    patches: Callable[[], list[Patch]]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with ExitStack() as stack:
            for target, name, value in self.patches():
                stack.enter_context(patch.object(target, name, value))
            yield


def scaled(factor: float) -> list[Patch]:
    """All noise is `factor` of what it should be."""
    update, discrete, normals = (
        noise.SimulatedNoise.update,
        noise.discrete_gaussians,
        noise.secret_normals,
    )
    return [
        (
            noise.SimulatedNoise,
            "update",
            lambda self, *given: np.float32(factor) * update(self, *given),
        ),
        (
            noise,
            "discrete_gaussians",
            lambda deviation, size, **given: discrete(factor * deviation, size, **given),
        ),
        (noise, "secret_normals", lambda size, **given: factor * normals(size, **given)),
    ]


def repeated(period: int | None) -> list[Patch]:
    """The normals of `period` rounds are the same; None: those of all rounds."""
    generator, discrete = noise.generator, noise.discrete_gaussians

    def addressed(seed, purpose, run, number, kind):
        return generator(seed, purpose, run, 1 if period is None else -(-number // period), kind)

    drawn: dict = {}

    def again(deviation, size, **given):
        calls, value = drawn.get((deviation, size), (0, None))
        if value is None or (period is not None and calls % period == 0):
            value = discrete(deviation, size, **given)
        drawn[deviation, size] = calls + 1, value
        return value.copy()

    return [(noise, "generator", addressed), (noise, "discrete_gaussians", again)]


def repeated_correlated(period: int | None) -> list[Patch]:
    """The same of what correlated noise is mixed from: seeded, from a secret, and a server's."""
    generator = noise.generator
    fresh, from_secret = noise.GridNoise._fresh, noise.SecretNoise._fresh
    drawn: dict = {}

    def first(number):
        return 1 if period is None else number - (number - 1) % period

    def addressed(seed, purpose, run, number, kind):
        return generator(seed, purpose, run, first(number), kind)

    def again(self, number, like, **source):
        if source:  # a secret's: its address is what repeats
            return fresh(self, number, like, **source)
        key = self._deviation, like.size
        if number == first(number):
            drawn[key] = fresh(self, number, like)
        return drawn[key].copy()

    def secret(self, number, like, **source):
        return from_secret(self, first(number), like, **source)

    return [
        (noise, "generator", addressed),
        (noise.GridNoise, "_fresh", again),
        (noise.SecretNoise, "_fresh", secret),
    ]


def selecting(change: Callable) -> Patch:
    """A server that draws devices otherwise; `change` is given the right way."""
    chosen = gathering.select
    defaults = {**rounds.Coordinator.__init__.__kwdefaults__, "select": change(chosen)}
    return rounds.Coordinator.__init__, "__kwdefaults__", defaults


def twice_the_rate() -> list[Patch]:
    draw = cohorts.PoissonCohorts.draw

    def doubled(self, number):
        return draw(replace(self, probability=2 * self.probability), number)

    def change(select):
        return lambda deployment, nodes, number: sorted(
            {*select(deployment, nodes, number), *select(deployment, nodes, number)}
        )

    return [(cohorts.PoissonCohorts, "draw", doubled), selecting(change)]


def same_cohort() -> list[Patch]:
    draw, kept = cohorts.PoissonCohorts.draw, {}

    def change(select):
        def first(deployment, nodes, number):
            if number == 1:
                kept["nodes"] = select(deployment, nodes, number)
            return kept["nodes"]

        return first

    return [
        (cohorts.PoissonCohorts, "draw", lambda self, number: draw(self, 1)),
        selecting(change),
    ]


def no_separation() -> list[Patch]:
    def anybody(self, number):
        return cohorts.FixedCohorts(self.pool, self.size, self.seed).draw(number)

    return [(cohorts.BlockCohorts, "draw", anybody), (gathering, "rests", lambda *given: False)]


def no_groups() -> list[Patch]:
    def anybody(self, number):
        chance = self.probability / self.groups
        return cohorts.PoissonCohorts(self.pool, chance, self.seed).draw(number)

    return [(cohorts.CyclicPoissonCohorts, "draw", anybody)]


def no_restarts() -> list[Patch]:
    def step(self, number, fresh, memory):
        return self.strategy.step(number, fresh, memory)

    return [(strategies.Restarted, "step", step)]


def actual_divisor() -> list[Patch]:
    def wrong(mean):
        def by_cohort(self, total, accepted, number, clip_norm):
            right = mean(self, total, accepted, number, clip_norm)
            return right * self.plan.clients_per_round / max(1, accepted)

        return by_cohort

    return [(each, "mean", wrong(each.mean)) for each in (noise.PrivateMean, noise.GridMean)]


def no_clipping() -> list[Patch]:
    """Updates go in a million times as long as they may be; what is longer has no whole number."""
    train = linear.DenseLinearLearner.train

    def unclipped(self, weights, events, clip_norm, pull=0.0):
        return train(self, weights, events, float("inf"), pull)

    right = pipeline.clip_factor

    def as_it_is(norm, clip_norm):
        return right(norm, 1e6 * clip_norm)

    return [
        (linear.DenseLinearLearner, "train", unclipped),
        (pipeline, "clip_factor", as_it_is),
        (gathering, "clip_factor", as_it_is),
        (gathering, "TOLERANCE", 1e6),
    ]


def quiet_figures() -> list[Patch]:
    class Halved(noise.GridNoise):
        def __init__(self, strategy, deviation, *rest):
            super().__init__(strategy, deviation / 2, *rest)

    return [(private_metrics, "GridNoise", Halved)]


def quiet_counts() -> list[Patch]:
    count, whole = noise.SimulatedNoise.count, noise.GridNoise.whole_count
    return [
        (noise.SimulatedNoise, "count", lambda self, number: count(self, number) / 2),
        (noise.GridNoise, "whole_count", lambda self, deviation: whole(self, deviation / 2)),
    ]


def known_secret() -> list[Patch]:
    known = classmethod(lambda cls: cls(bytes(32)))
    return [(randomness.Secret, "fresh", known)]


def off_the_grid() -> list[Patch]:
    mean = noise.GridMean.mean

    def shifted(self, total, *given):
        right = mean(self, total, *given)
        return right + 1e-9 * np.random.default_rng(0).random(right.size)

    return [(noise.GridMean, "mean", shifted)]


SYSTEM = ("system", "deployment")
VIOLATIONS = {
    "half the noise": Violation("dp-fedavg", ("simulation",), lambda: scaled(0.5)),
    "nine tenths of the noise": Violation("dp-fedavg", TARGETS, lambda: scaled(0.9)),
    "grid noise halved": Violation("dp-fedavg", SYSTEM, lambda: scaled(0.5)),
    "grid noise halved, correlated": Violation("blt", SYSTEM, lambda: scaled(0.5)),
    "the same normals every round": Violation("dp-fedavg", TARGETS, lambda: repeated(None)),
    "noise shared by two rounds": Violation("dp-fedavg", TARGETS, lambda: repeated(2)),
    "the same normals every round, correlated": Violation(
        "blt", TARGETS, lambda: repeated_correlated(None)
    ),
    "noise shared by two rounds, correlated": Violation(
        "blt", TARGETS, lambda: repeated_correlated(2)
    ),
    "Poisson at twice the rate": Violation("dp-fedavg", TARGETS, twice_the_rate),
    "the same cohort every round": Violation("dp-fedavg", TARGETS, same_cohort),
    "separation ignored": Violation("blt", TARGETS, no_separation),
    "groups ignored": Violation("banded-mf", ("simulation", "system"), no_groups),
    "restarts stated and not made": Violation("dp-ftrl, restarted", TARGETS, no_restarts),
    "divisor is the actual cohort": Violation("dp-fedavg", TARGETS, actual_divisor),
    "clipping skipped": Violation("dp-fedavg", TARGETS, no_clipping),
    "figures with half the noise": Violation("blt", ("deployment",), quiet_figures),
    "count with half the noise": Violation("dp-fedavg, adaptive clipping", TARGETS, quiet_counts),
    "cohorts from a known secret": Violation("dp-fedavg", ("system",), known_secret),
    "off the grid": Violation("dp-fedavg", SYSTEM, off_the_grid),
}
