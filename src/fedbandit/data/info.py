"""What a data set holds, in words and in a picture."""

from pathlib import Path

import numpy as np

from fedbandit.core.errors import ConfigError, DataError
from fedbandit.data.dataset import FederatedDataset, Split

_DROPPED = {
    "dropped_clients": "clients without examples",
    "dropped_rows_without_client": "rows without a client",
    "dropped_rows_without_label": "rows without a label",
    "dropped_rows_of_other_labels": "rows whose labels are no action",
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
    kind = (
        "logged feedback"
        if header.logged
        else "several labels an example"
        if header.multilabel
        else "labels"
    )
    lines = [f"{header.name}: {header.kind}, contexts of shape {_shape(dataset)}, {kind}"]
    for name, split in _splits(dataset):
        marks = np.quantile(split.sizes(), [0, 0.25, 0.5, 0.75, 1], method="nearest")
        lines.append(f"{name}: {_size(split)}")
        lines.append(
            f"  examples per client (min, quartiles, max): {' / '.join(f'{int(mark):,}' for mark in marks)}"
        )
    counts = np.array(header.action_counts)
    order = np.argsort(-counts, kind="stable")[:top]
    shown = ", ".join(f"{header.actions[i]} {counts[i]:,}" for i in order)
    more = (
        f" and {header.num_actions - len(order):,} more" if header.num_actions > len(order) else ""
    )
    lines.append(f"actions: {header.num_actions:,}; most frequent in train: {shown}{more}")
    if header.encoder is not None:
        text, width = (
            header.encoder.text,
            max(len(column.name) for column in header.encoder.columns),
        )
        lines += [f"  words of {', '.join(text)}: {header.encoder.words:,}"] if text else []
        lines += [
            f"  {column.name:<{width}}  {column.describe()}" for column in header.encoder.columns
        ]
    if header.lower_case:
        lines.append(
            f"case map: {len(header.lower_case)} upper-case actions know their lower-case version"
        )
    if left_out := _left_out(dataset):
        lines.append(f"left out at import: {left_out}")
    return "\n".join(lines)


def verified(dataset: FederatedDataset) -> str:
    """What opening it with `verify=True` has found to be right."""
    size = sum(state.size for state in dataset.files.values()) / 1e6
    files = f"{len(dataset.files)} files, {size:,.1f} MB"
    return f"verified: {files}: checksums, types, shapes and ranges are right"


def _left_out(dataset: FederatedDataset) -> str:
    source = dataset.header.source
    return ", ".join(f"{source[key]:,} {what}" for key, what in _DROPPED.items() if key in source)


def _splits(dataset: FederatedDataset) -> list[tuple[str, Split]]:
    return [
        ("train", dataset.train),
        *([("test", dataset.test)] if dataset.test is not None else []),
    ]


def _size(split: Split) -> str:
    return f"{split.num_examples:,} examples of {split.num_clients:,} clients"


def _shape(dataset: FederatedDataset) -> str:
    return " x ".join(str(side) for side in dataset.header.shape)


def is_image(dataset: FederatedDataset) -> bool:
    """Whether contexts are grey or coloured pictures: [height, width] or [height, width, 3]."""
    shape = dataset.header.shape
    return dataset.header.kind == "dense" and (
        len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3))
    )


def picture_name(dataset: FederatedDataset, wanted: Path | None) -> Path | None:
    """Where the contact sheet goes, by default named after the data set; None without images."""
    if not is_image(dataset):
        if wanted is not None:
            shape = " x ".join(str(side) for side in dataset.header.shape)
            raise ConfigError(
                f"picture: {dataset.header.name} has no images: its contexts are of shape {shape}"
            )
        return None
    if wanted is None:
        return Path(f"{dataset.header.name}-contact-sheet.png")
    if not wanted.suffix:
        return wanted.with_name(f"{wanted.name}.png")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if wanted.suffix[1:].lower() not in formats:
        raise ConfigError(
            f"picture: {wanted}: no such format; use one of {', '.join(sorted(formats))}"
        )
    return wanted


def write_contact_sheet(
    dataset: FederatedDataset, path: Path, *, clients: int = 10, classes: int = 16
) -> Path:
    """Draw one image for each of some clients and classes; an empty place means that the client has none."""
    from matplotlib.figure import Figure  # the object-oriented way: no global state, no display

    header, split = dataset.header, dataset.train
    busiest = np.argsort(-split.sizes(), kind="stable")
    # Spread from the busiest to the median client: the rest have too few images to fill a row.
    rows = busiest[np.linspace(0, len(busiest) // 2, min(clients, len(busiest)), dtype=int)]
    columns = np.unique(
        np.linspace(0, header.num_actions - 1, min(classes, header.num_actions), dtype=int)
    )
    figure = Figure(figsize=(0.6 * len(columns) + 1.6, 0.6 * len(rows) + 0.9))
    axes = figure.subplots(len(rows), len(columns), squeeze=False)
    for y, client in enumerate(rows):
        examples = _first_of_each_class(dataset, int(client))
        for x, label in enumerate(columns):
            axis = axes[y, x]
            axis.set_xticks([])
            axis.set_yticks([])
            if int(label) in examples:
                image = np.asarray(split.contexts(np.array([examples[int(label)]])))[0]
                axis.imshow(np.squeeze(image), cmap="gray", vmin=0, vmax=1)
            else:
                axis.set_frame_on(False)
            if y == 0:
                axis.set_title(header.actions[label], fontsize=9)
            if x == 0:
                axis.set_ylabel(
                    split.client_id(client), rotation=0, ha="right", va="center", fontsize=7
                )
    figure.suptitle(f"{header.name}: {len(rows)} of {split.num_clients:,} clients", fontsize=10)
    try:
        figure.savefig(path, dpi=150, bbox_inches="tight")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    return path


def _first_of_each_class(dataset: FederatedDataset, client: int) -> dict[int, int]:
    """Label -> a row of the client that carries it."""
    split = dataset.train
    start, stop = int(split.offsets[client]), int(split.offsets[client + 1])
    labels = split.labels.slice(start, stop)
    found: dict[int, int] = {}
    for label, row in zip(labels.ids.tolist(), labels.row_of_entry().tolist(), strict=True):
        found.setdefault(label, start + row)
    return found
