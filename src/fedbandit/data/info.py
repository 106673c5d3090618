"""What is in a data set, in words: clients, examples, actions, and how unevenly examples spread over clients."""

from pathlib import Path

import numpy as np

from fedbandit.data.dataset import FederatedDataset, Split

_DROPPED = {
    "dropped_clients": "clients without examples",
    "dropped_rows_without_client": "rows without a client",
    "dropped_rows_without_label": "rows without a label",
}


def outcome(path: Path | str) -> str:
    """What an import made and left out, in a few lines."""
    dataset = FederatedDataset.open(path)
    lines = [f"{path}: {dataset.header.num_actions:,} actions, contexts of shape {_shape(dataset)}"]
    lines += [f"  {name}: {_size(split)}" for name, split in _splits(dataset)]
    left_out = _left_out(dataset)
    return "\n".join([*lines, f"  left out: {left_out}"] if left_out else lines)


def describe(dataset: FederatedDataset, top: int = 10) -> str:
    """The facts a user looks at before running anything on a data set."""
    header = dataset.header
    kind = "logged feedback" if header.logged else "several labels an example" if header.multilabel else "labels"
    lines = [f"{header.name}: {header.kind}, contexts of shape {_shape(dataset)}, {kind}"]
    for name, split in _splits(dataset):
        marks = np.quantile(split.sizes(), [0, 0.25, 0.5, 0.75, 1], method="nearest")
        lines.append(f"{name}: {_size(split)}")
        lines.append(f"  examples per client (min, quartiles, max): {' / '.join(f'{int(mark):,}' for mark in marks)}")
    counts = np.array(header.action_counts)
    order = np.argsort(-counts, kind="stable")[:top]
    shown = ", ".join(f"{header.actions[i]} {counts[i]:,}" for i in order)
    more = f" and {header.num_actions - len(order):,} more" if header.num_actions > len(order) else ""
    lines.append(f"actions: {header.num_actions:,}; most frequent in train: {shown}{more}")
    if header.lower_case:
        lines.append(f"case map: {len(header.lower_case)} upper-case actions know their lower-case version")
    if left_out := _left_out(dataset):
        lines.append(f"left out at import: {left_out}")
    return "\n".join(lines)


def _left_out(dataset: FederatedDataset) -> str:
    source = dataset.header.source
    return ", ".join(f"{source[key]:,} {what}" for key, what in _DROPPED.items() if key in source)


def _splits(dataset: FederatedDataset) -> list[tuple[str, Split]]:
    return [("train", dataset.train), *([("test", dataset.test)] if dataset.test is not None else [])]


def _size(split: Split) -> str:
    return f"{split.num_examples:,} examples of {split.num_clients:,} clients"


def _shape(dataset: FederatedDataset) -> str:
    return " x ".join(str(side) for side in dataset.header.shape)
