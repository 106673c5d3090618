"""The paper's figures and ablations as data: which runs each one shows, and what the paper says
about them in words.

Nothing is run or drawn here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fedbandit.config import Config
from fedbandit.core.errors import ConfigError
from fedbandit.presets import preset

Family = Literal["emnist", "so"]
EMBEDDED: dict[str, str] = {"emnist": "glyphs", "so": "topics"}


@dataclass(frozen=True)
class Member:
    """One curve: a preset, with changes. Figures that show the same run share its folder."""

    preset: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    suffix: str = ""  # sets a changed preset apart

    @property
    def key(self) -> str:
        """The name of its folder: the preset and what sets it apart."""
        return self.preset + self.suffix

    def config(self) -> Config:
        """The configuration of the preset with its changes."""
        return preset(self.preset).with_values(self.changes)


@dataclass(frozen=True)
class Above:
    """The paper says (or its figure's discussion implies) that one member ends higher than another."""

    higher: str
    lower: str
    words: str


@dataclass(frozen=True)
class Alike:
    """The paper says that two members end at about the same reward."""

    one: str
    other: str
    words: str


@dataclass(frozen=True)
class NearBest:
    """The paper says that a member is the best of these or close to it."""

    member: str
    others: tuple[str, ...]
    words: str


@dataclass(frozen=True)
class Steady:
    """The paper says that a member's trials hardly differ."""

    member: str
    words: str


@dataclass(frozen=True)
class GrowsSurer:
    """The paper says that the probability of a member's chosen action rises over the run."""

    member: str
    words: str


@dataclass(frozen=True)
class MattersMore:
    """The paper says in which half of a run noise moves the probability of the chosen action more."""

    noisy: str
    plain: str
    half: Literal["first", "second"]
    words: str


Claim = Above | Alike | NearBest | Steady | GrowsSurer | MattersMore


def labels_of(claim: Claim) -> tuple[str, ...]:
    """The members that a claim is about."""
    match claim:
        case (
            Above(higher=one, lower=other)
            | Alike(one=one, other=other)
            | MattersMore(noisy=one, plain=other)
        ):
            return one, other
        case NearBest():
            return claim.member, *claim.others
        case _:
            return (claim.member,)


@dataclass(frozen=True)
class Figure:
    """A figure to make: members by label, what it shows of them, and the claims that are judged.

    `stated` are final rewards that the paper prints in words. `beside` are members of another
    figure that claims speak of, which are judged once that figure was made too.
    """

    name: str
    title: str
    family: Family
    members: Mapping[str, Member]
    shows: Literal["reward", "trials", "propensity"] = "reward"
    stated: Mapping[str, float] = field(
        default_factory=dict
    )  # final rewards that the paper states in words
    stated_epsilon: Mapping[str, float] = field(default_factory=dict)  # of the paper's population
    beside: Mapping[str, Member] = field(
        default_factory=dict
    )  # runs of another figure that claims speak of
    beside_figure: str = ""
    claims: tuple[Claim, ...] = ()

    @property
    def y_axis(self) -> str:
        """The label of the vertical axis."""
        return (
            "mean probability of the chosen action"
            if self.shows == "propensity"
            else "running average reward"
        )


_POLICIES = ("softmax", "falcon", "epsilon-greedy", "greedy")
RULES = frozenset(_POLICIES)
_NAMES = {"emnist": "EMNIST", "so": "Stack Overflow"}
_EXPLORERS = _POLICIES[:3]
_HELPS = "exploration almost always helps relative to the baseline greedy strategy, and never hurts"
_SHIFT = "exploration helps substantially"
_BASELINE = "the initial model is quite poor, greedy gets a middling improvement on it"
_SUPERVISED = "nearly identical behavior as greedy for most exploration strategies"
_SUPERVISED_SO = f"{_SUPERVISED} other than falcon for SO"
_STRONG = (
    "the initial model has a higher reward than the performance at the end of training from scratch"
)
_OFTEN = "the absolute performance of all the methods improves"
_SOFTMAX = "[softmax is] always either performing the best or close to it"
_CLAIMS: dict[tuple[str, str], tuple[Claim, ...]] = {
    ("emnist", "scratch"): tuple(
        Above(p, "greedy", "exploration is typically crucial") for p in _EXPLORERS
    ),
    ("so", "scratch"): tuple(Above(p, "greedy", _HELPS) for p in _EXPLORERS),
    ("emnist", "init"): (
        *(Alike(p, "greedy", f"[said of Stack Overflow:] {_SUPERVISED}") for p in _EXPLORERS),
        *(Above("baseline", f"{p} from scratch", _STRONG) for p in _POLICIES),
    ),
    ("so", "init"): (
        *(Alike(p, "greedy", _SUPERVISED_SO) for p in ("softmax", "epsilon-greedy")),
        Above(
            "baseline",
            "greedy",
            "the performance of greedy deteriorates with respect to the initial model",
        ),
        *(Above("baseline", f"{p} from scratch", _STRONG) for p in _POLICIES),
    ),
    ("emnist", "init-shift"): tuple(
        Above(p, "greedy", f"{_SHIFT}; a smaller edge over greedy") for p in _EXPLORERS
    ),
    ("so", "init-shift"): (
        *(Above(p, "greedy", f"{_SHIFT}; particularly pronounced") for p in _EXPLORERS),
        Above("greedy", "baseline", _BASELINE),
        Alike("falcon", "softmax", "falcon performs comparably well"),
    ),
}
_CLAIMS |= {
    (family, "init-shift-deploy40"): (
        *(Above(p, "greedy", _HELPS) for p in _EXPLORERS),
        *(Above(p, f"{p} every 200 rounds", _OFTEN) for p in _POLICIES),
    )
    for family in ("emnist", "so")
}
_STATED = {
    ("emnist", "init-shift"): {"epsilon-greedy": 0.71},
    ("so", "init-shift"): {"softmax": 0.81, "epsilon-greedy": 0.72},
}


def _policies_figure(name: str, family: Family, setting: str) -> Figure:
    with_baseline = (*_POLICIES, "baseline") if setting != "scratch" else _POLICIES
    scenario = setting.removesuffix("-deploy40")
    often = setting != scenario
    beside = {}
    if often:
        beside = {
            f"{policy} every 200 rounds": Member(f"{family}-{scenario}-{policy}")
            for policy in _POLICIES
        }
    elif setting == "init":
        beside = {
            f"{policy} from scratch": Member(f"{family}-scratch-{policy}") for policy in _POLICIES
        }
    others = tuple(policy for policy in _POLICIES if policy != "softmax")
    return Figure(
        name=name,
        title=f"{_NAMES[family]}, {scenario}{', deploying every 40 rounds' if often else ''}",
        family=family,
        members={policy: Member(f"{family}-{setting}-{policy}") for policy in with_baseline},
        stated=_STATED.get((family, setting), {}),
        claims=(*_CLAIMS[family, setting], NearBest("softmax", others, _SOFTMAX)),
        beside=beside,
        beside_figure=f"{name[:-1]}{'c' if often else 'a'}" if beside else "",
    )


def _trials_figure(name: str, family: Family) -> Figure:
    return Figure(
        name,
        f"{_NAMES[family]}, init-shift: softmax, trial by trial",
        family,
        {"softmax": Member(f"{family}-init-shift-softmax")},
        "trials",
        claims=(
            Steady("softmax", "the variation in rewards across repeated trials is negligible"),
        ),
    )


def _server_optimizer(family: Family) -> Figure:
    adam = Member(f"{family}-init-shift-softmax")
    # Table 3 and 7 print rates for Adam only; averaging the clients' models (rate 1) is SGD's untuned form.
    sgd = Member(
        adam.preset, {"server.optimizer": "sgd", "server.learning_rate": 1.0}, "+server-sgd"
    )
    labels = ("softmax, Adam", "softmax, SGD")
    changed = "[server SGD in place of Adam:"
    claim: Claim = Alike(
        *labels, f"{changed}] no change in the final performance at tuned hyperparameters"
    )
    if family == "so":
        claim = Above(*labels, f"{changed} the reward] drops from 0.81 to 0.62")
    return Figure(
        name="ablation-server-optimizer",
        title=f"{_NAMES[family]}, init-shift, softmax: the server's optimiser",
        family=family,
        members=dict(zip(labels, (adam, sgd), strict=True)),
        stated=dict(zip(labels, (0.81, 0.62), strict=True)) if family == "so" else {},
        claims=(claim,),
    )


def _importance_weighting(family: Family) -> Figure:
    plain = Member(f"{family}-init-shift-epsilon-greedy")
    weighted = Member(plain.preset, {"objective.name": "weighted-regression"}, "+weighted")
    values = (0.72, 0.47) if family == "so" else (0.71, 0.60)
    labels = ("epsilon-greedy, regression", "epsilon-greedy, importance-weighted")
    fall = f"from {values[0]:g} to {values[1]:g}"
    words = f"weighted regression worsens the performance in the init-shift setting {fall}"
    return Figure(
        name="ablation-importance-weighting",
        title=f"{_NAMES[family]}, init-shift, ε-greedy: importance weights",
        family=family,
        members=dict(zip(labels, (plain, weighted), strict=True)),
        stated=dict(zip(labels, values, strict=True)),
        claims=(Above(*labels, words),),
    )


_ABLATIONS = {
    "ablation-server-optimizer": _server_optimizer,
    "ablation-importance-weighting": _importance_weighting,
}


def _extrapolation() -> Figure:
    """The paper expects this for EMNIST and a hundred times the clients; text stands in, whose
    users can be had.
    """
    pairs = {64: 0.01, 640: 0.1, 6400: 1.0}
    members = {
        f"{clients} clients, NM={noise:g}": Member(
            "so-dp-0.3",
            {"rounds": 800, "clients_per_round": clients, "privacy.noise_multiplier": noise},
            f"+{clients}-clients-noise-{noise:g}",
        )
        for clients, noise in pairs.items()
    }
    first, *others = members
    words = (
        "if we also linearly scale up clients per round from 64 to 6400, the utility measured by reward is expected to"
        " be similar"
    )
    return Figure(
        "extrapolation",
        "Stack Overflow, scratch: noise and clients a round grown together",
        "so",
        members,
        claims=tuple(Alike(other, first, words) for other in others),
    )


def _cohorts() -> Figure:
    """Reward against clients a round at one epsilon, each beside the same cohort without privacy."""
    private = {"privacy.mechanism": "dp-fedavg", "privacy.epsilon": 4.0, "clipping.norm": 0.8}
    rates = {"server.learning_rate": 0.01, "client.learning_rate": 2.0}  # table 9, with noise
    members: dict[str, Member] = {}
    for clients in (64, 640, 2560):
        size = {"rounds": 800, "clients_per_round": clients, "evaluate_every": 800}
        members[f"{clients} clients, ε = 4"] = Member(
            "so-no-dp", {**size, **private, **rates}, f"+{clients}-epsilon-4"
        )
        members[f"{clients} clients, no privacy"] = Member("so-no-dp", size, f"+{clients}")
    words = (
        "a particular useful tuning strategy for DP is to sample large number of clients per round"
    )
    least, middle, most = (f"{clients} clients, ε = 4" for clients in (64, 640, 2560))
    claims = (Above(middle, least, words), Above(most, middle, words))
    return Figure(
        "cohorts",
        "Stack Overflow, scratch, ε = 4: more clients a round",
        "so",
        members,
        claims=claims,
    )


def _population() -> Figure:
    """Algorithm 1 beside the paper's simplification of it: caches that outlive a period, devices
    with old models.
    """
    own = {"mode": "population", "population.events_per_period": 256, "population.cache_size": 256}
    modes: dict[str, tuple[dict[str, Any], str]] = {
        "simple mode": ({}, ""),
        "caches": (own, "+caches"),
        "caches, one in four pulls": ({**own, "population.pull_probability": 0.25}, "+stale"),
    }
    members = {
        f"{label}, every {every}": Member(preset_name, changes, suffix)
        for preset_name, every in (
            ("so-init-shift-softmax", 200),
            ("so-init-shift-deploy40-softmax", 40),
        )
        for label, (changes, suffix) in modes.items()
    }
    words = {
        "caches": "a minor mismatch between the descriptions of Algorithms 1 and 4",
        "caches, one in four pulls": "[we] do not incorporate heterogeneous delays in model deployment across clients",
    }
    claims = tuple(
        Alike(f"{label}, every {every}", f"simple mode, every {every}", said)
        for every in (200, 40)
        for label, said in words.items()
    )
    return Figure(
        "population",
        "Stack Overflow, init-shift, softmax: what a cache costs",
        "so",
        members,
        claims=claims,
    )


def _weights() -> Figure:
    """Importance weights for softmax, at the published client rate and at one that is small enough
    for them.
    """
    start, small = "so-init-shift-softmax", {"client.learning_rate": 0.05}
    weighted = {"objective.name": "weighted-regression"}
    members = {
        "regression, client rate 2": Member(start),
        "weighted, client rate 2": Member(start, weighted, "+weighted"),
        "regression, client rate 0.05": Member(start, small, "+client-0.05"),
        "weighted, client rate 0.05": Member(start, {**small, **weighted}, "+client-0.05+weighted"),
    }
    words = (
        "destabilizing effects of the variance from importance weighting on the learning process"
    )
    claims = tuple(
        Above(f"regression, client rate {r}", f"weighted, client rate {r}", words)
        for r in ("2", "0.05")
    )
    title = "Stack Overflow, init-shift, softmax: importance weights and the client rate"
    return Figure("weights", title, "so", members, claims=claims)


_LARGE = {"extrapolation": _extrapolation, "cohorts": _cohorts, "population": _population}
_OWN = {"weights": _weights, **_LARGE}
OURS = tuple(_OWN)  # figures that the paper does not have
_SETTINGS = {"a": "scratch", "b": "init", "c": "init-shift", "d": "init-shift-deploy40"}


def figure_names() -> list[str]:
    """Every figure of the paper, in its order."""
    panels = [f"fig{number}{panel}" for number in (1, 2) for panel in "abcd"]
    return [*panels, "fig3a", "fig3b", *(f"fig4{panel}" for panel in "abcd"), *_ABLATIONS]


def matching(name: str) -> list[str]:
    """The figures that a name stands for: itself, the panels of `fig1`, or `all`, but for those of
    many clients.
    """
    names = [*figure_names(), *OURS]
    usual = [
        n for n in names if n not in _LARGE
    ]  # those others need more clients than the embedded data has
    found = (
        usual
        if name == "all"
        else [n for n in names if n == name or (n[:-1] == name and n.startswith("fig"))]
    )
    if not found:
        raise ConfigError(f"{name}: no such figure; there are {', '.join(names)} and all")
    return found


def figure(name: str, family: Family | None = None) -> Figure:
    """The figure of that name; an ablation exists for both families, and is Stack Overflow's unless
    asked for.
    """
    if name in _ABLATIONS:
        return _ABLATIONS[name](family or "so")
    if name in _OWN:
        return _OWN[name]()
    number, panel = name[3], name[4]
    if number in "12":
        return _policies_figure(name, "emnist" if number == "1" else "so", _SETTINGS[panel])
    if number == "3":
        return _trials_figure(name, "emnist" if panel == "a" else "so")
    return _privacy_figure(name, "emnist" if panel in "ab" else "so", panel in "bd")


def _privacy_figure(name: str, family: Family, propensity: bool) -> Figure:
    from fedbandit.presets import figure_members

    labels = figure_members(family)
    what = "probability of the chosen action" if propensity else "reward"
    return Figure(
        name=name,
        title=f"{_NAMES[family]}, scratch, softmax with differential privacy: {what}",
        family=family,
        members={label: Member(preset_name) for label, preset_name in labels.items()},
        shows="propensity" if propensity else "reward",
        stated_epsilon={"NM=0.3": 15.8, "NM=0.7": 1.5} if family == "so" else {},
        claims=_exploration_claims(family, *labels) if propensity else _privacy_claims(*labels),
    )


def _privacy_claims(none: str, clipped: str, small: str, large: str) -> tuple[Claim, ...]:
    return (
        Alike(clipped, none, "clipping alone does not necessarily degrade the model utility"),
        Above(small, large, "noise multiplier controls the privacy-utility trade-off"),
    )


def _exploration_claims(
    family: Family, none: str, clipped: str, small: str, large: str
) -> tuple[Claim, ...]:
    annealing = (
        "the probability of chosen actions gradually increase as the models become more confident"
    )
    half: Literal["first", "second"] = "first" if family == "so" else "second"
    early = "DP seems to have a larger effect on the probability at the early stage of training"
    late = "[DP's] effect [on the probability] happens at later stage"
    return (
        *(GrowsSurer(member, annealing) for member in (none, clipped, small, large)),
        MattersMore(large, none, half, early if family == "so" else late),
    )
