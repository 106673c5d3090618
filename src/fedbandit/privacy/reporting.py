"""A guarantee in words: what an epsilon covers, what it assumes, and when it means nothing.

No number goes out without its unit, its adjacency, its sampling and its rounds.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedbandit.federated.cohorts import Sampling
from fedbandit.federated.pipeline import FixedClipping
from fedbandit.privacy.accounting import Ledger, epsilon_of, finite, plan_epsilon
from fedbandit.privacy.discrete import sum_divergence
from fedbandit.privacy.noise import RELEASE, SECURE, Grid, grid_epsilon, most_devices
from fedbandit.privacy.plan import PrivacyPlan
from fedbandit.privacy.strategies import Independent, mechanism_name, stays_whole

# At 20 an attacker's odds may grow by e^20, five hundred million: far beyond any plausible deniability.
MEANINGLESS = 20.0
_NUMBERS = 1e9  # released in a round at most: what bounds are stated for
NOISE = {
    "seed": "follows from the seed, as the cohorts do: who has this configuration can recompute and"
    ' subtract it, so this model has no guarantee towards them; privacy.noise = "system" is for'
    " models that will be published",
    "system": "from the operating system; it cannot be recomputed",
    "secret": "from a secret of the operating system: who has secret.key can recompute it, so delete"
    " it once the run has finished",
    "devices": "each device's own share, from its operating system; nobody has the whole of it",
}
_COVERS = {
    "seed": "covers the released weights only: rewards, propensities and all other metrics in a"
    " simulation's files are not noised",
    "system": "covers the released weights and what metrics.jsonl and this summary say; private/,"
    " checkpoints and whatever is made from them are not noised, and for the run's owner alone",
}
_UNITS = {
    "client": "one client with all its data",
    "user": "one user with all of their devices and data",
}


def show(epsilon: float | None) -> str:
    """Three digits, and a word for no guarantee at all; None is infinite, as in JSON."""
    if epsilon is None or not math.isfinite(epsilon):
        return "infinite"
    return f"{epsilon:.0f}" if epsilon >= 1000 else f"{epsilon:#.3g}".rstrip(".")


def verdict(epsilon: float) -> str:
    """The worth of a guarantee of this size, in words.

    Examples:
        >>> verdict(0.5), verdict(12.0)
        ('a strong guarantee', 'a weak guarantee')
    """
    if not math.isfinite(epsilon):
        return "no guarantee: there is no noise"
    if epsilon > MEANINGLESS:
        return f"no meaningful guarantee: an attacker's odds about one client may grow by a factor of e^{epsilon:.0f}"
    if epsilon > 10:
        return "a weak guarantee"
    return "a reasonable guarantee" if epsilon > 1 else "a strong guarantee"


def assumptions(plan: PrivacyPlan) -> dict[str, str]:
    """Unit, adjacency and sampling: all that has to be true for the epsilon to hold."""
    n, everybody, rounds = plan.clients_per_round, plan.population, plan.rounds
    who = plan.unit
    adjacency = f"all updates of one {who} are replaced by nothing"
    if plan.sampling == "poisson":
        adjacency = f"one {who} is added or removed"
        sampling = (
            f"Poisson: in each of {rounds} rounds each of {everybody} {who}s takes part with probability"
            f" {plan.probability:.4g}, {n} on average; nobody learns who took part"
        )
    elif plan.sampling == "cyclic-poisson":
        sampling = (
            f"cyclic Poisson: {everybody} clients in {plan.separation} groups that take turns over {rounds} rounds; in"
            f" each of at most {plan.turns()} turns a client takes part with probability {plan.probability:.4g}, {n} on"
            " average; groups may be known, but nobody learns who took part"
        )
    else:
        turns = "any round"
        if plan.sampling == "min-separation":
            turns = f"one of every {plan.separation} rounds at most, so {plan.turns()} of {rounds} times"
        sampling = f"cohorts of {n} out of {everybody}; a {who} may take part in {turns}; no amplification is claimed"
    return {"unit": _UNITS[who], "adjacency": adjacency, "sampling": sampling}


def summary(
    ledger: Ledger | None,
    rounds: int,
    *,
    deployed: bool = False,
    tight: bool = True,
    grid: Grid = RELEASE,
    neighbours: int | None = None,
) -> dict[str, Any]:
    """For `summary.json` and the status of a deployment: the privacy after `rounds` rounds, with all assumptions.

    Without `tight`, epsilon by PLD is left out: it takes a while. `grid` is that of the sums, where
    noise comes from the operating system; `neighbours` are the devices whose keys one device checks.
    """
    if ledger is None:
        return {
            "mechanism": "none",
            "guarantee": "none: updates are clipped where configured, but no noise is added",
        }
    plan = ledger.plan
    epsilon = ledger.epsilon(rounds)
    tightest = ledger.tight_epsilon(rounds) if tight else epsilon
    found: dict[str, Any] = {
        "mechanism": mechanism_name(plan.strategy),
        "epsilon_rdp": finite(epsilon),
        "epsilon_pld": tightest if tight and ledger.has_pld(epsilon) else None,
        "delta": plan.delta,
        "guarantee": verdict(tightest),
        "noise_multiplier": plan.noise_multiplier,
        "noise": NOISE[_source(ledger, deployed)],
        "clip": _clip_in_words(plan),
        "rounds": rounds,
        "assumptions": assumptions(plan),
        "covers": _covered(plan)
        if deployed
        else _COVERS["seed" if ledger.source == "seed" else "system"],
    }
    if ledger.pretraining is None and (rho := plan.rho(rounds)) is not None:
        found["zcdp_rho"] = finite(rho)
    if ledger.reason is not None:
        found["chosen"] = ledger.reason
    if ledger.tolerance is not None:
        found["towards_server"] = towards_server(ledger, rounds, neighbours)
    if plan.amplified:
        found["epsilon_if_cohorts_known"] = finite(_if_cohorts_known(ledger, rounds))
    if deployed or ledger.source != "seed":
        found["noise"] += f"; {release_in_words(ledger, grid)}"
    if ledger.redraws is not None:
        charged = plan.rounds * ledger.redraw_chance
        found["redraws"] = (
            f"a draw of fewer than {ledger.redraws.needed} devices is never released and drawn anew,"
            f" which {plan.rounds} rounds are charged {charged:.2g} of delta and of epsilon for; at"
            f" least {ledger.redraws.connected} devices are connected, whatever their data"
        )
    if plan.adaptive:
        found["count_noise"] = plan.count_deviation
        found["update_noise_multiplier"] = plan.update_multiplier
    if ledger.budget is not None:
        found["budget"] = {
            "epsilon": ledger.budget,
            "accountant": ledger.accountant,
            "rounds": ledger.last_round,
        }
    if plan.delta >= 1 / plan.population:
        found["warning"] = (
            f"delta {plan.delta:g} is not below 1/{plan.population}: publishing one client would do"
        )
    if ledger.pretraining is not None:
        found["pretraining"] = (
            "accounted: trained privately on its own clients. Epsilon is the larger of the two groups', since a public"
            " list (the ids of the data set's first clients) says who is in which"
        )
    elif ledger.public_pretraining:
        found["pretraining"] = "declared public: epsilon says nothing about the clients it used"
    return found


def _source(ledger: Ledger, deployed: bool) -> str:
    if deployed and ledger.source == "seed":
        return "system"
    remembers = not isinstance(ledger.plan.strategy, Independent)
    return "secret" if ledger.source == "system" and remembers and not deployed else ledger.source


def release_in_words(ledger: Ledger, grid: Grid = RELEASE) -> str:
    """The grid and kind of noise of a release, and what floating point can add to epsilon."""
    plan = ledger.plan
    steps = f"sums of whole steps of 2^{math.log2(grid.step):.0f} clip norms"
    if not stays_whole(plan.strategy):
        return (
            f"{steps}, with Gaussian noise of float64 rounded to whole steps: over 10^9 numbers its"
            " tails add 3e-11 to delta, and the rounding of its probabilities about 1e-5 to epsilon"
        )
    noise = f"{steps}, with discrete Gaussian noise, each draw exact"
    if ledger.discrete:
        return f"{noise}, accounted at whole Rényi orders"
    if plan.noise_multiplier == 0:
        return noise
    missed = grid_epsilon(plan.update_multiplier / grid.step, 1e9)
    return (
        f"{noise}, accounted as Gaussian: over 10^9 numbers that misses at most {missed:.0e} of"
        " epsilon"
    )


def towards_server(ledger: Ledger, rounds: int, neighbours: int | None = None) -> dict[str, Any]:
    """Epsilon of devices' noise towards their server: of a device's turns, not amplified.

    The server chooses who takes part and sees sums, so nothing is hidden by chance. One that acts
    may invent devices, whose noise it knows, unless a device checks the keys of a whole round:
    those of its `neighbours`.
    """
    plan, tolerance = ledger.plan, ledger.tolerance
    assert tolerance is not None
    cohort = plan.clients_per_round
    share = tolerance.share(cohort, plan.noise_multiplier)
    tau = sum_divergence(share / SECURE.step, cohort) * math.sqrt(_NUMBERS)
    spent = known_cohorts(plan)
    if tau > 0 and spent.noise_multiplier > 0:
        spent = replace(spent, noise_multiplier=1 / (1 / spent.noise_multiplier + tau))
    acts = neighbours is not None and most_devices(plan) <= neighbours
    whom = "towards a server that acts, too: a device checks the keys of all of a round"
    if not acts:
        checked = (
            "secure_shares devices"
            if neighbours is None
            else f"{neighbours} devices (secure_shares)"
        )
        whom = f"towards a server that only listens: in rounds of more than {checked} one that acts could invent some"
    return {
        "epsilon_rdp": finite(plan_epsilon(spent, rounds=rounds)),
        "delta": plan.delta,
        "turns": plan.turns(rounds),
        "dropout": tolerance.dropout,
        "colluders": tolerance.colluders,
        "share": share,
        "excess": tolerance.excess(cohort),
        "holds": f"while at most {tolerance.dropout:.0%} of a round's devices drop out once keys are"
        f" exchanged (otherwise it is not unmasked) and at most {tolerance.colluders:.0%} work with"
        f" the server; {whom}",
        "server_may_act": acts,
    }


def known_cohorts(plan: PrivacyPlan) -> PrivacyPlan:
    """The plan towards one who knows who took part when: the same noise, no amplification."""
    sampling: Sampling = "fixed" if plan.sampling == "poisson" else "min-separation"
    return replace(plan, sampling=sampling) if plan.amplified else plan


def _if_cohorts_known(ledger: Ledger, rounds: int) -> float:
    """Epsilon by RDP towards those who know who took part when, of the group that it is largest for."""
    before = ledger.pretraining
    epsilons = [] if before is None else [plan_epsilon(known_cohorts(before))]
    return max([plan_epsilon(known_cohorts(ledger.plan), rounds=rounds), *epsilons])


def in_one_line(found: Mapping[str, Any]) -> str:
    """The privacy of a summary in one line, in the one form that all commands print."""
    if found["mechanism"] == "none":
        return "no differential privacy"
    by_rdp, by_pld, rho = found["epsilon_rdp"], found["epsilon_pld"], found.get("zcdp_rho")
    shown = [f"{show(by_rdp)} (RDP)"]
    shown += [] if by_pld is None else [f"{show(by_pld)} (PLD)"]
    shown += [] if rho is None else [f"rho {show(rho)} (zCDP)"]
    if (server := found.get("towards_server")) is not None:
        limit = "" if server.get("server_may_act") else " if it only listens"
        shown.append(f"{show(server['epsilon_rdp'])} towards the server{limit}")
    known = ""
    if "epsilon_if_cohorts_known" in found:
        known = f"; {show(found['epsilon_if_cohorts_known'])} (RDP) to those who know the cohorts"
    assumed = found["assumptions"]
    return (
        f"epsilon {', '.join(shown)} at delta {found['delta']:g} after {found['rounds']} rounds: {found['guarantee']}"
        f" [{assumed['unit']}; {assumed['adjacency']}; {assumed['sampling']}]{known}"
    )


def sweep_cost(ledger: Ledger, runs: int) -> dict[str, Any]:
    """Cost of choosing among several runs on the same clients: all count, not only the winner."""
    each = ledger.epsilon(ledger.last_round)
    everything = composed_epsilon(ledger, runs)
    return {
        "runs": runs,
        "epsilon_each": finite(each),
        "epsilon_together": finite(everything),
        "note": f"tuning spends privacy: {runs} runs at epsilon {show(each)} on the same clients are together worth"
        f" epsilon {show(everything)} (RDP, delta {ledger.plan.delta:g}); the winner has its own epsilon alone"
        " only if the others were run on public data",
    }


def composed_epsilon(ledger: Ledger, runs: int) -> float:
    """Epsilon by RDP of the same run made several times on the same clients."""
    if ledger.plan.noise_multiplier == 0:
        return math.inf
    from dp_accounting import SelfComposedDpEvent

    events = ledger.events(ledger.last_round)
    return max(epsilon_of(SelfComposedDpEvent(event, runs), ledger.plan.delta) for event in events)


def extrapolated(plan: PrivacyPlan, scale: float, population: int) -> PrivacyPlan:
    """The paper's argument: clients per round and noise grow together, so the noise of the mean stays what it is."""
    return replace(
        plan,
        population=population,
        clients_per_round=round(plan.clients_per_round * scale),
        noise_multiplier=plan.noise_multiplier * scale,
    )


def _covered(plan: PrivacyPlan) -> str:
    beside = {"the figures of rewards": plan.figures_share, "the gate's decisions": plan.gate_share}
    paid = [f"{what} ({share:g} of the budget)" for what, share in beside.items() if share]
    released = ", ".join(["the released models", *paid])
    return f"covers {released}; how many devices were asked and answered is not said"


def _clip_in_words(plan: PrivacyPlan) -> str:
    if isinstance(plan.clipping, FixedClipping):
        return f"fixed at {plan.clipping.norm:g}"
    return f"adaptive at quantile {plan.clipping.quantile:g}, from {plan.clipping.initial:g}"
