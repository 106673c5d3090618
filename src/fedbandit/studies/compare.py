"""Several configurations over the same seeds: `fedbandit compare`, curves of all seeds, paired
differences, a table.

Each run of `fedbandit.compare` lies in a folder named after its configuration, so that a person
finds it; other studies say by a function where theirs lie. Finished runs are never run again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.config import Config, parse_settings, read_toml
from fedbandit.core.errors import ConfigError, DataError, Interrupted
from fedbandit.core.parts import counted, flatten
from fedbandit.core.progress import SILENT, to_stderr
from fedbandit.presets import load
from fedbandit.results import Results
from fedbandit.results.differences import Difference, from_zero, standard_error
from fedbandit.runs.folder import read_metrics
from fedbandit.runs.local_runner import HERE, Ended, Job, LocalRunner, Runner

OnRunEnd = Callable[[str, int, Ended], None]  # of the member with this label, with this seed


def nobody(label: str, seed: int, ended: Ended) -> None:
    """Listens to no end of a run."""


def telling(say: Callable[[str], None]) -> OnRunEnd:
    """Listens to every end of a run, and says it in a line."""

    def tell(label: str, seed: int, ended: Ended) -> None:
        say(f"  {label}, seed {seed}: {ended.message or ended.status} ({ended.seconds:.0f} s)")

    return tell


@dataclass(frozen=True)
class Curves:
    """The seeds of one member, round by round: [seeds, rounds].

    Seeds that diverged are left out of the arrays and named in `diverged`.
    """

    running_reward: np.ndarray
    propensity: np.ndarray
    seeds: tuple[int, ...]
    diverged: tuple[int, ...] = ()

    @property
    def final(self) -> np.ndarray:
        """The final running average reward of each seed."""
        # Seeds that all diverged have not even a last round.
        return self.running_reward[:, -1:].ravel()

    def minus(self, other: "Curves") -> Difference:
        """The difference of its final rewards and the other's, over the seeds that both have: these
        share clients and examples.
        """
        ours, theirs = (dict(zip(c.seeds, c.final.tolist(), strict=True)) for c in (self, other))
        return from_zero(np.array([ours[seed] - theirs[seed] for seed in ours if seed in theirs]))


def run_members(
    members: Mapping[str, Config],
    seeds: Sequence[int],
    folders: Callable[[str, int], Path],
    *,
    runner: Runner = HERE,
    on_end: OnRunEnd = nobody,
) -> dict[str, Curves]:
    """Run every member with every seed into `folders(label, seed)`; the curves of each by label.

    Finished runs are not run again, and a folder of another configuration is refused. A seed that
    diverged is left out of the curves and counted. `Interrupted` is raised if any run was stopped;
    the same call resumes. `on_end` hears of every run that was run now.
    """
    places = [(label, seed) for label in members for seed in seeds]
    jobs = [
        Job(members[label].with_values({"seed": seed}), folders(label, seed))
        for label, seed in places
    ]
    done = [i for i, job in enumerate(jobs) if _finished(job)]
    missing = [i for i in range(len(jobs)) if i not in done]
    # Finished runs are asked for too: a folder of another configuration has to be refused, not drawn.
    ended = dict(zip(done, LocalRunner(1).run([jobs[i] for i in done]), strict=True))
    tell = {str(jobs[i].folder): places[i] for i in missing}
    outcomes = runner.run(
        [jobs[i] for i in missing], on_end=lambda job, end: on_end(*tell[str(job.folder)], end)
    )
    ended |= zip(missing, outcomes, strict=True)
    for i, (label, seed) in enumerate(places):
        if ended[i].status in ("interrupted", "not run"):
            raise Interrupted(
                f"stopped before {label}, seed {seed}, was finished; run the same command again to resume"
            )
    result = {}
    for label in members:
        good = [
            seed
            for i, (name, seed) in enumerate(places)
            if name == label and ended[i].status == "finished"
        ]
        lost = tuple(seed for seed in seeds if seed not in good)
        result[label] = read_curves([folders(label, seed) for seed in good], tuple(good), lost)
    return result


def _finished(job: Job) -> bool:
    """Whether there is nothing left to run; a run that is to be extended has."""
    there = (job.folder / "summary.json").exists() and (job.folder / "config.toml").exists()
    return there and read_toml(job.folder / "config.toml").get("rounds") == job.config.rounds


def read_curves(
    folders: Sequence[Path], seeds: tuple[int, ...] = (), diverged: tuple[int, ...] = ()
) -> Curves:
    """The curves of finished runs of one length."""
    runs = [read_metrics(folder) for folder in folders]
    for folder, lines in zip(folders, runs, strict=True):
        if len(lines) != len(runs[0]):
            raise DataError(
                f"{folder}: has {len(lines)} rounds and {folders[0]} has {len(runs[0])}; runs that differ in their seed"
                " alone should have the same"
            )

    shape = len(runs), len(runs[0]) if runs else 0

    def array(key: str) -> np.ndarray:
        return np.array([[line[key] for line in lines] for lines in runs], float).reshape(shape)

    return Curves(
        array("running_reward"), array("propensity"), seeds or tuple(range(len(runs))), diverged
    )


def table(curves: Mapping[str, Curves], first: str = "policy") -> str:
    """A text table of final running average rewards, a line per member.

    Mean, standard error, standard deviation, lowest and highest over seeds, and how many diverged.
    """
    width = max(len(first), *map(len, curves))
    heads = "  ".join(f"{head:>8}" for head in ("mean", "± s.e.", "std", "lowest", "highest"))
    lines = [f"{first:<{width}}  {heads}  seeds"]
    for label, member in curves.items():
        final = member.final
        lost = f"  diverged: {len(member.diverged)}" if member.diverged else ""
        if not len(final):
            lines.append(f"{label:<{width}}  {'-':>8}{lost}")
            continue
        spread = final.std(ddof=1) if len(final) > 1 else float("nan")
        figures = (final.mean(), standard_error(final), spread, final.min(), final.max())
        lines.append(f"{label:<{width}}  {'  '.join(map(_cell, figures))}  {len(final):5d}{lost}")
    return "\n".join(lines)


def _cell(value: float) -> str:
    return f"{value:8.4f}" if np.isfinite(value) else f"{'-':>8}"


Given = Sequence[str | Config] | Mapping[str, str | Config]


def compare(
    configurations: Given,
    out: Path | str = "comparison",
    *,
    seeds: int | Sequence[int] = 5,
    set: Mapping[str, Any] | None = None,
    workers: int | None = 1,
    progress: bool = False,
) -> Results:
    """Run several configurations with the same seeds into `out`, and return the `Results` of all of
    them.

    A configuration is a preset's name, a TOML file, or either with changes behind it
    (`"so-scratch-softmax policy.beta=0.5"`), or a `Config`; in a dictionary each has a name of your
    own. `set` has changes to all of them. `Results.differences()` tells which can be told apart.
    Finished runs are not repeated: an interrupted comparison is resumed, further configurations and
    seeds are added, and with more rounds all of them are extended.

    With `workers` above 1, or None for one per core, runs are separate processes; a script that
    asks for it needs an `if __name__ == "__main__":` around its work.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     results = compare(
        ...         ["so-scratch-greedy", "so-scratch-softmax", "so-scratch-softmax policy.beta=0.5"],
        ...         folder,
        ...         seeds=2,
        ...         set={"rounds": 2, "clients_per_round": 4},
        ...     )
        >>> results
        <Results: 6 runs of 3 configurations (softmax beta=0.05, softmax beta=0.5, greedy), 2 rounds>
        >>> [run.name for run in results.runs[4:]]
        ['so-scratch-softmax,policy.beta=0.5/seed-0', 'so-scratch-softmax,policy.beta=0.5/seed-1']
        >>> len(results.differences().outcomes)
        3
    """
    runner = LocalRunner(workers, to_stderr() if progress else SILENT)
    return run_comparison(members_of(configurations, set), seeds_of(seeds), Path(out), runner)


def run_comparison(
    members: Mapping[str, Config],
    seeds: Sequence[int],
    out: Path,
    runner: Runner,
    on_end: OnRunEnd = nobody,
) -> Results:
    """Run what is missing, and read all of it."""
    run_members(
        members, seeds, lambda name, seed: out / name / f"seed-{seed}", runner=runner, on_end=on_end
    )
    places = [f"{name}/seed-{seed}" for name in members for seed in seeds]
    return Results.read([(out / place, place) for place in places], str(out))


def members_of(given: Given, changes: Mapping[str, Any] | None = None) -> dict[str, Config]:
    """The configurations by the names of their folders, `changes` made to each.

    Names are those of a dictionary, or what the user wrote: `so-scratch-softmax,policy.beta=0.5`.
    Two configurations that differ in nothing are refused, since their comparison would mean
    nothing.
    """
    pairs = list(given.items()) if isinstance(given, Mapping) else [(None, one) for one in given]
    if not pairs:
        raise ConfigError("compare: name at least one configuration")
    found: dict[str, Config] = {}
    for name, one in pairs:
        config, own = (one, one.policy.name) if isinstance(one, Config) else _described(one)
        called = _folder(name or own)
        if isinstance(one, Config) and name is None and called in found:
            called = f"{called}-{len(found) + 1}"
        if called in found:
            raise ConfigError(f"compare: two configurations are called {called}")
        found[called] = config.with_values(flatten(changes or {}))
    identities = {name: {**config.identity(), "seed": None} for name, config in found.items()}
    for position, (name, identity) in enumerate(identities.items()):
        for other in list(identities)[:position]:
            if identities[other] == identity:
                raise ConfigError(f"compare: {other} and {name} are the same configuration")
    return found


def seeds_of(seeds: int | Sequence[int]) -> list[int]:
    """The seeds, given as they are or as their number."""
    every = list(range(seeds)) if isinstance(seeds, int) else list(dict.fromkeys(seeds))
    if not every or any(seed < 0 for seed in every):
        raise ConfigError(f"seeds: expected {counted(1, 'seed')} or more, not {seeds!r}")
    return every


def _described(text: str) -> tuple[Config, str]:
    """A preset or file by its name, with the changes that stand behind it."""
    what, *settings = text.split()
    name = Path(what).stem if what.endswith(".toml") else what
    return load(what).with_values(parse_settings(settings)), ",".join([name, *settings])


def _folder(name: str) -> str:
    """A name as a folder's: no part of it may lead elsewhere."""
    cleaned = "".join(
        "-" if character in "/\\:*?\"'<>|" or character.isspace() else character
        for character in name
    )
    if cleaned.strip(".") == "":
        raise ConfigError(f"compare: {name!r} cannot be the name of a folder")
    return cleaned
