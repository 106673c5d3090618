"""The paper's figures and ablations as data: which runs each one shows, and what the paper says
about them in words.

Nothing is run or drawn here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from fedbandit.config import Config
from fedbandit.core.errors import ConfigError
from fedbandit.paper.claims import (
    Sentence,
    above,
    alike,
    differs,
    drops,
    grows_surer,
    matters_more,
    near_best,
    never_hurts,
    smaller_rates,
    steady,
)
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
class Figure:
    """A figure to make: members by label, what it shows of them, and what is said about them.

    `stated` are final rewards that the paper prints in words. `beside` are members of other
    figures that sentences speak of, by label; these are judged once that figure was made too.
    """

    name: str
    title: str
    family: Family
    members: Mapping[str, Member]
    shows: Literal["reward", "trials", "propensity"] = "reward"
    stated: Mapping[str, float] = field(default_factory=dict)
    stated_epsilon: Mapping[str, float] = field(default_factory=dict)  # of the paper's population
    beside: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # figure, its label
    sentences: tuple[Sentence, ...] = ()

    @property
    def y_axis(self) -> str:
        """The label of the vertical axis."""
        return (
            "mean probability of the chosen action"
            if self.shows == "propensity"
            else "running average reward"
        )


_POLICIES = ("softmax", "falcon", "epsilon-greedy", "greedy")
_NAMES = {"emnist": "EMNIST", "so": "Stack Overflow"}
_EXPLORERS = _POLICIES[:3]
_SETTINGS = {"a": "scratch", "b": "init", "c": "init-shift", "d": "init-shift-deploy40"}

# The paper's words, by section 5 unless said otherwise; what stands in brackets is ours.
_HELPS = "exploration almost always helps relative to the baseline greedy strategy"
_NEVER_HURTS = "[exploration] never hurts"
_CRUCIAL = "exploration is typically crucial since the initial model can arbitrarily prefer certain actions"
_SHIFT = "exploration helps substantially"
_LARGER = "the exploration algorithms all reach significantly larger rewards"
_BASELINE = "the initial model is quite poor, greedy gets a middling improvement on it"
_IDENTICAL = "nearly identical behavior as greedy for most exploration strategies"
_OTHER = "[nearly identical behavior] other than falcon for SO"
_EXPECT = "we expect that the performance of greedy deteriorates with respect to the initial model"
_STRONG = (
    "the initial model has a higher reward than the performance at the end of training from scratch"
)
_SMALL = "[in init] the best results are attained for [...] small learning rates"
_OFTEN = "the absolute performance of all the methods improves [with deployments every 40 rounds]"
_SOFTMAX = "[softmax is] always either performing the best or close to it"
_FALCON = "falcon performs comparably well"
_FREQUENT = (
    "[section 1:] a greedy strategy is highly effective when the problem is stationary and the"
    " model can be updated frequently"
)


def _said_of_setting(family: Family, setting: str) -> tuple[Sentence, ...]:
    """The paper's sentences about the four rules in one setting."""
    if setting == "scratch":
        words = _CRUCIAL if family == "emnist" else _HELPS
        return tuple(above(p, "greedy", words) for p in _EXPLORERS)
    if setting == "init":
        strong = tuple(above("baseline", f"{p} from scratch", _STRONG) for p in _POLICIES)
        if family == "emnist":
            return strong
        others = [
            (p, f"{p} {where}") for p in _POLICIES for where in ("from scratch", "after a shift")
        ]
        return (
            *(alike(p, "greedy", _IDENTICAL) for p in ("softmax", "epsilon-greedy")),
            differs("falcon", "greedy", _OTHER),
            above("baseline", "greedy", _EXPECT),
            *strong,
            smaller_rates(others, _SMALL),
        )
    if setting == "init-shift":
        if family == "emnist":
            return tuple(above(p, "greedy", _SHIFT) for p in _EXPLORERS)
        return (
            *(above(p, "greedy", _LARGER) for p in _EXPLORERS),
            above("greedy", "baseline", _BASELINE),
        )
    return (
        *(above(p, "greedy", _HELPS) for p in _EXPLORERS),
        *(above(p, f"{p} every 200 rounds", _OFTEN) for p in _POLICIES),
    )


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
        beside = {f"{p} every 200 rounds": (f"{name[:-1]}c", p) for p in _POLICIES}
    elif setting == "init":
        beside = {f"{p} from scratch": (f"{name[:-1]}a", p) for p in _POLICIES}
        if family == "so":
            beside |= {f"{p} after a shift": (f"{name[:-1]}c", p) for p in _POLICIES}
    others = tuple(policy for policy in _POLICIES if policy != "softmax")
    return Figure(
        name=name,
        title=f"{_NAMES[family]}, {scenario}{', deploying every 40 rounds' if often else ''}",
        family=family,
        members={policy: Member(f"{family}-{setting}-{policy}") for policy in with_baseline},
        stated=_STATED.get((family, setting), {}),
        sentences=(
            *_said_of_setting(family, setting),
            *(never_hurts(p, "greedy", _NEVER_HURTS) for p in _EXPLORERS),
            near_best("softmax", others, _SOFTMAX),
            alike("falcon", "softmax", _FALCON),
        ),
        beside=beside,
    )


def _trials_figure(name: str, family: Family) -> Figure:
    return Figure(
        name,
        f"{_NAMES[family]}, init-shift: softmax, trial by trial",
        family,
        {"softmax": Member(f"{family}-init-shift-softmax")},
        "trials",
        sentences=(
            steady("softmax", "the variation in rewards across repeated trials is negligible"),
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
    said: Sentence = alike(
        *labels, f"{changed}] no change in the final performance at tuned hyperparameters"
    )
    if family == "so":
        said = drops(*labels, (0.81, 0.62), f"{changed} the reward] drops from 0.81 to 0.62")
    said = replace(said, about_tuning=True)  # both optimisers at their own tuned rates
    return Figure(
        name="ablation-server-optimizer",
        title=f"{_NAMES[family]}, init-shift, softmax: the server's optimiser",
        family=family,
        members=dict(zip(labels, (adam, sgd), strict=True)),
        stated=dict(zip(labels, (0.81, 0.62), strict=True)) if family == "so" else {},
        sentences=(said,),
    )


def _importance_weighting(family: Family) -> Figure:
    plain = Member(f"{family}-init-shift-epsilon-greedy")
    weighted = Member(plain.preset, {"objective.name": "weighted-regression"}, "+weighted")
    values = (0.72, 0.47) if family == "so" else (0.71, 0.60)
    labels = ("epsilon-greedy, regression", "epsilon-greedy, importance-weighted")
    fall = f"from {values[0]:g} to {values[1]:g}"
    words = f"weighted regression worsens the performance in the init-shift setting [...] {fall}"
    unstable = "the destabilizing effects of the variance from importance weighting"
    return Figure(
        name="ablation-importance-weighting",
        title=f"{_NAMES[family]}, init-shift, ε-greedy: importance weights",
        family=family,
        members=dict(zip(labels, (plain, weighted), strict=True)),
        stated=dict(zip(labels, values, strict=True)),
        sentences=(above(*labels, unstable), drops(*labels, values, words)),
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
        "[expected of EMNIST, tried on text:] if we also linearly scale up clients per round from"
        " 64 to 6400, the utility measured by reward is expected to be similar"
    )
    return Figure(
        "extrapolation",
        "Stack Overflow, scratch: noise and clients a round grown together",
        "so",
        members,
        sentences=tuple(alike(other, first, words, "ours") for other in others),
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
    claims = (above(middle, least, words), above(most, middle, words))
    return Figure(
        "cohorts",
        "Stack Overflow, scratch, ε = 4: more clients a round",
        "so",
        members,
        sentences=claims,
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
        "caches": "a minor mismatch between the descriptions of Algorithms [1 and 4]",
        "caches, one in four pulls": "[we] do not incorporate heterogeneous delays in model deployment across clients",
    }
    claims = tuple(
        alike(f"{label}, every {every}", f"simple mode, every {every}", said, "scope")
        for every in (200, 40)
        for label, said in words.items()
    )
    return Figure(
        "population",
        "Stack Overflow, init-shift, softmax: what a cache costs",
        "so",
        members,
        sentences=claims,
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
    said = tuple(
        above(f"weighted, client rate {r}", f"regression, client rate {r}", "", "ours")
        for r in ("2", "0.05")
    )
    title = "Stack Overflow, init-shift, softmax: importance weights and the client rate"
    return Figure("weights", title, "so", members, sentences=said)


def _frequent() -> Figure:
    """The stationary problem with a new model every round, where the paper finds greedy strong."""
    changes = {"deploy_every": 1}
    members = {p: Member(f"so-scratch-{p}", changes, "+every-round") for p in _POLICIES}
    said = (near_best("greedy", _EXPLORERS, _FREQUENT),)
    title = "Stack Overflow, scratch, deploying every round"
    return Figure("frequent", title, "so", members, sentences=said)


def _temperature(name: str) -> Figure:
    """Softmax at the three temperatures of the paper's grid, in one setting."""
    setting = name.removeprefix("temperature-")
    start = f"so-{setting}-softmax"
    low, middle, high = (f"beta = {beta:g}" for beta in (0.02, 0.05, 0.1))
    members = {
        label: Member(start, {"policy.beta": beta}, "" if beta == 0.05 else f"+beta-{beta:g}")
        for label, beta in ((low, 0.02), (middle, 0.05), (high, 0.1))
    }
    words = "a temperature parameter of 0.05 performs the best in all regimes other than init-shift"
    said: tuple[Sentence, ...] = (above(middle, low, words), above(middle, high, words))
    if setting == "init-shift":
        words = "[in init-shift] a slightly higher choice of 0.1 does somewhat better"
        fine = "[in init-shift] 0.05 is still reasonably good"
        said = (above(high, middle, words), near_best(middle, (low, high), fine))
    title = f"Stack Overflow, {setting}, softmax: the temperature"
    return Figure(name, title, "so", members, sentences=said)


_LARGE = {"extrapolation": _extrapolation, "cohorts": _cohorts, "population": _population}
_TEMPERATURES = tuple(f"temperature-{setting}" for setting in ("scratch", "init", "init-shift"))
_OWN: dict[str, Callable[[], Figure]] = {
    "frequent": _frequent,
    **{name: partial(_temperature, name) for name in _TEMPERATURES},
    "weights": _weights,
    **_LARGE,
}
OURS = tuple(_OWN)  # figures that the paper does not have


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
        sentences=_exploration_claims(family, *labels) if propensity else _privacy_claims(*labels),
    )


def _privacy_claims(none: str, clipped: str, small: str, large: str) -> tuple[Sentence, ...]:
    return (
        alike(clipped, none, "clipping alone does not necessarily degrade the model utility"),
        above(small, large, "noise multiplier controls the privacy-utility trade-off"),
    )


def _exploration_claims(
    family: Family, none: str, clipped: str, small: str, large: str
) -> tuple[Sentence, ...]:
    annealing = (
        "the probability of chosen actions gradually increase as the models become more confident"
    )
    early = "DP seems to have a larger effect on the probability at the early stage of training"
    late = "[DP's] effect [on the probability] happens at later stage"
    return (
        *(grows_surer(member, annealing) for member in (none, clipped, small, large)),
        matters_more(large, none, family == "so", early if family == "so" else late),
    )
