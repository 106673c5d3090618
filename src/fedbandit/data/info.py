"""A data set in words, in a picture, and by its statistics: sizes, skew, how much clients differ."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fedbandit.core.errors import ConfigError, DataError, explaining, refuse
from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import FederatedDataset, Header, Split
from fedbandit.data.encoder import Encoder

_MIN_LABELS = 20  # clients with fewer labels say too little about their own distribution
_FEW_REWARDS = 30
_QUANTILES = (0, 5, 25, 50, 75, 95, 100)
_DROPPED = {
    "dropped_clients": "clients without examples",
    "dropped_rows_without_client": "rows without a client",
    "dropped_rows_without_label": "rows without a label",
    "dropped_rows_of_other_labels": "rows whose labels are no action",
    "dropped_rows_that_do_not_fit": "rows that do not fit the condition",
    "dropped_rows_of_unknown_items": "rows of items that are not in the catalogue",
    "dropped_rows_without_time": "rows without a time",
    "dropped_rows_without_candidates": "rows without candidates",
    "dropped_rows_with_one_candidate": "rows with one candidate",
    "dropped_rows_whose_label_is_no_candidate": "rows whose label is not among the candidates",
    "unknown_candidates": "candidates that are not in the catalogue",
}


def outcome(path: Path | str) -> str:
    """An import's result in a few lines: actions, shape, sizes of the splits, and what was left
    out.
    """
    dataset = FederatedDataset.open(path)
    actions, catalogue = f"{dataset.header.num_actions:,} actions", dataset.train.catalogue
    chosen = actions if catalogue is None else f"{len(catalogue):,} items to choose from"
    lines = [f"{path}: {chosen}, contexts of shape {_shape(dataset)}"]
    lines += [f"  {name}: {_size(split)}" for name, split in dataset.splits.items()]
    if left_out := _left_out(dataset):
        lines.append(f"  left out: {left_out}")
    return "\n".join([*lines, *_warnings(dataset)])


def _warnings(dataset: FederatedDataset) -> Iterator[str]:
    """Lines about what a user would regret to miss: most rows gone, too few rewards to judge by."""
    others = dataset.header.source.get("dropped_rows_of_other_labels", 0)
    kept = sum(split.num_examples for split in dataset.splits.values())
    if others > kept:
        rows = f"{others:,} of {others + kept:,} rows"
        yield f"  warning: {rows} have labels that are no action; --actions N keeps more of them"
    test = dataset.test
    if test is not None and test.log is not None:
        rewarded = int(np.count_nonzero(test.log.rewards))
        if rewarded < _FEW_REWARDS:
            yield (
                f"  warning: {rewarded:,} held-out events have a reward, too few to judge a policy"
                " by; --test-fraction holds out more"
            )


def describe(dataset: FederatedDataset, top: int = 10) -> str:
    """The facts a user looks at before running anything on a data set, as text.

    Kind and shape of contexts, sizes of splits with quartiles of examples per client, the `top`
    most frequent actions, what each column of a table became, and what the import left out.
    """
    header = dataset.header
    kind = (
        "logged feedback"
        if header.logged
        else "several labels an example"
        if header.multilabel
        else "labels"
    )
    guessed = ", propensities estimated" if header.source.get("propensities") else ""
    shape = f"contexts of shape {_shape(dataset)}"
    lines = [f"{header.name}: {header.kind}, {shape}, {kind}{guessed}"]
    for name, split in dataset.splits.items():
        marks = np.quantile(split.sizes(), [0, 0.25, 0.5, 0.75, 1], method="nearest")
        lines.append(f"{name}: {_size(split)}")
        lines.append(
            f"  examples per client (min, quartiles, max): {' / '.join(f'{int(mark):,}' for mark in marks)}"
        )
    if header.items is not None:
        lines += _item_lines(dataset)
    else:
        lines.append(_actions_line(header, top))
    if header.encoder is not None:
        lines += ["contexts:"] if header.items is not None else []
        lines += _columns(header.encoder)
    if header.lower_case:
        lines.append(
            f"case map: {len(header.lower_case)} upper-case actions know their lower-case version"
        )
    if left_out := _left_out(dataset):
        lines.append(f"left out at import: {left_out}")
    return "\n".join(lines)


def verified(dataset: FederatedDataset) -> str:
    """A line about what opening it with `verify=True` has found to be right."""
    size = sum(state.size for state in dataset.files.values()) / 1e6
    files = f"{len(dataset.files)} files, {size:,.1f} MB"
    return f"verified: {files}: checksums, types, shapes and ranges are right"


def _left_out(dataset: FederatedDataset) -> str:
    """Counts of what the import has left out, in words; "" where nothing was."""
    source = dataset.header.source
    return ", ".join(f"{source[key]:,} {what}" for key, what in _DROPPED.items() if key in source)


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
    """Where the contact sheet goes, by default named after the data set; None without images.

    A name without a suffix gets `.png`; a format that matplotlib cannot write is refused before any
    drawing.
    """
    if not is_image(dataset):
        if wanted is not None:
            shape = f"its contexts are of shape {_shape(dataset)}"
            raise ConfigError(f"picture: {dataset.header.name} has no images: {shape}")
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
    """Draw one image for each of some clients (rows) and classes (columns), and save it.

    Clients are spread from the busiest to the median one; an empty place means that the client has
    no image of the class.
    """
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
                image = np.asarray(split.shared(np.array([examples[int(label)]])))[0]
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
    with explaining(str(path), OSError):
        figure.savefig(path, dpi=150, bbox_inches="tight")
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


def _actions_line(header: Header, top: int) -> str:
    """The number of actions, and the most frequent with their counts."""
    counts = np.array(header.action_counts)
    order = np.argsort(-counts, kind="stable")[:top]
    shown = ", ".join(f"{header.actions[i]} {counts[i]:,}" for i in order)
    more = len(counts) - len(order)
    rest = f" and {more:,} more" if more else ""
    return f"actions: {header.num_actions:,}; most frequent in train: {shown}{rest}"


def _item_lines(dataset: FederatedDataset) -> Iterator[str]:
    """The catalogue, candidates of decisions, new items over time, and what item columns became."""
    header, train = dataset.header, dataset.train
    assert header.items is not None
    assert train.candidates is not None
    assert train.catalogue is not None
    catalogue, counts = train.catalogue, np.diff(train.candidates.offsets)
    shown = np.unique(catalogue.item_of(train.candidates.ids))
    versions = len(catalogue.features) - len(catalogue)
    changed = f" ({versions:,} changes of features)" if versions else ""
    yield (
        f"catalogue: {len(catalogue):,} items{changed} with {header.items.kind} features of shape"
        f" {' x '.join(map(str, header.items.shape))}, {len(shown):,} of them shown in train"
    )
    marks = f"{counts.min()} / {counts.mean():.1f} / {counts.max()}"
    how = f"; {header.source['candidates']}" if "candidates" in header.source else ""
    yield f"candidates a decision (min, mean, max): {marks}{how}"
    if train.times is not None:
        rows = train.times[train.candidates.row_of_entry()]
        items = catalogue.item_of(train.candidates.ids)
        yield f"items first shown in each tenth of the time: {_new_items(items, rows)}"
    if header.item_encoder is not None:
        yield from _columns(header.item_encoder)


def _new_items(items: np.ndarray, times: np.ndarray) -> str:
    """Numbers of items that are shown for the first time in each tenth of the period.

    Both arrays have an entry for each candidate of each decision.
    """
    first = np.full(items.max(initial=-1) + 1, np.inf)
    np.minimum.at(first, items, times)
    counts, _ = np.histogram(first[np.isfinite(first)], 10, (times.min(), times.max()))
    return " ".join(f"{count:,}" for count in counts)


def _columns(encoder: Encoder) -> Iterator[str]:
    """A line for the words and for each column that an encoder reads."""
    if encoder.text:
        yield f"  words of {', '.join(encoder.text)}: {encoder.words:,}"
    width = max((len(column.name) for column in encoder.columns), default=0)
    yield from (f"  {column.name:<{width}}  {column.describe()}" for column in encoder.columns)


def label_matrix(split: Split, actions: int) -> np.ndarray:
    """Counts of labels by client: float64 [clients, actions]."""
    client_of_row = np.repeat(np.arange(split.num_clients), split.sizes())
    client_of_label = client_of_row[split.labels.row_of_entry()]
    flat = np.bincount(
        client_of_label * actions + split.labels.ids, minlength=split.num_clients * actions
    )
    return flat.reshape(split.num_clients, actions).astype(np.float64)


def heterogeneity(counts: np.ndarray, seed: int = 0) -> dict[str, float]:
    """Distance of clients' labels from the population's, beside clients drawn from the population.

    `counts` is [clients, actions]. Total variation is half the absolute difference of frequencies,
    averaged over clients with at least 20 labels; `total_variation_if_alike` is the same for
    clients of the same sizes that draw from the population: the effect of small numbers alone.
    Empty where no client has enough labels.
    """
    population = counts.sum(axis=0) / counts.sum()
    counts = counts[counts.sum(axis=1) >= _MIN_LABELS]
    if len(counts) == 0:
        return {}
    sizes = counts.sum(axis=1)
    alike = np.random.default_rng(seed).multinomial(sizes.astype(int), population)
    pairs = sizes * (sizes - 1)
    return {
        "clients_measured": float(len(counts)),
        "total_variation": float(_total_variation(counts, population).mean()),
        "total_variation_if_alike": float(_total_variation(alike, population).mean()),
        "same_label_within_client": float(((counts * (counts - 1)).sum(axis=1) / pairs).mean()),
        "same_label_population": float((population**2).sum()),
    }


def _total_variation(counts: np.ndarray, population: np.ndarray) -> np.ndarray:
    """Distance of each client's shares from the population's: float64 [clients], from 0 to 1."""
    shares = counts / counts.sum(axis=1, keepdims=True)
    return np.asarray(np.abs(shares - population).sum(axis=1) / 2)


def writer_effect(split: Split, pairs: int = 20_000, seed: int = 0) -> float:
    """Of the squared distance between two images of a class, the share that one writer explains.

    0: images of one client are as different as any two of the class; 1: a client draws a class
    always alike. Measured on at most `pairs` random pairs.
    """
    rng = np.random.default_rng(seed)
    client = np.repeat(np.arange(split.num_clients), split.sizes())
    label = split.labels.ids[split.labels.offsets[:-1]]
    same_client = _neighbours(np.lexsort((rng.random(len(client)), client, label)), [label, client])
    anybody = _neighbours(np.lexsort((rng.random(len(client)), label)), [label])

    def distance(first: np.ndarray, second: np.ndarray) -> float:
        chosen = rng.permutation(len(first))[:pairs]
        x, y = (
            np.asarray(split.shared(rows[chosen])).reshape(len(chosen), -1)
            for rows in (first, second)
        )
        return float(((x - y) ** 2).sum(axis=1).mean())

    return 1 - distance(*same_client) / distance(*anybody)


def _neighbours(order: np.ndarray, keys: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Rows that follow each other in `order` and agree in all keys."""
    first, second = order[:-1], order[1:]
    agree = np.all([key[first] == key[second] for key in keys], axis=0)
    return first[agree], second[agree]


def statistics(dataset: FederatedDataset) -> Iterator[str]:
    """Sizes, skew and differences between clients as lines of text, in the order they are computed.

    `fedbandit data statistics` prints them; docs/embedded-data.md explains each. `DataError` for
    data without labels.
    """
    header, train = dataset.header, dataset.train
    bare, listed = not len(train.labels.ids), header.items is not None
    refuse(
        (listed, f"{header.name}: has candidates; statistics are about fixed actions"),
        (bare, f"{header.name}: no example has a label; statistics are about labels"),
        error=DataError,
    )
    yield f"data set                     {header.name} ({header.kind}, {header.num_actions} actions)"
    for name, split in dataset.splits.items():
        yield f"{name + ' clients, examples':<28} {split.num_clients:,}, {split.num_examples:,}"
    sizes = train.sizes()
    yield f"examples per client          {_quantiles(sizes)}, mean {sizes.mean():.1f}, sd {sizes.std():.1f}"

    counts = label_matrix(train, header.num_actions)
    share = np.sort(counts.sum(axis=0))[::-1] / train.num_examples
    per_example = np.diff(train.labels.offsets)
    yield f"labels per example           mean {per_example.mean():.2f}, shares of 0, 1, 2, … {_shares(per_example)}"
    ranks = [rank for rank in (1, 2, 5, 10, 20, 50) if rank <= len(share)]
    yield "label share by rank          " + ", ".join(
        f"{rank}: {share[rank - 1]:.4f}" for rank in ranks
    )
    yield f"most to least frequent       {share[0] / max(share[-1], 1e-12):.1f}"
    for name, value in heterogeneity(counts).items():
        yield f"{name.replace('_', ' '):<28} {value:,.3f}".removesuffix(".000")

    if isinstance(train.features, Ragged):
        words = np.diff(train.features.offsets)
        yield f"different words per example  {_quantiles(words)}, mean {words.mean():.1f}"
        used = np.sort(np.bincount(train.features.ids, minlength=header.shape[0]))[::-1] / len(
            train.features.ids
        )
        yield "word share by rank           " + ", ".join(
            f"{rank}: {used[rank - 1]:.5f}"
            for rank in (1, 10, 100, 1000, 5000)
            if rank <= len(used)
        )
    elif not header.multilabel and len(header.shape) >= 2:
        yield f"writer effect on images      {writer_effect(train):.3f}"
        sample = np.asarray(
            train.shared(np.arange(0, train.num_examples, 1 + train.num_examples // 5000))
        )
        yield f"mean pixel, share above 1/2  {sample.mean():.3f}, {(sample > 0.5).mean():.3f}"


def _quantiles(values: np.ndarray) -> str:
    """Some quantiles with their percents, in words."""
    numbers = " / ".join(f"{value:.0f}" for value in np.percentile(values, _QUANTILES))
    return f"{numbers} (quantiles {', '.join(map(str, _QUANTILES))} %)"


def _shares(values: np.ndarray) -> str:
    """The share of each whole number from 0 on, in words."""
    return " ".join(f"{share:.3f}" for share in np.bincount(values) / len(values))
