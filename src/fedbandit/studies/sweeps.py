"""Sweeps: any product of configuration values over seeds, run and ranked. `fedbandit sweep
SPEC.toml`.

A member's folder is named after its configuration, so that a sweep can be interrupted, resumed or
extended.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError, field_validator

from fedbandit.assembly.experiment import build_experiment
from fedbandit.config import Config, read_toml
from fedbandit.core.errors import ConfigError, refuse
from fedbandit.core.files import read_json, write_text
from fedbandit.core.identity import owners
from fedbandit.core.parts import counted, flatten, in_short, nearest
from fedbandit.core.progress import SILENT, to_stderr
from fedbandit.data import open_dataset
from fedbandit.presets import load
from fedbandit.results import Results
from fedbandit.results.differences import standard_error
from fedbandit.runs.folder import beside_reward
from fedbandit.runs.local_runner import HERE, Ended, Job, LocalRunner, Runner, nobody
from fedbandit.runs.reporting import no_model_acts
from fedbandit.studies.compare import read_members
from fedbandit.studies.search import (
    SPENDS_PRIVACY,
    SearchCandidate,
    Standing,
    appendix,
    on_edge,
    points,
    race,
    rungs,
    values_of,
)


class Halving(BaseModel):
    """Early stopping: after `shortest` rounds the best `1/factor` continue, then again, up to the
    last round.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    factor: Annotated[int, Field(ge=2)] = 3
    shortest: Annotated[int, Field(ge=1)] | None = None


class SweepSpec(BaseModel):
    """The contents of a sweep's TOML file, checked."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    # presets or TOML files to vary; from Python also configurations
    start: Annotated[list[str | InstanceOf[Config]], Field(min_length=1)] | str | InstanceOf[Config]
    # the seeds, or how many
    seeds: (
        Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
        | Annotated[int, Field(ge=1)]
    ) = 1
    appendix: str | None = None  # "emnist" or "so": the paper's grid for each start
    set: dict[str, Any] = {}  # changes to every member
    grid: dict[str, Any] = {}  # dotted key -> values; overrides the appendix's
    halving: Halving | None = None

    @field_validator("seeds", "start")
    @classmethod
    def _each_once(cls, given: Any) -> Any:
        """Refuse a seed or a start that is named twice: it would be counted twice."""
        if isinstance(given, list) and any(one in given[:i] for i, one in enumerate(given)):
            raise ValueError("names one twice")
        return given

    @property
    def starts(self) -> dict[str, Config]:
        """The configurations that are varied, by name: a configuration has that of its policy."""
        found: dict[str, Config] = {}
        for number, one in enumerate(
            self.start if isinstance(self.start, list) else [self.start], start=1
        ):
            if isinstance(one, str):
                found[one] = load(one)
            else:
                found[
                    f"{one.policy.name}-{number}" if one.policy.name in found else one.policy.name
                ] = one
        return found

    @property
    def all_seeds(self) -> list[int]:
        """The seeds, given as a list or as their number."""
        return list(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds


@dataclass(frozen=True)
class SweepGroup:
    """The members that vary one start, the grid they cover, and once they were run, their standings,
    best first.
    """

    start: str
    grid: dict[str, list[Any]]
    members: list[SearchCandidate]
    rounds: int  # of the longest; a privacy budget may end one before its configured last round
    standings: Sequence[Standing] = ()

    @property
    def winner(self) -> Standing:
        """The member that came furthest with the highest reward."""
        return self.standings[0]

    @property
    def tied(self) -> int:
        """The number of members that earned exactly as much as the first, itself included."""
        best = self.winner
        return sum(s.score == best.score and s.step == best.step for s in self.standings)

    @property
    def why_no_winner(self) -> str:
        """The reason in a few words; empty where one member is ahead."""
        if self.winner.score == -math.inf:
            return "every member diverged"
        return f"{self.tied} members earned exactly the same" if self.tied > 1 else ""

    @property
    def edges(self) -> list[str]:
        """The axes on whose edge the winner lies."""
        return (
            on_edge(self.winner.candidate.point, self.grid) if self.winner.score > -math.inf else []
        )


def read_sweep(path: Path) -> SweepSpec:
    """Read and check a sweep's TOML file; a wrong value is refused with its key."""
    return spec_of(SweepSpec, read_toml(path), f"{path}: ")


Spec = TypeVar("Spec", bound=BaseModel)


def spec_of(kind: type[Spec], values: Mapping[str, Any], where: str = "") -> Spec:
    """Check what a study is asked for; a wrong value is refused with its key."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = first["loc"][0]
        if first["type"] == "extra_forbidden":
            raise ConfigError(
                f"{where}{key}: unknown key{nearest(str(key), kind.model_fields)}"
            ) from None
        # one reason for each kind of value that it may be
        reasons = [one["msg"].lower() for one in error.errors() if one["loc"][0] == key]
        raise ConfigError(f"{where}{key}: {', or '.join(dict.fromkeys(reasons))}") from None


def groups_of(spec: SweepSpec) -> list[SweepGroup]:
    """All members of the sweep, each built and checked against its data before anything runs."""
    groups = []
    open_once = lru_cache(maxsize=None)(open_dataset)
    for start, given in spec.starts.items():
        config = given.with_values(flatten(spec.set))
        grid = appendix(spec.appendix, config) if spec.appendix is not None else {}
        grid |= {
            key: values_of(f"grid.{key}", values) for key, values in flatten(spec.grid).items()
        }
        members = [_member(start, config, point) for point in points(grid)]
        refuse(
            (
                len({member.name for member in members}) < len(members),
                f"grid: two points of {start} make the same configuration",
            )
        )
        # One at a time: an experiment holds weights.
        rounds = max(
            build_experiment(member.config, open_once(member.config.data.source)).rounds
            for member in members
        )
        groups.append(SweepGroup(start, grid, members, rounds))
    return groups


def sweep(
    spec: Mapping[str, Any] | Path | str,
    out: Path | str,
    *,
    workers: int | None = 1,
    progress: bool = False,
) -> Results:
    """Run every combination of some values with every seed into `out`, and return the `Results` of
    all of them.

    `spec` is a dictionary or a TOML file: `start` names presets or TOML files, or is a `Config` (or
    a list of these); `grid` has a list of values for every key that varies; `set` has changes to
    all; `seeds` is a number of seeds or a list; `halving = {"factor": 3}` stops the worse ones
    early. The best configuration is kept in `out/winner.toml`. Runs that are finished are not
    repeated, so a grid can be extended and an interrupted sweep resumed.

    With `workers` above 1, or None for one per core, runs are separate processes. That is faster
    for many small runs, but a script that asks for it needs an `if __name__ == "__main__":` around
    its work.

    Examples:
        >>> import tempfile
        >>> from fedbandit import preset
        >>> start = preset("so-scratch-softmax").with_values({"rounds": 2, "clients_per_round": 4})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     spec = {"start": start, "grid": {"policy.beta": [0.05, 0.5]}, "seeds": 2}
        ...     results = sweep(spec, folder)
        >>> results
        <Results: 4 runs of 2 configurations (softmax beta=0.05, softmax beta=0.5), 2 rounds>
        >>> results.to_pandas().columns[:5].to_list()
        ['run', 'configuration', 'seed', 'policy.beta', 'round']
    """
    wanted = spec_of(SweepSpec, spec) if isinstance(spec, Mapping) else read_sweep(Path(spec))
    out = Path(out)
    runner = LocalRunner(workers, to_stderr() if progress else SILENT)
    ranked = run_sweep(wanted, out, runner=runner, say=print if progress else lambda text: None)
    names = [standing.candidate.name for result in ranked for standing in result.standings]
    return read_members(dict.fromkeys(names), wanted.all_seeds, out / "runs", str(out))


def run_sweep(
    spec: SweepSpec,
    out: Path,
    *,
    runner: Runner = HERE,
    say: Callable[[str], None] = print,
    keep: bool = True,
) -> list[SweepGroup]:
    """Run the sweep into `out` and rank each group; called again, it resumes where it stopped.

    All members are built and checked against their data before anything runs. The best member over
    all groups is written to `winner.toml`; there is none where every member diverged, or where
    several earned exactly the same. Without `keep` finished runs lose their checkpoints: with more
    rounds they would start again.
    """
    groups = groups_of(spec)
    if hint := no_model_acts({m.name: m.config for group in groups for m in group.members}):
        say(hint)
    if any(
        member.config.privacy.mechanism != "none" for group in groups for member in group.members
    ):
        say(SPENDS_PRIVACY)
    results = []
    for group in groups:
        size = f"{counted(len(group.members), 'member')} x {counted(len(spec.all_seeds), 'seed')}"
        say(f"{group.start}: {size}, up to {counted(group.rounds, 'round')}")
        standings = race(
            group.members,
            spec.all_seeds,
            lambda member, seed: member_folder(out, member.name, seed),
            _steps(group, spec.halving),
            spec.halving.factor if spec.halving else 2,
            runner=runner,
            say=lambda text: say(f"  {text}"),
            on_end=nobody if keep else _forget,
        )
        results.append(replace(group, standings=standings))
    best = max(results, key=lambda result: result.winner.score)
    (out / "winner.toml").unlink(missing_ok=True)  # of an earlier, smaller sweep
    if not best.why_no_winner:
        write_text(out / "winner.toml", best.winner.candidate.config.to_toml())
    return results


def _forget(job: Job, ended: Ended) -> None:
    """A finished run loses its checkpoints as it ends, so that many fit a disk."""
    if ended.status == "finished":
        shutil.rmtree(job.folder / "checkpoints", ignore_errors=True)


_SHOWN = 12  # members that pictures and the report of a sweep show


def best_results(results: Sequence[SweepGroup], seeds: Sequence[int], out: Path) -> Results | None:
    """The runs of the best members that came furthest, named by their points; None for less than
    two members.
    """
    start_of = {s.candidate.name: one.start for one in results for s in one.standings}
    every = (s for result in results for s in result.standings if s.score > -math.inf)
    shown = sorted(every, key=lambda s: (-s.step, -s.score))[:_SHOWN]
    labels = {}
    for name, point in ((s.candidate.name, s.candidate.point) for s in shown):
        start = [Path(start_of[name]).stem] if len(results) > 1 else []
        words = [*start, *(f"{key}={in_short(value)}" for key, value in point.items())]
        labels[name] = " ".join(words) or start_of[name]
    return read_members(labels, seeds, out / "runs", str(out)) if len(shown) > 1 else None


def member_folder(out: Path, name: str, seed: int) -> Path:
    """Where a member's run with a seed lies."""
    return out / "runs" / name / f"seed-{seed}"


def _steps(group: SweepGroup, halving: Halving | None) -> list[int]:
    """The rounds after which the group's members are compared.

    Without halving that is once, at the end; with it never before two deployments, since until the
    first nothing acts on what was learned.
    """
    if halving is None:
        return [group.rounds]
    period = max(member.config.deploy_every for member in group.members)
    shortest = halving.shortest or max(2 * period, group.rounds // 9)
    return rungs(group.rounds, halving.factor, min(shortest, group.rounds))


def name_of(start: str, config: Config) -> str:
    """A folder's name for the runs of a configuration, the same whatever their seed.

    It ends with a digest of everything that is set, so that a grid may be extended: members that
    were there keep their folders.
    """
    identity = {**config.identity(), "seed": None}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:10]
    return f"{Path(start).stem}-{digest}"


def _member(start: str, config: Config, point: dict[str, Any]) -> SearchCandidate:
    """One member: the start with a point's values, named after the result."""
    changed = config.with_values(point)
    # Sections that are the same are shared: thousands of members fit into memory.
    same = {key: value for key, value in config if getattr(changed, key) == value}
    return SearchCandidate(name_of(start, changed), changed.model_copy(update=same), point)


def rows_of(results: Sequence[SweepGroup], seeds: Sequence[int], out: Path) -> list[dict[str, Any]]:
    """One row per member and seed: its place, its reward and held-out metrics, the whole
    configuration.
    """
    rows = []
    for result in results:
        for place, standing in enumerate(result.standings, start=1):
            for seed, reward, status in zip(
                seeds, standing.rewards, standing.statuses, strict=True
            ):
                folder = member_folder(out, standing.candidate.name, seed)
                rows.append(
                    {
                        "start": result.start,
                        "place": place,
                        "status": "stopped early" if status == "paused" else status,
                        "rounds_run": standing.rounds,
                        "running_reward": None if math.isnan(reward) else reward,
                        **beside_reward(read_json(owners(folder / "summary.json"))),
                        **flatten(
                            standing.candidate.config.with_values({"seed": seed}).model_dump()
                        ),
                        "folder": str(folder.relative_to(out)),
                    }
                )
    return rows


def summary_text(results: Sequence[SweepGroup], top: int = 5) -> str:
    """The best members of each group with what sets them apart, and a warning where a winner lies
    on an edge.
    """
    lines = []
    for result in results:
        lines.append(f"{result.start}: {counted(len(result.standings), 'member')}")
        for standing in result.standings[:top]:
            point = "  ".join(
                f"{key}={in_short(value)}" for key, value in standing.candidate.point.items()
            )
            rewards = np.array(standing.rewards)
            outcome = "diverged"
            if standing.score > -math.inf:
                error = f" ± {standard_error(rewards):.4f}" if len(rewards) > 1 else ""
                outcome = f"{standing.score:.4f}{error}"
            lines.append(
                f"  {outcome}  after {counted(standing.rounds, 'round')}  {point}".rstrip()
            )
        if result.edges:
            axes = ", ".join(result.edges)
            lines.append(
                f"  warning: the winner lies on the edge of the grid ({axes}); a better one may lie"
                " beyond it"
            )
    return "\n".join(lines)
