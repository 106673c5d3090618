"""Several configurations over several seeds: curves, paired differences, a table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedbandit.config import Config, read_toml
from fedbandit.core.errors import DataError, Interrupted
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
    """What the seeds of one member did: [seeds, rounds]. Seeds that diverged are left out of them and counted."""

    running_reward: np.ndarray
    propensity: np.ndarray
    seeds: tuple[int, ...]
    diverged: tuple[int, ...] = ()

    @property
    def final(self) -> np.ndarray:
        """The final running average reward of each seed."""
        return self.running_reward[
            :, -1:
        ].ravel()  # seeds that all diverged have not even a last round

    @property
    def final_by_seed(self) -> dict[int, float]:
        return dict(zip(self.seeds, self.final.tolist(), strict=True))


def run_members(
    members: Mapping[str, Config],
    seeds: Sequence[int],
    folders: Callable[[str, int], Path],
    *,
    runner: Runner = HERE,
    on_end: OnRunEnd = nobody,
) -> dict[str, Curves]:
    """Run every member with every seed into `folders(label, seed)`; finished runs are not run again."""
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


def standard_error(values: np.ndarray) -> float:
    """The standard error of the mean over seeds; NaN for a single one."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def with_error(text: str, error: float) -> str:
    """`text ± error`; the text alone where a single seed gives no error."""
    return f"{text} ± {error:.4f}" if np.isfinite(error) else text


def paired_difference(better: Curves, worse: Curves) -> tuple[float, float]:
    """Mean difference of the final rewards and its standard error, over the seeds that both have.

    A seed gives both the same clients and examples, so the difference varies less than either.
    """
    ours, theirs = better.final_by_seed, worse.final_by_seed
    differences = np.array([ours[seed] - theirs[seed] for seed in ours if seed in theirs])
    return (
        (float(differences.mean()), standard_error(differences))
        if len(differences)
        else (np.nan, np.nan)
    )


def table(curves: Mapping[str, Curves], first: str = "policy") -> str:
    """Final running average reward of each member: mean, standard error, standard deviation, lowest and highest."""
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
