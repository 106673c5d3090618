"""An audit of private rounds: planted clients in real runs, exact tests of what epsilon counts on.

The rounds are those of simulations and of a deployment's server: their sampler, clipping, noise,
divisor and figures. Nothing is compared with itself: what should come out follows from the plan.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from scipy.stats import binom, chi2, halfnorm, kstest, norm

from fedbandit.config import Config
from fedbandit.core.progress import SILENT, ProgressReporter
from fedbandit.privacy.plan import PrivacyPlan
from fedbandit.studies.audited_rounds import RATE, AuditedRun, Case, Target, audited_run

TARGETS: tuple[Target, ...] = ("simulation", "system", "deployment")
LEVEL = 1e-3  # how often an audit may blame rounds that keep every promise, all its tests together
SHORT = 0.9  # of the stated noise: what an audit finds, or says that it cannot
WEIGHTS = 4000  # of the audited model, about
_POWER = 0.95  # of audits find what an audit of this size is said to find
_MOST_RUNS = 24
_MOST_TESTS = 1000  # of an audit: what its power is computed for


@dataclass(frozen=True)
class Test:
    """One exact or conservative test: `p` bounds how often right rounds look so wrong."""

    name: str
    p: float
    found: str  # in words
    power: float = 1.0  # the share of audits of this size that find what the test is for


@dataclass(frozen=True)
class Finding:
    """The audit of one target: all of its tests, each held against the same bound."""

    case: str
    target: Target
    tests: tuple[Test, ...]
    bound: float  # on p: the level divided by the number of all tests
    noise: tuple[float, float]  # of the stated noise: confidence interval at 1 - LEVEL

    @property
    def failed(self) -> tuple[Test, ...]:
        """The tests that the rounds do not pass."""
        return tuple(test for test in self.tests if test.p < self.bound)

    @property
    def weak(self) -> tuple[Test, ...]:
        """The tests that are too small to find what they are for."""
        return tuple(test for test in self.tests if test.power < _POWER)

    @property
    def verdict(self) -> Literal["passed", "violated", "cannot tell"]:
        """Violated where a test fails; passed only where every test could have failed."""
        return "violated" if self.failed else "cannot tell" if self.weak else "passed"


def default_cases() -> dict[str, Case]:
    """One small case of every mechanism: what `fedbandit privacy audit` audits."""
    apart = {"sampling": "min-separation", "separation": 4}
    chosen: dict[str, dict[str, Any]] = {
        "dp-fedavg": {"mechanism": "dp-fedavg", "noise_multiplier": 1.0},
        "dp-fedavg, adaptive clipping": {"mechanism": "dp-fedavg", "noise_multiplier": 0.5},
        "dp-ftrl, restarted": {
            "mechanism": "dp-ftrl", "noise_multiplier": 2.0, "restart_at_deployments": True, **apart,
        },
        "banded-mf": {
            "mechanism": "banded-mf", "noise_multiplier": 1.0, "sampling": "cyclic-poisson", "bands": 4,
        },
        "blt": {"mechanism": "blt", "noise_multiplier": 1.0, "buffers": 2, **apart},
    }  # fmt: skip
    return {
        name: audit_case(
            240, 24, 12, privacy={"delta": 1e-5, **privacy}, adaptive="adaptive" in name
        )
        for name, privacy in chosen.items()
    }


def audit_case(
    population: int,
    clients_per_round: int,
    rounds: int,
    *,
    privacy: Mapping[str, Any],
    adaptive: bool = False,
    deploy_every: int = 6,
) -> Case:
    """A case whose server adds up what it gets, so that each round's release can be read."""
    return Case(
        Config.build(
            {
                "scenario": "scratch",
                "rounds": rounds,
                "deploy_every": deploy_every,
                "clients_per_round": clients_per_round,
                "clipping": {} if adaptive else {"norm": 1.0},
                "policy": {"name": "greedy"},
                "client": {"learning_rate": RATE},
                "server": {"optimizer": "sgd", "learning_rate": 1.0},
                "privacy": dict(privacy),
                "threads": 1,
            }
        ),
        population,
    )


def audit(
    cases: Mapping[str, Case] | None = None,
    targets: Sequence[Target] = TARGETS,
    *,
    seed: int = 0,
    weights: int = WEIGHTS,
    runs: int | None = None,
    level: float = LEVEL,
    progress: ProgressReporter = SILENT,
) -> list[Finding]:
    """Audit every case on every target that supports it; by default one case of each mechanism.

    Right rounds are blamed with probability `level` at most: each test is exact or conservative,
    and each is held against `level` divided by their number. Without `runs` there are as many as
    it takes to find what the tests are for, up to a limit.

    Examples:
        >>> found = audit({"tree": default_cases()["dp-ftrl, restarted"]}, ["simulation"])
        >>> [(one.case, one.target, one.verdict) for one in found]
        [('tree', 'simulation', 'passed')]
    """
    wanted = [
        (name, case, target)
        for name, case in (cases or default_cases()).items()
        for target in targets  # devices have no groups
        if target != "deployment" or case.config.privacy.sampling != "cyclic-poisson"
    ]
    audited: list[tuple[str, Target, list[AuditedRun]]] = []
    with progress.task("audit", len(wanted), unit="plans") as advance:
        for name, case, target in wanted:
            audited.append((name, target, list(_runs(case, target, seed, weights, runs))))
            advance(1, f"{name}, {target}")
    tests = [tuple(_tests(made, level / _MOST_TESTS)) for _, _, made in audited]
    bound = level / max(1, sum(map(len, tests)))
    return [
        Finding(name, target, found, bound, _interval(made))
        for (name, target, made), found in zip(audited, tests, strict=True)
    ]


def rows_of(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """One row for each test: what was audited, what was found, and whether it fails."""
    return [
        {
            "case": one.case,
            "target": one.target,
            "verdict": one.verdict,
            **asdict(test),
            "failed": test in one.failed,
            "weak": test in one.weak,
        }
        for one in findings
        for test in one.tests
    ]


def in_words(findings: Sequence[Finding], verbose: bool = False) -> tuple[str, str]:
    """The verdict on all of them, and the audit as text: with `verbose` every test."""
    verdicts = {one.verdict for one in findings}
    verdict = next(one for one in ("violated", "cannot tell", "passed") if one in verdicts)
    said: list[str] = [verdict]
    for one in findings:
        low, high = one.noise
        said.append(
            f"{one.case}, {one.target}: {one.verdict}; noise {low:.3f} to {high:.3f} of stated"
        )
        for test in one.tests:
            if verbose or test in one.failed or test in one.weak:
                weak = f"; found in {test.power:.0%} of audits" if test in one.weak else ""
                said.append(f"  {test.name}: {test.found} (p {test.p:.2g}{weak})")
    tests = sum(len(one.tests) for one in findings)
    said.append(f"{tests} tests; right rounds fail any of them in {LEVEL:g} of audits at most")
    return verdict, "\n".join(said)


def _runs(
    case: Case, target: Target, seed: int, weights: int, runs: int | None
) -> Iterator[AuditedRun]:
    """As many runs as asked for, or as it takes to find what the tests are for."""
    first = audited_run(case, target, 1000 * seed, weights)
    yield first
    for number in range(1, runs or _runs_needed(first.plan)):
        yield audited_run(case, target, 1000 * seed + number, weights)


def _runs_needed(plan: PrivacyPlan) -> int:
    """Runs in which twice the clip norm, twice the rate and the same cohort again would show."""
    columns = [plan.strategy.column(t, plan.rounds)[1] for t in range(1, plan.rounds + 1)]
    least = min(float(entries @ entries) for entries in columns)
    energy = plan.rounds * plan.clients_per_round * least / plan.update_multiplier**2
    needed = max(2, math.ceil(60 / energy))
    if plan.amplified:
        while (
            needed < _MOST_RUNS and min(_sampling_power(plan, needed, LEVEL / _MOST_TESTS)) < _POWER
        ):
            needed += 1
    return min(needed, _MOST_RUNS)


def _tests(runs: Sequence[AuditedRun], bound: float) -> list[Test]:
    """All tests of the runs of one target; their power is that against `bound`."""
    return [
        *_noise_tests(runs, bound),
        *_norm_tests(runs, bound),
        *_sampling_tests(runs, bound),
        *_single_tests(runs, bound),
    ]


def _noise_tests(runs: Sequence[AuditedRun], bound: float) -> Iterator[Test]:
    """Whether what is left of releases without what was sent is the noise of the plan.

    Seen through C it is T·P independent standard normals Y, whatever clients sent and however that
    depended on earlier rounds. Then Y'Y has Bartlett's decomposition: the triangular factor of Y has
    independent entries, normal beside its diagonal and chi on it.
    """
    whites = [run.white(run.released - run.sent) for run in runs]
    total = sum(float((white**2).sum()) for white in whites)
    size = sum(white.size for white in whites)
    ratio = math.sqrt(total / size)
    power = float(chi2.cdf(chi2.ppf(bound, size) / SHORT**2, size))
    yield Test("noise", float(chi2.cdf(total, size)), f"{ratio:.3f} of what is stated", power)
    rounds, weights = whites[0].shape
    factors = [_triangular(white) for white in whites]
    diagonal = np.concatenate([np.diag(factor) ** 2 for factor in factors])
    alone = chi2.cdf(diagonal, np.tile(weights - np.arange(rounds), len(runs)))
    worst = int(alone.argmin())
    yield Test(
        "noise of single rounds",
        _least(alone),
        f"{math.sqrt(diagonal[worst] / weights):.3f} of it in round {worst % rounds + 1}, less what"
        " earlier rounds tell",
    )
    yield _independence("independence of rounds", factors, weights)
    each = np.sum([(white**2).sum(axis=0) for white in whites], axis=0)
    yield Test(
        "noise of single weights",
        _least(chi2.cdf(each, rounds * len(runs))),
        f"{math.sqrt(each.min() / (rounds * len(runs))):.3f} of it at least",
    )
    values = np.abs(np.concatenate([white.ravel() for white in whites]))
    shape = kstest(values, halfnorm.cdf, alternative="greater")
    yield Test(
        "distribution of the noise", float(shape.pvalue), f"nearer to 0 by {shape.statistic:.4f}"
    )
    if len(runs) > 1:
        first, second = whites[0].ravel(), whites[1].ravel()
        alike = float(first @ second / np.linalg.norm(first))
        yield Test(
            "noise of two runs",
            2 * float(norm.sf(abs(alike))),
            f"correlation {alike / math.sqrt(len(first)):.3f}",
        )
    if runs[0].grid is not None:
        steps = np.concatenate([run.released.ravel() for run in runs]) / runs[0].grid
        off = float(np.abs(steps - np.rint(steps)).max())
        yield Test("grid", float(off < 0.01), f"at most {off:.1e} steps off the public grid")


def _norm_tests(runs: Sequence[AuditedRun], bound: float) -> Iterator[Test]:
    """Whether a client moves releases by its clip norm at most.

    The likelihood ratio of twice the norm against once: its mean is 1 for right rounds, even where
    signs follow earlier releases, so 1 over it bounds how often it is so large.
    """
    names = {"clip norm and divisor": "sent", "clip norm of hostile devices": "loud"}
    for name, which in names.items():
        own = [getattr(run, which) for run in runs]
        if not own[0].size:
            continue
        templates = [run.white(each) for run, each in zip(runs, own, strict=True)]
        energy = sum(float((template**2).sum()) for template in templates)
        excess = sum(
            float((template * run.white(run.released - each)).sum())
            for run, template, each in zip(runs, templates, own, strict=True)
        )
        moved, power = 1 + excess / energy, 1.0
        if which == "sent":  # the loud ones are refused in right rounds
            power = float(norm.cdf((energy / 2 + math.log(bound)) / math.sqrt(energy)))
            power = power if moved > 0.5 else 0.0  # the planted clients did not arrive
        p = math.exp(min(0.0, energy / 2 - excess))
        yield Test(name, p, f"a client moves sums by {moved:.2f} clip norms", power)


def _sampling_tests(runs: Sequence[AuditedRun], bound: float) -> Iterator[Test]:
    """Whether clients take part as the plan says, by the turns that the planted ones really had.

    In a turn a client takes part with probability q, and no two turns depend on each other: how
    often they do is binomial, and so is in how many pairs of turns.
    """
    plan, taking = runs[0].plan, np.stack([run.taking for run in runs])
    clients, separation = taking.shape[2], plan.separation
    if separation > 1:
        turns = [
            {int(t) % separation for t in np.flatnonzero(each)} for run in taking for each in run.T
        ]
        wrong = sum(len(found) > 1 for found in turns)
        yield Test("separation", float(wrong == 0), f"{wrong} clients out of turn")
    if not plan.amplified:
        return
    rate_power, pair_power = _sampling_power(plan, len(runs), bound, clients)
    q, most = plan.probability, plan.turns()
    places, pairs = _opportunities(plan, len(runs), clients)
    taken = int(taking.sum())
    yield Test(
        "sampling rate",
        float(binom.sf(taken - 1, places, q)),
        f"{taken / places:.3f}, stated {q:.3f}",
        rate_power,
    )
    together = 0
    for first in range(separation):
        turns_of = taking[:, first::separation]
        second = turns_of[:, 1::2]
        together += int((turns_of[:, ::2][:, : second.shape[1]] & second).sum())
    yield Test(
        "the same clients again",
        float(binom.sf(together - 1, pairs, q**2)),
        f"{together} times in two turns running, {pairs * q**2:.0f} expected",
        pair_power,
    )
    often = int(taking.sum(axis=1).max())
    yield Test(
        "turns of one client",
        min(1.0, clients * len(runs) * float(binom.sf(often - 1, most, q))),
        f"{often} of {most} at most",
    )
    if len(runs) > 1:
        same = int((taking[0] & taking[1]).sum())
        yield Test(
            "cohorts of two runs",
            float(binom.sf(same - 1, places // len(runs), q**2)),
            f"{same} clients in the same round of both",
        )


def _opportunities(plan: PrivacyPlan, runs: int, clients: int) -> tuple[int, int]:
    """Turns of all clients in all runs, and disjoint pairs of turns of one client, at most."""
    turns = plan.rounds * math.ceil(clients / plan.separation)
    return runs * turns, runs * clients * (plan.turns() // 2)


def _sampling_power(
    plan: PrivacyPlan, runs: int, bound: float, clients: int | None = None
) -> tuple[float, float]:
    """The shares of audits that find twice the rate, and the same cohort in every turn."""
    turns, pairs = _opportunities(plan, runs, clients or plan.population)
    q = plan.probability
    rate = float(binom.sf(binom.isf(bound, turns, q), turns, min(1.0, 2 * q)))
    # The same cohort again and again is one draw of each run: pairs of a client come together.
    own = max(1, pairs // max(1, plan.turns() // 2))
    needed = binom.isf(bound, pairs, q**2) / max(1, plan.turns() // 2)
    again = float(binom.sf(needed, own, q)) if pairs else 0.0
    return (rate if q <= 0.8 else 1.0), (again if q <= 0.8 else 1.0)


def _single_tests(runs: Sequence[AuditedRun], bound: float) -> Iterator[Test]:
    """Whether counts of adaptive clipping and figures of deployments have the noise they need."""
    counts = np.concatenate([run.counts for run in runs])
    figures = [run.encoder @ run.figures for run in runs if run.figures.size]
    noises = {"noise of the count": counts, "noise of figures and gate": np.array(figures)}
    for name, noise in noises.items():
        if noise.size:
            total = float((noise**2).sum())
            power = float(chi2.cdf(chi2.ppf(bound, noise.size) / SHORT**2, noise.size))
            found = f"{math.sqrt(total / noise.size):.3f} of what is stated"
            yield Test(name, float(chi2.cdf(total, noise.size)), found, power)
    if figures:
        factors = [_triangular(white) for white in figures]
        yield _independence("independence of figures", factors, figures[0].shape[1])


def _triangular(white: np.ndarray) -> np.ndarray:
    """The factor R of [T, P] normals, rounds in their order: Bartlett's, up to signs."""
    return np.asarray(np.linalg.qr(white.T, mode="r"))


def _independence(name: str, factors: Sequence[np.ndarray], size: int) -> Test:
    """Of rounds, by the entries beside the diagonal of triangular factors: independent normals."""
    above = [factor[np.triu(np.ones(factor.shape, bool), 1)] for factor in factors]
    entries = np.concatenate(above)
    p = float(chi2.sf((entries**2).sum(), len(entries))) if len(entries) else 1.0
    largest = float(np.abs(entries).max(initial=0.0)) / math.sqrt(size)
    return Test(name, p, f"correlation {largest:.3f} at most between rounds")


def _interval(runs: Sequence[AuditedRun]) -> tuple[float, float]:
    """Between which shares of the stated noise the true one lies, with confidence 1 - LEVEL."""
    whites = [run.white(run.released - run.sent) for run in runs]
    total, size = sum(float((w**2).sum()) for w in whites), sum(w.size for w in whites)
    low, high = (math.sqrt(total / chi2.ppf(1 - p, size)) for p in (LEVEL / 2, 1 - LEVEL / 2))
    return low, high


def _least(p_values: np.ndarray) -> float:
    """The least of many p-values, for looking at all of them (Bonferroni).

    Examples:
        >>> round(_least(np.array([0.01, 0.5, 0.9])), 4)
        0.03
    """
    return min(1.0, float(p_values.min()) * p_values.size)
