"""`fedbandit compare` and `fedbandit.compare`: a few configurations side by side, over the same seeds.

Each run lies in a folder named after what the user called its configuration, so that a person finds it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbandit.config import Config, parse_settings
from fedbandit.core.errors import ConfigError
from fedbandit.core.parts import counted, flatten
from fedbandit.core.progress import SILENT, to_stderr
from fedbandit.presets import load
from fedbandit.results import Results
from fedbandit.runs.local_runner import LocalRunner, Runner
from fedbandit.studies.curves import OnRunEnd, nobody, run_members

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
    """Run several configurations with the same seeds into `out`, and return the `Results` of all of them.

    A configuration is a preset's name, a TOML file, or either with changes behind it (`"so-scratch-softmax
    policy.beta=0.5"`), or a `Config`; in a dictionary each has a name of your own. `set` has changes to all of them.
    `Results.differences()` tells which can be told apart. Finished runs are not repeated: an interrupted comparison is
    resumed, further configurations and seeds are added, and with more rounds all of them are extended.

    With `workers` above 1, or None for one per core, runs are processes of their own; a script that asks for it needs
    an `if __name__ == "__main__":` around its work.

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
    """The configurations by the names of their folders; two that are the same are refused."""
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
