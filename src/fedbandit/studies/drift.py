"""The drift study: how far the reward of each policy falls after a change, and how soon it
recovers.

Its runs are in run folders and can be resumed; a policy that diverges is counted, and does not end
the study. docs/drift.md shows the three kinds of change.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.config import Config, parse_settings
from fedbandit.core.errors import Diverged, refuse
from fedbandit.core.files import write_json
from fedbandit.data import open_dataset
from fedbandit.evaluation.metrics import Recovery, recoveries
from fedbandit.presets import preset
from fedbandit.results.differences import text_table
from fedbandit.results.plots import draw_curves, require_picture
from fedbandit.runs.local_runner import HERE, Runner
from fedbandit.studies.compare import Say, quiet, run_members
from fedbandit.studies.sweeps import name_of

_OWN = {
    "seed": "use --seeds",
    "data.source": "use --data",
    "scenario": "it is `drift`",
    "rounds": "use --rounds, or --scale of the figure",
    "drift.at": "use --at",
    "drift.kind": "use --kind",
}


_RATES_OF = {"falcon-schedule": "falcon"}


@dataclass(frozen=True)
class DriftStudy:
    """The change, its rounds, and the policies that are compared.

    Learning rates are those of the paper's `scratch` tables. `window` is the number of rounds that
    a mean is taken over, before and after a change.
    """

    data: str = "topics"
    kind: str = "permute"
    rounds: int = 400
    at: tuple[int, ...] = (200,)
    deploy_every: int = 10
    clients_per_round: int = 32
    max_examples: int = 64
    policies: Sequence[str] = ("greedy", "epsilon-greedy", "softmax", "falcon")
    seeds: int = 3
    window: int = 10
    settings: tuple[tuple[str, Any], ...] = ()  # any further value of the configuration

    def __post_init__(self) -> None:
        """Refuse settings that the study decides, and changes that lie too close together."""
        apart = [later - earlier for earlier, later in pairwise([1, *self.at, self.rounds + 1])]
        refuse(
            *(
                (key in _OWN, f"--set {key}: set by the study; {_OWN.get(key)}")
                for key, _ in self.settings
            ),
            (not self.policies, "--policies: name at least one"),
            (
                self.seeds < 1 or min(apart) < self.window,
                f"--at, --rounds: leave at least {self.window} rounds before, between and after"
                " changes",
            ),
        )


@dataclass(frozen=True)
class DriftOutcome:
    """One policy: its rewards by round, [seeds, rounds], what each change did in each seed, and
    seeds that diverged.
    """

    policy: str
    rewards: np.ndarray
    recovered: list[list[Recovery]]
    diverged: tuple[int, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        """A row for each change: means over seeds, and in how many the reward recovered."""
        found = []
        for each in zip(*self.recovered, strict=True):
            back = [one.rounds for one in each if one.rounds is not None]
            names = ("before", "fall", "last", "lost")
            means = {name: float(np.mean([getattr(one, name) for one in each])) for name in names}
            recovery = float(np.mean(back)) if back else None
            row = {"policy": self.policy, "change": each[0].change, **means, "recovery": recovery}
            found.append({**row, "seeds": len(each), "recovered": len(back)})
        return found


def members(study: DriftStudy) -> dict[str, Config]:
    """The configuration of each policy, as the paper has it for this kind of data, in the study's
    world.
    """
    family = "so" if open_dataset(study.data).header.kind == "sparse" else "emnist"
    world = {
        "data.source": study.data,
        "scenario": "drift",
        "drift.kind": study.kind,
        "drift.at": list(study.at),
        "rounds": study.rounds,
        "deploy_every": study.deploy_every,
        "clients_per_round": study.clients_per_round,
        "client.max_examples": study.max_examples,
        **dict(study.settings),
    }
    return {policy: _member(family, policy).with_values(world) for policy in study.policies}


def _member(family: str, described: str) -> Config:
    """A policy by its name and parameters behind it, `softmax floor=0.05`, at the rates that the
    paper has for it.

    The paper has none for FALCON with its schedule, which takes those of FALCON.
    """
    name, *settings = described.split()
    config = preset(f"{family}-scratch-{_RATES_OF.get(name, name)}")
    if name in _RATES_OF:
        config = config.with_values({"policy.name": name})
    return config.with_values(parse_settings(f"policy.{setting}" for setting in settings))


def run_study(
    study: DriftStudy,
    folder: Callable[[str], Path],
    *,
    runner: Runner = HERE,
    say: Say = quiet,
) -> list[DriftOutcome]:
    """Run what is missing of every policy and seed into `folder(policy)`, and read off what the
    changes did.
    """
    outcomes = []
    found = run_members(members(study), range(study.seeds), folder, runner=runner, say=say)
    for policy, curves in found.items():
        rewards = np.array(
            [[line["reward"] for line in lines] for lines in curves.metrics()], float
        )
        recovered = [recoveries(curve, study.at, window=study.window) for curve in rewards]
        outcomes.append(DriftOutcome(policy, rewards, recovered, curves.diverged))
    refuse(
        (not any(outcome.recovered for outcome in outcomes), "drift: every run diverged"),
        error=Diverged,
    )
    return outcomes


def table(study: DriftStudy, outcomes: Sequence[DriftOutcome]) -> str:
    """A text table of falls and recoveries by policy and change, with a legend."""
    lines = [["policy", "change", "before", "fall", "recovery", "at end", "lost"]]
    for row in (row for outcome in outcomes for row in outcome.rows()):
        whole = row["recovered"] == row["seeds"]
        back = f"{row['recovery']:.0f}" if whole else f"{row['recovered']} of {row['seeds']}"
        figures = f"{row['before']:.3f}", f"{row['fall']:.3f}", back, f"{row['last']:.3f}"
        lines.append([row["policy"], str(row["change"]), *figures, f"{row['lost']:.1f}"])
    lost = [
        f"{o.policy}: {len(o.diverged)} of {len(o.rewards) + len(o.diverged)} seeds diverged"
        for o in outcomes
        if o.diverged
    ]
    legend = (
        f"recovery: rounds until the mean of {study.window} is back at nine tenths, 0 where it never"
        "\nfell below; lost: reward below before, summed over rounds"
    )
    return "\n".join([text_table(lines), *lost, legend])


_TITLES = {
    "permute": "Labels trade places",
    "appear": "New actions appear",
    "rotate": "Preferences rotate",
}


def publish(
    study: DriftStudy, out: Path, *, runner: Runner = HERE, say: Say = print
) -> tuple[str, list[dict[str, Any]]]:
    """Run the study with its runs beside the picture `out`; draw it, write its numbers, and return
    it as text and as rows.
    """
    require_picture(out)
    names = {policy: name_of(policy, config) for policy, config in members(study).items()}
    runs, numbers = out.with_name(f"{out.stem}-runs"), out.with_suffix(".json")
    outcomes = run_study(study, lambda policy: runs / names[policy], runner=runner, say=say)
    data = open_dataset(study.data).header.name
    title = f"{_TITLES.get(study.kind, study.kind)} ({data}, {study.seeds} seeds)"
    text = table(study, outcomes)
    clients = f"{study.clients_per_round} clients a round, at most {study.max_examples} examples"
    length = f"{study.rounds} rounds, deploying every {study.deploy_every}"
    kept = {  # by which `fedbandit gallery` shows the picture beside it
        "figure": "drift",
        "title": title,
        "note": f"{length}; {clients} each; published rates",
        "data": data,
        "text": text,
        "members": {
            o.policy: [[asdict(change) for change in seed] for seed in o.recovered]
            for o in outcomes
        },
        "diverged": {o.policy: list(o.diverged) for o in outcomes if o.diverged},
    }
    write_json(numbers, kept)
    shown = {o.policy: _smooth(o.rewards, study.window) for o in outcomes if len(o.rewards)}
    label = f"reward, mean of {study.window} rounds"
    draw_curves(shown, out, title=title, ylabel=label, changes=study.at)
    rows = [row for outcome in outcomes for row in outcome.rows()]
    return f"{text}\n{out}; numbers: {numbers}; runs: {runs}", rows


def _smooth(rewards: np.ndarray, window: int) -> np.ndarray:
    """Means over the last `window` rounds, [seeds, rounds]; NaN before the first full window."""
    kernel = np.ones(window) / window
    means = np.array([np.convolve(curve, kernel, mode="valid") for curve in rewards])
    return np.pad(means, ((0, 0), (window - 1, 0)), constant_values=np.nan)
