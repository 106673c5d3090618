"""From the `[privacy]` and `[clipping]` sections of a configuration to a plan and a ledger.

Whatever does not fit together is refused here, with the path of the key, before any work starts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from fedbandit.assembly.parts import (
    build_clipping,
    build_optimizer,
    pretraining_clipping,
    pretraining_cohort,
)
from fedbandit.config import Config, PrivacyConfig
from fedbandit.core.errors import ConfigError, refuse
from fedbandit.federated.cohorts import Sampling
from fedbandit.federated.pipeline import FixedClipping
from fedbandit.privacy.accounting import Ledger, Redraws, least_noise
from fedbandit.privacy.discrete import DeviceNoise
from fedbandit.privacy.plan import PrivacyPlan
from fedbandit.privacy.strategies import (
    DEFAULT_BANDS,
    DEFAULT_BUFFERS,
    Independent,
    Restarted,
    Strategy,
    Tree,
    best_banded,
    best_blt,
    mechanism_name,
    noise_of_rounds,
    stays_whole,
)

_SAMPLING: dict[str, Sampling] = {
    "none": "fixed",
    "dp-fedavg": "poisson",
    "dp-ftrl": "min-separation",
    "banded-mf": "min-separation",
    "blt": "min-separation",
}
_OWN_KEYS = (
    "noise_multiplier",
    "delta",
    "sampling",
    "separation",
    "bands",
    "epsilon",
    "figures_share",
    "gate_share",
    "dropout",
    "colluders",
)
_OF_DEPLOYMENTS = ("figures_share", "gate_share", "unit")
_CANDIDATES: tuple[
    tuple[str, Sampling], ...
] = (  # for the best; a mechanism without its best sampling cannot win
    ("dp-fedavg", "poisson"),
    ("dp-fedavg", "min-separation"),
    ("dp-ftrl", "min-separation"),
    ("banded-mf", "min-separation"),
    ("banded-mf", "cyclic-poisson"),
    ("blt", "min-separation"),
    ("dp-fedavg", "fixed"),
    ("dp-ftrl", "fixed"),
    ("blt", "fixed"),
)

_BANDS = (4, 8, 16, DEFAULT_BANDS, 64)
NEGLIGIBLE = 0.01  # of delta: more is not paid for rounds that are redrawn


@dataclass(frozen=True)
class Candidate:
    """A mechanism that meets a budget, and the noise that it leaves in the weights."""

    name: str
    ledger: Ledger
    error: float  # root mean square over all rounds, in clip norms on the sum


def build_ledger(
    config: Config,
    population: int,
    pretrained: bool,
    *,
    deployed: bool = False,
    secure: Redraws | None = None,
) -> Ledger | None:
    """The plan of a private run with its noise calibrated and its budget set; None for a run without privacy.

    `secure` is given for deployments with secure sums: what they redraw, where the plan's sampling makes that cost.
    """
    chosen = config.privacy
    if chosen.mechanism == "none":
        _refuse_settings_without_mechanism(chosen)
        return None
    given = () if deployed else [key for key in _OF_DEPLOYMENTS if getattr(chosen, key) is not None]
    tolerated = chosen.dropout is not None or chosen.colluders is not None
    refuse(
        *(
            (True, f"privacy.{key}: is for deployments; the figures of a simulation have no noise")
            for key in given
        ),
        (
            deployed and chosen.sampling == "cyclic-poisson",
            "privacy.sampling: cyclic-poisson is for simulations; devices have no groups that take"
            " turns",
        ),
        (
            tolerated and chosen.noise != "devices",
            'privacy.dropout: with privacy.colluders it is for noise = "devices"',
        ),
    )
    if chosen.noise == "devices":
        _check_device_noise(config, deployed, secure)
    if chosen.mechanism == "best":
        return _best(config, population, pretrained, deployed, secure)
    refuse(
        (
            not config.clipping.enabled,
            "clipping.enabled: a private run needs a clip norm, or the noise has no measure",
        ),
        (
            pretrained and chosen.pretraining is None,
            f"privacy.pretraining: scenario {config.scenario} trains on clients first; say"
            ' "public" if their data is public, or "accounted" to train them privately and pay for'
            " it",
        ),
        (
            chosen.noise_multiplier is None and chosen.epsilon is None,
            "privacy.noise_multiplier: missing; give it, or a budget in privacy.epsilon",
        ),
    )
    try:
        plan = _plan(config, population)
        before = (
            _pretraining_plan(config, plan)
            if pretrained and chosen.pretraining == "accounted"
            else None
        )
        public = pretrained and chosen.pretraining == "public"
        ledger = Ledger(plan, before, chosen.epsilon, chosen.accountant, public, chosen.noise)
        if chosen.noise == "devices":
            stated = chosen.model_dump(include={"dropout", "colluders"}, exclude_none=True)
            tolerance = DeviceNoise(**stated)
            tolerance.honest(config.clients_per_round)  # refuses a cohort that leaves none
            ledger = replace(ledger, discrete=True, tolerance=tolerance)
        if secure is not None:
            ledger = _with_secure_sums(ledger, secure)
        if chosen.noise_multiplier is None:
            assert chosen.epsilon is not None
            ledger = _with_noise(ledger, _calibrated(ledger, chosen.epsilon))
        # The clipping comes last: an adaptive one has no room for the noise that is yet to be found.
        before = ledger.pretraining
        if before is not None:
            before = replace(before, clipping=pretraining_clipping(config))
        plan = replace(ledger.plan, clipping=build_clipping(config))
        ledger = replace(ledger, plan=plan, pretraining=before)
    except ValueError as error:
        key, _, problem = str(error).partition(": ")
        raise ConfigError(f"{f'privacy.{key}' if key in _OWN_KEYS else key}: {problem}") from None
    if ledger.last_round == 0:
        raise ConfigError(
            f"privacy.epsilon: {chosen.epsilon:g} does not pay for a single round at this noise"
        )
    return ledger


def candidates(
    config: Config,
    population: int,
    pretrained: bool,
    *,
    deployed: bool = False,
    secure: Redraws | None = None,
) -> Iterator[Candidate]:
    """Every mechanism that the configuration leaves open, with its noise calibrated to the budget."""
    chosen = config.privacy
    for mechanism, sampling, bands in _open(chosen, config.rounds, deployed):
        own = {
            "privacy.mechanism": mechanism,
            "privacy.sampling": sampling,
            "privacy.bands": bands,
            "privacy.buffers": chosen.buffers if mechanism == "blt" else None,
        }
        try:
            own_config = config.with_values(own)
            ledger = build_ledger(
                own_config, population, pretrained, deployed=deployed, secure=secure
            )
        except ConfigError:
            continue  # it does not fit the rest of the configuration: adaptive clipping, restarts, few clients
        assert ledger is not None
        plan = ledger.plan
        _, variances = noise_of_rounds(plan.strategy, plan.rounds, server_momentum(config))
        error = plan.update_multiplier * float(np.sqrt(variances.mean()))
        yield Candidate(f"{mechanism_name(plan.strategy)} ({sampling})", ledger, error)


def _open(
    chosen: PrivacyConfig, rounds: int, deployed: bool
) -> Iterator[tuple[str, Sampling, int | None]]:
    for mechanism, sampling in _CANDIDATES:
        if chosen.sampling not in (None, sampling) or (
            chosen.sampling is None and sampling == "fixed"
        ):
            continue
        if sampling != "cyclic-poisson":
            yield mechanism, sampling, chosen.bands if mechanism == "banded-mf" else None
        elif (
            not deployed
        ):  # fewer bands correlate less and amplify more: which is better depends on the cohorts
            for bands in (
                sorted({min(bands, rounds) for bands in _BANDS})
                if chosen.bands is None
                else (chosen.bands,)
            ):
                yield mechanism, sampling, bands


def server_momentum(config: Config) -> float:
    """The momentum of the server's optimiser, which decides what noise of many rounds comes to in the weights."""
    chosen = config.server
    optimizer = build_optimizer("server.optimizer", chosen.optimizer, chosen.parameters)
    return float(getattr(optimizer, "momentum", getattr(optimizer, "beta_1", 0.0)))


def _best(
    config: Config, population: int, pretrained: bool, deployed: bool, secure: Redraws | None
) -> Ledger:
    chosen = config.privacy
    if chosen.epsilon is None or chosen.noise_multiplier is not None:
        raise ConfigError(
            'privacy.epsilon: mechanism = "best" compares mechanisms at a budget; give epsilon, and no noise_multiplier'
        )
    found = sorted(
        candidates(config, population, pretrained, deployed=deployed, secure=secure),
        key=lambda one: one.error,
    )
    if not found:
        # None fits: let the plainest one say what is in the way.
        plainest = config.with_values({"privacy.mechanism": "dp-fedavg"})
        build_ledger(plainest, population, pretrained, deployed=deployed, secure=secure)
        raise ConfigError(
            'privacy.mechanism: no mechanism fits this configuration, so there is no "best"'
        )
    first, *rest = found
    others = (
        ", ".join(f"{one.name} {one.error:.3g}" for one in rest)
        or "no other fits this configuration"
    )
    reason = (
        f"{first.name} leaves the least noise in the weights at epsilon {chosen.epsilon:g}: {first.error:.3g} clip"
        f" norms (root mean square over {config.rounds} rounds); {others}"
    )
    return replace(first.ledger, reason=reason)


def _plan(config: Config, population: int) -> PrivacyPlan:
    """The plan but for its clipping, and with a noise of 1 where it is yet to be calibrated."""
    chosen = config.privacy
    sampling = chosen.sampling or _SAMPLING[chosen.mechanism]
    separation = chosen.separation or 1
    if chosen.separation is None and sampling in ("min-separation", "cyclic-poisson"):
        separation = max(1, min(config.rounds, population // config.clients_per_round))
        if sampling == "cyclic-poisson":  # more groups than bands would only cost amplification
            separation = chosen.bands or min(separation, DEFAULT_BANDS)
    strategy = _strategy(config, separation)
    if chosen.restart_at_deployments:
        if isinstance(strategy, Independent):
            raise ConfigError(
                "privacy.restart_at_deployments: independent noise has nothing to restart"
            )
        strategy = Restarted(strategy, config.deploy_every)
    return PrivacyPlan(
        population=population,
        clients_per_round=config.clients_per_round,
        rounds=config.rounds,
        noise_multiplier=1.0 if chosen.noise_multiplier is None else chosen.noise_multiplier,
        delta=chosen.delta,
        sampling=sampling,
        separation=separation,
        strategy=strategy,
        clipping=FixedClipping(config.clipping.norm or 1.0),
        figures_share=chosen.figures_share or 0.0,
        gate_share=chosen.gate_share or 0.0,
        unit=chosen.unit or "client",
    )


def _strategy(config: Config, separation: int) -> Strategy:
    chosen = config.privacy
    banded, buffered = chosen.mechanism == "banded-mf", chosen.mechanism == "blt"
    refuse(
        (chosen.bands is not None and not banded, "privacy.bands: applies only to banded-mf"),
        (chosen.buffers is not None and not buffered, "privacy.buffers: applies only to blt"),
    )
    period = min(
        config.deploy_every if chosen.restart_at_deployments else config.rounds, config.rounds
    )
    if chosen.mechanism == "dp-ftrl":
        return Tree()
    if banded:
        return best_banded(
            period, chosen.bands or min(separation, DEFAULT_BANDS), server_momentum(config)
        )
    if buffered:
        return best_blt(
            period,
            min(separation, period),
            chosen.buffers or DEFAULT_BUFFERS,
            server_momentum(config),
        )
    return Independent()


def _pretraining_plan(config: Config, plan: PrivacyPlan) -> PrivacyPlan:
    """Private pre-training is DP-FedAvg over its own clients, with the noise of the bandit phase."""
    if config.pretraining.clip_norm in ("none", "adaptive"):
        raise ConfigError(
            'pretraining.clip_norm: accounted pre-training needs a norm for its noise; give one, or "same" for that of'
            " the bandit phase"
        )
    return replace(
        plan,
        population=config.pretraining.clients,
        clients_per_round=pretraining_cohort(config),
        rounds=config.pretraining.rounds,
        sampling="poisson",
        separation=1,
        strategy=Independent(),
    )


def _check_device_noise(config: Config, deployed: bool, secure: Redraws | None) -> None:
    """Refuse what devices' own noise does not cover: a server would see it exactly."""
    chosen, kept = config.privacy, 'with noise = "devices"'
    shares = [key for key in ("figures_share", "gate_share") if getattr(chosen, key) is not None]
    refuse(
        (
            chosen.mechanism not in ("dp-fedavg", "best"),
            f"privacy.mechanism: {kept} noise is independent, as that of dp-fedavg: correlated"
            " noise would need a memory that no device may have alone",
        ),
        (
            deployed and secure is None,
            f"deployment.secure_aggregation: missing; {kept} the server must see sums alone",
        ),
        (
            config.clipping.norm is None,
            f"clipping.norm: missing; {kept} nobody counts unclipped devices",
        ),
        *(
            (True, f"privacy.{key}: {kept} devices send their update and nothing else")
            for key in shares
        ),
        (
            chosen.accountant == "pld",
            "privacy.accountant: pld does not know discrete noise; use rdp",
        ),
    )


def _with_secure_sums(ledger: Ledger, secure: Redraws) -> Ledger:
    """The ledger of a plan whose sums are secure: whole numbers, redrawn where too few devices are in them."""
    plan = ledger.plan
    discrete = stays_whole(plan.strategy)
    if discrete and ledger.accountant == "pld":
        raise ConfigError(
            "privacy.accountant: pld does not know the discrete noise of secure sums; use rdp"
        )
    found = replace(
        ledger, discrete=discrete, redraws=secure if plan.sampling == "poisson" else None
    )
    if (charged := plan.rounds * found.redraw_chance) > NEGLIGIBLE * plan.delta:
        fewer = [replace(secure, needed=needed) for needed in range(3, secure.needed)]
        fits = [
            one.needed
            for one in fewer
            if plan.rounds * one.chance(plan.probability) <= NEGLIGIBLE * plan.delta
        ]
        advice = f"at most {fits[-1]} would do" if fits else "no number would do"
        raise ConfigError(
            f"deployment.min_reports: a draw of fewer than {secure.needed} devices is drawn anew, which costs"
            f" {charged:.2g} of delta if only {secure.connected} devices are connected (deployment.min_reach and"
            f" max_dropout; {secure.connected * plan.probability:.3g} in a sum on average), more than a hundredth of"
            f" {plan.delta:g}; {advice}, and privacy.sampling without amplification draws anew for free"
        )
    return found


def _with_noise(ledger: Ledger, noise_multiplier: float) -> Ledger:
    before = ledger.pretraining and replace(ledger.pretraining, noise_multiplier=noise_multiplier)
    return replace(
        ledger, plan=replace(ledger.plan, noise_multiplier=noise_multiplier), pretraining=before
    )


@lru_cache(maxsize=64)
def _calibrated(ledger: Ledger, target: float) -> float:
    """The noise at which all rounds together cost no more than the target."""

    def epsilon_at(noise_multiplier: float) -> float:
        tried = _with_noise(ledger, noise_multiplier)
        spent = tried.epsilon if ledger.accountant == "rdp" else tried.tight_epsilon
        return spent(ledger.plan.rounds)

    return least_noise(epsilon_at, target)


def _refuse_settings_without_mechanism(chosen: PrivacyConfig) -> None:
    refused = ("noise_multiplier", "epsilon", "bands", "buffers", "pretraining", *_OF_DEPLOYMENTS)
    default = PrivacyConfig()
    keys = (*refused, "restart_at_deployments", "noise")
    changed = [key for key in keys if getattr(chosen, key) != getattr(default, key)]
    refuse(
        *((True, f'privacy.{key}: set, but privacy.mechanism is "none"') for key in changed),
        (
            chosen.sampling == "cyclic-poisson",
            "privacy.sampling: cyclic-poisson belongs to banded-mf, but privacy.mechanism is"
            ' "none"',
        ),
        (
            chosen.separation is not None and chosen.sampling != "min-separation",
            'privacy.separation: set, but privacy.sampling is not "min-separation"',
        ),
    )
