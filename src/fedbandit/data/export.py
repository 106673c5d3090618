"""Logged data sets in the layouts of others: Vowpal Wabbit's DSJSON, and the Open Bandit Dataset's
CSV files.
"""

import csv
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedbandit.core.contexts import Features, rows_between
from fedbandit.core.errors import DataError, refuse
from fedbandit.core.progress import SILENT, ProgressReporter
from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import FederatedDataset, Log, Split

_ROWS = 4096
_MOST_COLUMNS = 1000


def export_dsjson(
    dataset: FederatedDataset,
    out: Path | str,
    split: str = "train",
    progress: ProgressReporter = SILENT,
) -> Path:
    """Write a split of logged decisions as DSJSON, one a line, and return the path.

    Features are those that models see, by name, and zeros are left out; of a catalogue's items, as
    of contexts. `fedbandit data import dsjson` reads the file back to the same decisions. A data
    set keeps the propensity of the action taken; the others share the rest equally in `p`.
    """
    out, (part, log) = Path(out), _logged(dataset, split)
    features = _feature_names(dataset)
    names = [name.removeprefix("context.") for name in features]
    describe = _described(dataset)
    with _writing(out) as file:
        for at, row, client in _rows(part, names, progress):
            event = _event(part, log, at, row, client, describe, dataset.header.num_actions)
            file.write(json.dumps(event, ensure_ascii=False) + "\n")
    return out


def _described(dataset: FederatedDataset) -> Callable[[int], dict[str, Any]]:
    """A function that gives an action as DSJSON has it: its id and, of an item, its features."""
    actions, catalogue = dataset.header.actions, dataset.train.catalogue
    if catalogue is None:
        return lambda action: {"action": {"id": actions[action]}}
    features, encoder = catalogue.features, dataset.header.item_encoder
    if encoder is not None:
        names = encoder.features(dataset.item_vocabulary())
    else:
        assert dataset.header.items is not None
        names = [f"x{place}" for place in range(int(np.prod(dataset.header.items.shape)))]
    names = [name.removeprefix("features.") for name in names]

    @cache
    def item(row: int) -> dict[str, Any]:
        called = catalogue.name(int(catalogue.item_of(np.array([row]))[0]))
        return {
            "item": {"id": called},
            "features": _named(rows_between(features, row, row + 1), names),
        }

    return item


def _named(row: Features, names: list[str]) -> dict[str, float]:
    """The features of one row that are not zero, by name in alphabetical order."""
    if isinstance(row, Ragged):
        assert row.values is not None
        ids, values = row.ids, row.values
    else:
        flat = row.reshape(-1)
        ids = np.flatnonzero(flat)
        values = flat[ids]
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return dict(sorted((names[place], float(value)) for place, value in pairs))


def _event(
    part: Split,
    log: Log,
    at: int,
    features: dict[str, float],
    client: str,
    describe: Callable[[int], dict[str, Any]],
    actions: int,
) -> dict[str, Any]:
    """One decision as DSJSON has it: cost, probability, actions by rank, context and candidates.

    Actions are counted from 1, in the order of `_multi`; the one that was taken leads the ranking.
    """
    lists = part.candidates
    if lists is not None:
        could, chosen = lists.slice(at, at + 1).ids.tolist(), int(log.actions[at])
    else:
        everything = list(range(actions))
        could = (
            everything if log.available is None else log.available.slice(at, at + 1).ids.tolist()
        )
        chosen = could.index(int(log.actions[at]))
    probability = float(log.propensities[at])
    ranked = [chosen, *(place for place in range(len(could)) if place != chosen)]
    rest = (1 - probability) / max(len(could) - 1, 1)
    return {
        "_label_cost": 0.0 - float(log.rewards[at]),
        "_label_probability": probability,
        "_label_Action": chosen + 1,
        "_labelIndex": chosen,
        "Version": "1",
        "fedbandit": 1,
        "EventId": f"{client}/{at}",
        "a": [place + 1 for place in ranked],
        "p": [probability, *[rest] * (len(could) - 1)],
        "c": {
            "client": {"id": client},
            "context": features,
            "_multi": [describe(action) for action in could],
        },
    }


def export_open_bandit(
    dataset: FederatedDataset,
    out: Path | str,
    split: str = "train",
    progress: ProgressReporter = SILENT,
) -> Path:
    """Write a split of logged decisions as a folder in the layout of the Open Bandit Dataset.

    It has a column for each feature of a context, at most 1,000, and one more for the client.
    `timestamp` counts the rows, since a data set keeps no time. Sets of available actions have no
    place in that layout and are refused.
    """
    out, (part, log) = Path(out), _logged(dataset, split)
    if part.candidates is not None or log.available is not None:
        raise DataError(
            f"{dataset.header.name}: Open Bandit's layout has no sets of available actions; use dsjson"
        )
    features = _feature_names(dataset)
    many = f"{len(features):,} features; as columns {_MOST_COLUMNS:,} are the most"
    refuse(
        (len(features) > _MOST_COLUMNS, f"{dataset.header.name}: {many}"),
        (out.exists(), f"{out}: already exists; nothing was overwritten"),
        error=DataError,
    )
    out.mkdir(parents=True)
    columns = [f"user_feature_{place}" for place in range(len(features))]
    with _writing(out / f"{split}.csv") as file:
        table = csv.writer(file)
        table.writerow(
            [
                "",
                "timestamp",
                "item_id",
                "position",
                "click",
                "propensity_score",
                *columns,
                "client",
            ]
        )
        for at, row, client in _rows(part, features, progress):
            facts = [
                at,
                at,
                int(log.actions[at]),
                1,
                float(log.rewards[at]),
                repr(float(log.propensities[at])),
            ]
            table.writerow([*facts, *(row.get(name, 0.0) for name in features), client])
    with _writing(out / "item_context.csv") as file:
        table = csv.writer(file)
        table.writerow(["item_id", "item_name"])
        table.writerows(enumerate(dataset.header.actions))
    return out


def _logged(dataset: FederatedDataset, split: str) -> tuple[Split, Log]:
    """The split of this name, and its log; `DataError` where it has none."""
    part = dataset.splits.get(split)
    if part is None:
        raise DataError(f"{dataset.header.name}: has no split {split!r}")
    if part.log is None:
        raise DataError(
            f"{dataset.header.name}: holds labels, not logged decisions; there is nothing to export"
        )
    return part, part.log


def _feature_names(dataset: FederatedDataset) -> list[str]:
    """A name for every feature: of the encoder, the words, or `x0`, `x1`, … where none is known."""
    header = dataset.header
    if header.encoder is not None:
        return header.encoder.features(dataset.vocabulary() if header.encoder.words else ())
    if header.kind == "sparse":
        return dataset.vocabulary()
    return [f"x{place}" for place in range(int(np.prod(header.shape)))]


def _rows(
    part: Split, names: list[str], progress: ProgressReporter
) -> Iterator[tuple[int, dict[str, float], str]]:
    """Each row's number, its features that are not zero, and its client."""
    owners = np.repeat(np.arange(part.num_clients), part.sizes())
    with progress.task("Writing decisions", part.num_examples) as advance:
        for start in range(0, part.num_examples, _ROWS):
            rows = np.arange(start, min(start + _ROWS, part.num_examples))
            contexts = part.shared(rows)
            for place, at in enumerate(rows.tolist()):
                found = _named(rows_between(contexts, place, place + 1), names)
                yield at, found, part.client_id(int(owners[at]))
            advance(len(rows))


@contextmanager
def _writing(path: Path) -> Iterator[IO[str]]:
    """A new text file that appears only when it is complete."""
    if path.exists():
        raise DataError(f"{path}: already exists; nothing was overwritten")
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "w", encoding="utf-8", newline="") as file:
            yield file
        os.replace(partial, path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; nothing was written") from None
    finally:
        partial.unlink(missing_ok=True)
