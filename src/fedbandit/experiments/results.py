"""The table of a sweep. Its columns are the configurations' own keys; nobody writes them by hand."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbandit.experiments.comparison import standard_error
from fedbandit.experiments.flat import flatten, in_short
from fedbandit.experiments.folder import beside_reward
from fedbandit.experiments.sweeps import Result, member_folder
from fedbandit.files import read_json


def rows_of(results: Sequence[Result], seeds: Sequence[int], out: Path) -> list[dict[str, Any]]:
    """One row per member and seed: its place, what came out, and the whole configuration."""
    rows = []
    for result in results:
        for place, standing in enumerate(result.standings, start=1):
            for seed, reward, status in zip(seeds, standing.rewards, standing.statuses, strict=True):
                folder = member_folder(out, standing.candidate.name, seed)
                rows.append(
                    {
                        "start": result.group.start,
                        "place": place,
                        "status": "stopped early" if status == "paused" else status,
                        "rounds_played": standing.rounds,
                        "running_reward": None if math.isnan(reward) else reward,
                        **beside_reward(read_json(folder / "summary.json")),
                        **flatten(standing.candidate.config.with_values({"seed": seed}).model_dump()),
                        "folder": str(folder.relative_to(out)),
                    }
                )
    return rows


def write_table(rows: Sequence[Mapping[str, Any]], path: Path) -> list[Path]:
    """The rows as Parquet and as CSV beside it; a column is there if any row has it."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: _column([row.get(name) for row in rows]) for name in names}
    table = pa.table(columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    targets = [path.with_suffix(".parquet"), path.with_suffix(".csv")]
    parquet.write_table(table, targets[0])
    csv.write_csv(table, targets[1])
    return targets


def summary_text(results: Sequence[Result], top: int = 5) -> str:
    """The best members of each group with what sets them apart, and a warning where a winner lies on an edge."""
    lines = []
    for result in results:
        lines.append(f"{result.group.start}: {len(result.standings)} members")
        for standing in result.standings[:top]:
            point = "  ".join(f"{key}={in_short(value)}" for key, value in standing.candidate.point.items())
            rewards = np.array(standing.rewards)
            outcome = "diverged"
            if standing.score > -math.inf:
                error = f" ± {standard_error(rewards):.4f}" if len(rewards) > 1 else ""
                outcome = f"{standing.score:.4f}{error}"
            lines.append(f"  {outcome}  after {standing.rounds} rounds  {point}")
        if result.edges:
            axes = ", ".join(result.edges)
            lines.append(f"  warning: the winner lies on the edge of the grid ({axes}); a better one may lie beyond it")
    return "\n".join(lines)


def _column(values: list[Any]) -> Any:
    """An Arrow array; whole numbers among fractions become fractions, mixed kinds text."""
    import pyarrow as pa

    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        return pa.array([None if value is None else float(value) for value in values])
    if len(kinds) > 1 or kinds & {list, tuple, dict}:
        return pa.array([None if value is None else json.dumps(value) for value in values])
    return pa.array(values) if kinds else pa.nulls(len(values), pa.string())
