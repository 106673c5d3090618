"""A picture of an image data set: some clients in rows, some classes in columns, so that a person can look at it."""

from pathlib import Path

import numpy as np

from fedbandit.data.dataset import FederatedDataset
from fedbandit.errors import ConfigError, DataError


def is_image(dataset: FederatedDataset) -> bool:
    """Whether contexts are grey or coloured pictures: [height, width] or [height, width, 3]."""
    shape = dataset.header.shape
    return dataset.header.kind == "dense" and (len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3)))


def picture_name(dataset: FederatedDataset, wanted: Path | None) -> Path | None:
    """Where the contact sheet goes, unless told otherwise by the data set's name; None for what has no images."""
    if not is_image(dataset):
        if wanted is not None:
            shape = " x ".join(str(side) for side in dataset.header.shape)
            raise ConfigError(f"picture: {dataset.header.name} has no images: its contexts are of shape {shape}")
        return None
    if wanted is None:
        return Path(f"{dataset.header.name}-contact-sheet.png")
    if not wanted.suffix:
        return wanted.with_name(f"{wanted.name}.png")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if wanted.suffix[1:].lower() not in formats:
        raise ConfigError(f"picture: {wanted}: no such format; use one of {', '.join(sorted(formats))}")
    return wanted


def write_contact_sheet(dataset: FederatedDataset, path: Path, *, clients: int = 10, classes: int = 16) -> Path:
    """Draw one image for each of some clients and classes; an empty place means that the client has none."""
    from matplotlib.figure import Figure  # the object-oriented way: no global state, no display

    header, split = dataset.header, dataset.train
    busiest = np.argsort(-split.sizes(), kind="stable")
    # Spread from the busiest to the median client: the rest have too few images to fill a row.
    rows = busiest[np.linspace(0, len(busiest) // 2, min(clients, len(busiest)), dtype=int)]
    columns = np.unique(np.linspace(0, header.num_actions - 1, min(classes, header.num_actions), dtype=int))
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
                axis.set_ylabel(split.client_id(client), rotation=0, ha="right", va="center", fontsize=7)
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
