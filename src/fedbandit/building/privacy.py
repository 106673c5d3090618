"""From the `[privacy]` and `[clipping]` sections of a configuration to a plan and a ledger.

Whatever does not fit together is refused here, with the path of the key, before any work starts.
"""

from dataclasses import replace
from functools import lru_cache

from fedbandit.building.parts import build_clipping, pretraining_clipping, pretraining_cohort
from fedbandit.config import Config, PrivacyConfig
from fedbandit.core.errors import ConfigError
from fedbandit.federated.pipeline import AdaptiveClipping, Clipping, FixedClipping
from fedbandit.privacy.accounting import Ledger, least_noise
from fedbandit.privacy.plan import PrivacyPlan, Sampling
from fedbandit.privacy.strategies import DEFAULT_BANDS, Independent, Restarted, Strategy, Tree, best_banded

_SAMPLING: dict[str, Sampling] = {
    "none": "fixed",
    "dp-fedavg": "poisson",
    "dp-ftrl": "min-separation",
    "banded-mf": "min-separation",
}
_OWN_KEYS = ("noise_multiplier", "delta", "sampling", "separation", "bands", "epsilon")  # those of [privacy]


def build_ledger(config: Config, population: int, pretrained: bool) -> Ledger | None:
    """The plan of a private run with its noise calibrated and its budget set; None for a run without privacy."""
    chosen = config.privacy
    if chosen.mechanism == "none":
        _refuse_settings_without_mechanism(chosen)
        return None
    if not config.clipping.enabled:
        raise ConfigError("clipping.enabled: a private run needs a clip norm, or the noise has no measure")
    if pretrained and chosen.pretraining is None:
        raise ConfigError(
            f'privacy.pretraining: scenario {config.scenario} trains on clients first; say "public" if their data is'
            ' public, or "accounted" to train them privately and pay for it'
        )
    if chosen.noise_multiplier is None and chosen.epsilon is None:
        raise ConfigError("privacy.noise_multiplier: missing; give it, or a budget in privacy.epsilon")
    try:
        plan = _plan(config, population)
        before = _pretraining_plan(config, plan) if pretrained and chosen.pretraining == "accounted" else None
        public = pretrained and chosen.pretraining == "public"
        ledger = Ledger(plan, before, chosen.epsilon, chosen.accountant, public)
        if chosen.noise_multiplier is None:
            assert chosen.epsilon is not None
            ledger = _with_noise(ledger, _calibrated(ledger, chosen.epsilon))
        ledger = _with_clipping(ledger, build_clipping(config), pretraining_clipping(config))
    except ValueError as error:
        key, _, problem = str(error).partition(": ")
        raise ConfigError(f"{f'privacy.{key}' if key in _OWN_KEYS else key}: {problem}") from None
    if ledger.last_round == 0:
        raise ConfigError(f"privacy.epsilon: {chosen.epsilon:g} does not pay for a single round at this noise")
    return ledger


def _plan(config: Config, population: int) -> PrivacyPlan:
    """The plan but for its clipping, and with a noise of 1 where it is yet to be calibrated."""
    chosen = config.privacy
    sampling = chosen.sampling or _SAMPLING[chosen.mechanism]
    separation = chosen.separation or 1
    if chosen.separation is None and sampling == "min-separation":
        separation = max(1, min(config.rounds, population // config.clients_per_round))
    strategy = _strategy(config, separation)
    if chosen.restart_at_deployments:
        if isinstance(strategy, Independent):
            raise ConfigError("privacy.restart_at_deployments: independent noise has nothing to restart")
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
    )


def _strategy(config: Config, separation: int) -> Strategy:
    chosen = config.privacy
    if chosen.bands is not None and chosen.mechanism != "banded-mf":
        raise ConfigError(f"privacy.bands: {chosen.mechanism} has none; they belong to banded-mf")
    if chosen.mechanism == "dp-ftrl":
        return Tree()
    if chosen.mechanism == "banded-mf":
        period = config.deploy_every if chosen.restart_at_deployments else config.rounds
        return best_banded(min(period, config.rounds), chosen.bands or min(separation, DEFAULT_BANDS))
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


def _with_noise(ledger: Ledger, noise_multiplier: float) -> Ledger:
    before = ledger.pretraining and replace(ledger.pretraining, noise_multiplier=noise_multiplier)
    return replace(ledger, plan=replace(ledger.plan, noise_multiplier=noise_multiplier), pretraining=before)


def _with_clipping(ledger: Ledger, clipping: Clipping, at_first: Clipping) -> Ledger:
    assert isinstance(clipping, FixedClipping | AdaptiveClipping)
    assert isinstance(at_first, FixedClipping | AdaptiveClipping)
    before = ledger.pretraining and replace(ledger.pretraining, clipping=at_first)
    return replace(ledger, plan=replace(ledger.plan, clipping=clipping), pretraining=before)


@lru_cache(maxsize=64)
def _calibrated(ledger: Ledger, target: float) -> float:
    """The noise at which all rounds together cost no more than the target."""

    def epsilon_at(noise_multiplier: float) -> float:
        tried = _with_noise(ledger, noise_multiplier)
        spent = tried.epsilon if ledger.accountant == "rdp" else tried.tight_epsilon
        return spent(ledger.plan.rounds)

    return least_noise(epsilon_at, target)


def _refuse_settings_without_mechanism(chosen: PrivacyConfig) -> None:
    for key in ("noise_multiplier", "epsilon", "bands", "pretraining"):
        if getattr(chosen, key) is not None:
            raise ConfigError(f'privacy.{key}: set, but privacy.mechanism is "none"')
    if chosen.restart_at_deployments:
        raise ConfigError('privacy.restart_at_deployments: set, but privacy.mechanism is "none"')
    if chosen.separation is not None and chosen.sampling != "min-separation":
        raise ConfigError('privacy.separation: set, but privacy.sampling is not "min-separation"')
