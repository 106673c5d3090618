"""The paper's figures and ablations as data: which runs each one shows, and what the paper says
about them in words.

Both stand in `figures.toml`. Nothing is run or drawn here.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from fedbandit.config import Config
from fedbandit.core.errors import refuse
from fedbandit.paper.claims import TESTS, Sentence
from fedbandit.studies.compare import described

Family = Literal["emnist", "so"]
EMBEDDED: dict[str, str] = {"emnist": "glyphs", "so": "topics"}


@dataclass(frozen=True)
class Member:
    """One curve: a preset with the changes behind it (`so-init-softmax policy.beta=0.1`).

    Figures that show the same run share its folder.
    """

    what: str
    suffix: str = ""  # sets a changed preset apart

    @property
    def key(self) -> str:
        """The name of its folder: the preset and what sets it apart."""
        return self.what.split()[0] + self.suffix

    def config(self) -> Config:
        """The configuration of the preset with its changes."""
        return described(self.what)


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
    ours: bool = False  # the paper does not have it
    large: bool = False  # needs more clients than the embedded data has

    @property
    def y_axis(self) -> str:
        """The label of the vertical axis."""
        return (
            "mean probability of the chosen action"
            if self.shows == "propensity"
            else "running average reward"
        )


@cache
def _figures() -> list[Figure]:
    """Every figure, in the paper's order, ours behind; an ablation stands there for each family."""
    kept = tomllib.loads(files(__package__).joinpath("figures.toml").read_text(encoding="utf-8"))
    return [_figure(entry, kept["said"]) for entry in kept["figure"]]


def _figure(entry: dict[str, Any], said: list[dict[str, Any]]) -> Figure:
    """A figure of the file, with the sentences that name it."""
    start, rules = entry.pop("of", ""), entry.pop("rules", [])
    given = entry.pop("members", {}) | {rule: f"{start}-{rule}" for rule in rules}
    every = {label: [one] if isinstance(one, str) else one for label, one in given.items()}
    members = {label: Member(*one) for label, one in every.items()}
    own = {entry["name"], f"{entry['name']} {entry['family']}"}
    sentences = tuple(one for each in said if own & {*each["in"]} for one in _sentences(each))
    return Figure(members=members, sentences=sentences, **entry)


def _sentences(said: Mapping[str, Any]) -> Iterator[Sentence]:
    """One sentence for each group of members that the words are tested on."""
    [test] = TESTS.keys() & said.keys()
    more = {key: value for key, value in said.items() if key not in ("in", "words", test)}
    for members in said[test]:
        yield Sentence(test, tuple(members), said["words"], **more)


OURS = tuple(one.name for one in _figures() if one.ours)  # figures that the paper does not have


def figure_names() -> list[str]:
    """Every figure of the paper, in its order."""
    return list(dict.fromkeys(one.name for one in _figures() if not one.ours))


def matching(name: str) -> list[str]:
    """The figures that a name stands for: itself, the panels of `fig1`, or `all`, but for those of
    many clients.
    """
    names = [*figure_names(), *OURS]
    found = [n for n in names if n == name or (n[:-1] == name and n.startswith("fig"))]
    if name == "all":
        found = [n for n in names if not figure(n).large]
    refuse((not found, f"{name}: no such figure; there are {', '.join(names)} and all"))
    return found


def figure(name: str, family: Family | None = None) -> Figure:
    """The figure of that name; an ablation exists for both families, and is Stack Overflow's unless
    asked for.
    """
    named = [one for one in _figures() if one.name == name]
    return next((one for one in named if one.family == (family or "so")), named[0])
