"""Several configurations over several seeds: run what is missing, then a table and curves of what came out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedbandit.config import Config
from fedbandit.data import open_dataset
from fedbandit.engines import ThreadEngine
from fedbandit.errors import FedbanditError
from fedbandit.experiments.folder import read_metrics
from fedbandit.experiments.run import run


class Interrupted(FedbanditError):
    """A member was stopped before its last round; the same call goes on from there."""

    exit_code = 130


@dataclass(frozen=True)
class Curves:
    """What the seeds of one member did: [seeds, rounds]."""

    running_reward: np.ndarray
    propensity: np.ndarray

    @property
    def final(self) -> np.ndarray:
        """The final running average reward of each seed."""
        return self.running_reward[:, -1]


def compare(
    members: Mapping[str, Config],
    seeds: Sequence[int],
    out: Path,
    on_member: Callable[[str, int], None] = lambda label, seed: None,
) -> dict[str, Curves]:
    """Run every member with every seed into `out/label/seed-n`; finished runs are not run again."""
    datasets = {config.data.source: open_dataset(config.data.source) for config in members.values()}
    engine = ThreadEngine()
    try:
        for label, config in members.items():
            for seed in seeds:
                on_member(label, seed)
                folder = member_folder(out, label, seed)
                seeded = config.with_values({"seed": seed})
                outcome = run(seeded, folder, dataset=datasets[config.data.source], engine=engine)
                if outcome.summary is None:
                    raise Interrupted(
                        f"stopped {label}, seed {seed}, after round {outcome.rounds}; run it again to go on"
                    )
    finally:
        engine.close()
    return {label: read_curves([member_folder(out, label, seed) for seed in seeds]) for label in members}


def member_folder(out: Path, label: str, seed: int) -> Path:
    """Where a member's run with a seed lies."""
    return out / label / f"seed-{seed}"


def read_curves(folders: Sequence[Path]) -> Curves:
    """The curves of finished runs of one length."""
    runs = [read_metrics(folder) for folder in folders]

    def array(key: str) -> np.ndarray:
        return np.array([[line[key] for line in lines] for lines in runs], float)

    return Curves(array("running_reward"), array("propensity"))


def table(curves: Mapping[str, Curves]) -> str:
    """Final running average reward of each member: mean, standard deviation over seeds, lowest and highest."""
    width = max(len("policy"), *map(len, curves))
    lines = [f"{'policy':<{width}}  {'mean':>7}  {'± std':>7}  {'lowest':>7}  {'highest':>7}  seeds"]
    for label, member in curves.items():
        final = member.final
        spread = final.std(ddof=1) if len(final) > 1 else float("nan")
        figures = "  ".join(f"{value:7.4f}" for value in (final.mean(), spread, final.min(), final.max()))
        lines.append(f"{label:<{width}}  {figures}  {len(final):5d}")
    return "\n".join(lines)
