"""Several configurations over the same seeds: `fedbandit compare`, curves of all seeds, paired
differences, a table.

Each run of `fedbandit.compare` lies in a folder named after its configuration, so that a person
finds it; other studies say by a function where theirs lie. Finished runs are never run again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.config import Config, parse_settings, read_toml
from fedbandit.core.errors import ConfigError, DataError, Interrupted, refuse
from fedbandit.core.parts import counted, flatten, nearest
from fedbandit.core.progress import SILENT, to_stderr
from fedbandit.presets import load
from fedbandit.results import Results
from fedbandit.results.differences import Difference, from_zero, standard_error, text_table
from fedbandit.runs.folder import read_metrics
from fedbandit.runs.local_runner import HERE, Ended, Job, LocalRunner, OnEnd, Runner, nobody
from fedbandit.runs.reporting import no_model_acts

Say = Callable[[str], None]  # takes a line for the user


def quiet(text: str) -> None:
    """Says nothing."""


@dataclass(frozen=True)
class Curves:
    """The seeds of one member, round by round: float arrays [seeds, rounds].

    Seeds that diverged are left out of the arrays and named in `diverged`.

    Examples:
        >>> softmax, greedy = (
        ...     Curves(np.array(rows), np.ones((3, 2)), seeds=(0, 1, 2))
        ...     for rows in ([[0.2, 0.6], [0.3, 0.7], [0.2, 0.8]], [[0.2, 0.5], [0.3, 0.5], [0.2, 0.6]])
        ... )
        >>> softmax.by_seed
        {0: 0.6, 1: 0.7, 2: 0.8}
        >>> print(softmax.minus(greedy))
        +0.1667, 95% interval +0.0232 to +0.3101
    """

    running_reward: np.ndarray
    propensity: np.ndarray
    seeds: tuple[int, ...]
    diverged: tuple[int, ...] = ()
    folders: tuple[Path, ...] = ()  # of the seeds' runs

    @property
    def final(self) -> np.ndarray:
        """The final running average reward of each seed."""
        # Seeds that all diverged have not even a last round.
        return self.running_reward[:, -1:].ravel()

    @property
    def by_seed(self) -> dict[int, float]:
        """The final rewards by seed."""
        return dict(zip(self.seeds, self.final.tolist(), strict=True))

    def metrics(self) -> list[list[dict[str, Any]]]:
        """The lines of every seed's metrics, as its run wrote them."""
        return [read_metrics(folder) for folder in self.folders]

    def minus(self, other: "Curves") -> Difference:
        """The difference of its final rewards and the other's, over the seeds that both have: these
        share clients and examples.
        """
        ours, theirs = self.by_seed, other.by_seed
        return from_zero(np.array([ours[seed] - theirs[seed] for seed in ours if seed in theirs]))


def run_members(
    members: Mapping[str, Config],
    seeds: Sequence[int],
    folder: Callable[[str], Path],
    *,
    runner: Runner = HERE,
    say: Say = quiet,
) -> dict[str, Curves]:
    """Run every member with every seed into `folder(label)/seed-N`; the curves of each by label.

    All members share the seeds, so that differences can be paired: a seed gives every member the
    same clients and examples. A seed that diverged is left out of the curves and counted. Finished
    runs are not run again, and `say` hears of every one that was run now. `folder` is often
    `out.joinpath`.
    """
    places = {folder(label) / f"seed-{seed}": (label, seed) for label in members for seed in seeds}

    def tell(job: Job, ended: Ended) -> None:
        """Say how a run of this call ended."""
        label, seed = places[job.folder]
        say(f"  {label}, seed {seed}: {ended.message or ended.status} ({ended.seconds:.0f} s)")

    jobs = [
        Job(members[label].with_values({"seed": seed}), place)
        for place, (label, seed) in places.items()
    ]
    ended = run_jobs(jobs, runner, on_end=tell)
    good = [place for place, end in zip(places, ended, strict=True) if end.status == "finished"]
    result = {}
    for label in members:
        own = {places[place][1]: place for place in good if places[place][0] == label}
        lost = tuple(seed for seed in seeds if seed not in own)
        result[label] = read_curves(list(own.values()), tuple(own), lost)
    return result


_BATCH = 250  # runs that are held in memory at a time


def run_jobs(
    jobs: Iterable[Job],
    runner: Runner,
    *,
    deadline: float | None = None,
    on_end: OnEnd = nobody,
) -> list[Ended]:
    """Run what is missing of many runs, and return how each ended: the one way of all studies.

    Finished runs are not run again, but asked for first, so that a folder of another configuration
    is refused before anything runs; `on_end` does not hear of them. Runs that have not begun by
    the deadline (of `time.monotonic`) are `not run`. `Interrupted` is raised if any run was
    stopped; the same call resumes. Jobs are taken a few hundred at a time, so that thousands of
    members of a sweep fit into memory.
    """
    waiting, ended = iter(jobs), list[Ended]()
    while batch := list(islice(waiting, _BATCH)):
        done = {i for i, job in enumerate(batch) if _finished(job)}
        missing = [i for i in range(len(batch)) if i not in done]
        found = dict(zip(done, LocalRunner(1).run([batch[i] for i in done]), strict=True))
        now = runner.run([batch[i] for i in missing], deadline=deadline, on_end=on_end)
        found |= zip(missing, now, strict=True)
        for i, end in found.items():
            refuse(
                (
                    end.status == "interrupted" or (end.status == "not run" and deadline is None),
                    f"stopped before {batch[i].folder} was finished;"
                    " run the same command again to resume",
                ),
                error=Interrupted,
            )
        ended += [found[i] for i in range(len(batch))]
    return ended


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
        refuse(
            (
                len(lines) != len(runs[0]),
                f"{folder}: has {len(lines)} rounds and {folders[0]} has {len(runs[0])};"
                " runs that differ in their seed alone should have the same",
            ),
            error=DataError,
        )

    shape = len(runs), len(runs[0]) if runs else 0

    def array(key: str) -> np.ndarray:
        """A column of the metrics: float [seeds, rounds]."""
        return np.array([[line[key] for line in lines] for lines in runs], float).reshape(shape)

    known = seeds or tuple(range(len(runs)))
    return Curves(array("running_reward"), array("propensity"), known, diverged, tuple(folders))


def rewards_table(
    rewards: Mapping[str, Sequence[float] | np.ndarray],
    diverged: Mapping[str, Sequence[int]],
    first: str = "policy",
) -> str:
    """A text table of final running average rewards [seeds], a line per member.

    Mean, standard error, standard deviation, lowest and highest over seeds, and how many diverged.

    Examples:
        >>> print(rewards_table({"greedy": [0.25, 0.75]}, {"greedy": ()}))
        policy    mean  ± s.e.     std  lowest  highest  seeds
        greedy  0.5000  0.2500  0.3536  0.2500   0.7500      2
    """
    lines = [[first, "mean", "± s.e.", "std", "lowest", "highest", "seeds", ""]]
    for label, every in rewards.items():
        final = np.array([*every]) if len(every) else np.array([np.nan])
        spread = final.std(ddof=1) if len(final) > 1 else np.nan
        figures = (final.mean(), standard_error(final), spread, final.min(), final.max())
        cells = [f"{value:.4f}" if np.isfinite(value) else "-" for value in figures]
        lost = f"diverged: {len(diverged[label])}" if diverged[label] else ""
        lines.append([label, *cells, str(len(every)), lost])
    return text_table(lines)


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
        >>> results.summary().rows[0]["configuration"] in ["so-scratch-greedy", "so-scratch-softmax"]
        True
        >>> [run.name for run in results.runs[4:]]
        ['so-scratch-softmax,policy.beta=0.5/seed-0', 'so-scratch-softmax,policy.beta=0.5/seed-1']
        >>> len(results.differences().outcomes)
        3
    """
    members = members_of(configurations, set)
    runner = LocalRunner(workers, to_stderr() if progress else SILENT)
    return run_comparison(members, seeds, Path(out), runner, labels_of(members, configurations))


def run_comparison(
    members: Mapping[str, Config],
    seeds: int | Sequence[int],
    out: Path,
    runner: Runner,
    labels: Mapping[str, str],
    say: Say = quiet,
) -> Results:
    """Run what is missing, and read all of it; `labels` has what each member is called."""
    seeds = seeds_of(seeds)
    if hint := no_model_acts({labels[name]: config for name, config in members.items()}):
        say(hint)
    run_members(members, seeds, out.joinpath, runner=runner, say=say)
    return read_members(labels, seeds, out)


def read_members(
    labels: Mapping[str, str | None], seeds: Sequence[int], out: Path, name: str = ""
) -> Results:
    """The results of members whose seeds lie in `out/MEMBER/seed-N`, by what each is called.

    A member without a label is called by what sets it apart. `name` is what messages call `out`.
    """
    places = {f"{member}/seed-{seed}": member for member in labels for seed in seeds}
    found = Results.read([(out / place, place) for place in places], name or str(out))
    named = {place: labels[member] for place, member in places.items()}
    return found.labelled({place: label for place, label in named.items() if label is not None})


def labels_of(members: Mapping[str, Config], given: Given) -> dict[str, str]:
    """Labels of the members by folder: a name of the user's, or the words that were typed.

    Examples:
        >>> given = ["so-init-greedy", "so-init-softmax policy.beta=0.5"]
        >>> labels_of(members_of(given), given)["so-init-softmax,policy.beta=0.5"]
        'so-init-softmax policy.beta=0.5'
    """
    names = list(given) if isinstance(given, Mapping) else [_typed(one) for one in given]
    return {folder: name or folder for folder, name in zip(members, names, strict=True)}


def _typed(one: str | Config) -> str:
    """A configuration as the user wrote it, a file by its name alone; empty for a `Config`."""
    if isinstance(one, Config):
        return ""
    what, *settings = one.split()
    return " ".join([Path(what).stem if what.endswith(".toml") else what, *settings])


def members_of(given: Given, changes: Mapping[str, Any] | None = None) -> dict[str, Config]:
    """The configurations by the names of their folders, `changes` made to each.

    Names are those of a dictionary, or what the user wrote: `so-scratch-softmax,policy.beta=0.5`.
    Two configurations that differ in nothing are refused, since their comparison would mean
    nothing.

    Examples:
        >>> list(members_of(["so-init-greedy", "so-init-softmax policy.beta=0.5"], {"rounds": 20}))
        ['so-init-greedy', 'so-init-softmax,policy.beta=0.5']
    """
    pairs = list(given.items()) if isinstance(given, Mapping) else [(None, one) for one in given]
    refuse((not pairs, "compare: name at least one configuration"))
    found: dict[str, Config] = {}
    for name, one in pairs:
        config = one if isinstance(one, Config) else described(one)
        own = one.policy.name if isinstance(one, Config) else ",".join(_typed(one).split())
        called = folder_name(name or own)
        if isinstance(one, Config) and name is None and called in found:
            called = f"{called}-{len(found) + 1}"
        refuse((called in found, f"compare: two configurations are called {called}"))
        found[called] = config.with_values(flatten(changes or {}))
    identities = {name: {**config.identity(), "seed": None} for name, config in found.items()}
    for position, (name, identity) in enumerate(identities.items()):
        for other in list(identities)[:position]:
            if identities[other] == identity:
                raise ConfigError(f"compare: {other} and {name} are the same configuration")
    return found


def check_comparison(
    given: Given, changes: Mapping[str, Any] | None, against: str | None
) -> tuple[dict[str, Config], dict[str, str]]:
    """The members of a comparison and what each is called, by folder.

    A comparison of one, or with one that is not there, is refused here, before the first round.
    """
    members = members_of(given, changes)
    labels = labels_of(members, given)
    known = list(labels.values())
    near = nearest(against or "", known)
    refuse(
        (len(known) < 2, "compare: name at least two configurations"),
        (
            against is not None and against not in known,
            f"--against: no configuration is called {against!r}{near}",
        ),
    )
    return members, labels


def seeds_of(seeds: int | Sequence[int]) -> list[int]:
    """The seeds, given as they are or as their number.

    Examples:
        >>> seeds_of(3), seeds_of([7, 8, 7])
        ([0, 1, 2], [7, 8])
    """
    every = list(range(seeds)) if isinstance(seeds, int) else list(dict.fromkeys(seeds))
    refuse(
        (
            not every or any(seed < 0 for seed in every),
            f"seeds: expected {counted(1, 'seed')} or more, not {seeds!r}",
        )
    )
    return every


def described(text: str) -> Config:
    """A preset or file by its name, with the changes that stand behind it.

    Examples:
        >>> described("so-scratch-softmax policy.beta=0.5").policy.parameters
        {'beta': 0.5}
    """
    refuse((not text.split(), "compare: a configuration is empty"))
    what, *settings = text.split()
    return load(what).with_values(parse_settings(settings))


def folder_name(name: str) -> str:
    """A name as a folder's: no part of it may lead elsewhere.

    Examples:
        >>> folder_name("softmax, importance weights"), folder_name("../elsewhere")
        ('softmax,-importance-weights', '..-elsewhere')
    """
    cleaned = "".join(
        "-" if character in "/\\:*?\"'<>|" or character.isspace() else character
        for character in name
    )
    refuse((cleaned.strip(".") == "", f"compare: {name!r} cannot be the name of a folder"))
    return cleaned
