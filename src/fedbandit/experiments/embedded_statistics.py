"""What a data set looks like in numbers: sizes, skew, how much clients differ, and how hard it is to learn centrally.

This is `fedbandit data statistics`, to which the embedded sets were fitted. Knows nothing of bandits.
"""

from collections.abc import Iterator

import numpy as np

from fedbandit.data.dataset import FederatedDataset, Split
from fedbandit.data.ragged import Ragged
from fedbandit.errors import DataError
from fedbandit.experiments.embedded_statistics_models import supervised_accuracies

_MIN_LABELS = 20  # clients with fewer labels say too little about their own distribution
_QUANTILES = (0, 5, 25, 50, 75, 95, 100)


def label_matrix(split: Split, actions: int) -> np.ndarray:
    """How often each client has each label: float64 [clients, actions]."""
    client_of_row = np.repeat(np.arange(split.num_clients), split.sizes())
    client_of_label = client_of_row[split.labels.row_of_entry()]
    flat = np.bincount(client_of_label * actions + split.labels.ids, minlength=split.num_clients * actions)
    return flat.reshape(split.num_clients, actions).astype(np.float64)


def heterogeneity(counts: np.ndarray, seed: int = 0) -> dict[str, float]:
    """How far clients' labels are from the population's, beside what clients drawn from the population would show."""
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
    shares = counts / counts.sum(axis=1, keepdims=True)
    return np.abs(shares - population).sum(axis=1) / 2


def writer_effect(split: Split, pairs: int = 20_000, seed: int = 0) -> float:
    """Of the squared distance between two images of a class, the share that goes away when one client drew both."""
    rng = np.random.default_rng(seed)
    client = np.repeat(np.arange(split.num_clients), split.sizes())
    label = split.labels.ids[split.labels.offsets[:-1]]
    same_client = _neighbours(np.lexsort((rng.random(len(client)), client, label)), [label, client])
    anybody = _neighbours(np.lexsort((rng.random(len(client)), label)), [label])

    def distance(first: np.ndarray, second: np.ndarray) -> float:
        chosen = rng.permutation(len(first))[:pairs]
        x, y = (np.asarray(split.contexts(rows[chosen])).reshape(len(chosen), -1) for rows in (first, second))
        return float(((x - y) ** 2).sum(axis=1).mean())

    return 1 - distance(*same_client) / distance(*anybody)


def _neighbours(order: np.ndarray, keys: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Rows that follow each other in `order` and agree in all keys."""
    first, second = order[:-1], order[1:]
    agree = np.all([key[first] == key[second] for key in keys], axis=0)
    return first[agree], second[agree]


def describe(dataset: FederatedDataset, difficulty: bool = True) -> Iterator[str]:
    """The statistics as lines of text, in the order they are computed."""
    header, train = dataset.header, dataset.train
    if not len(train.labels.ids):
        raise DataError(f"{header.name}: no example has a label; statistics are about labels")
    yield f"data set                     {header.name} ({header.kind}, {header.num_actions} actions)"
    for name, split in (("train", train), ("test", dataset.test)):
        if split is not None:
            yield f"{name + ' clients, examples':<28} {split.num_clients:,}, {split.num_examples:,}"
    sizes = train.sizes()
    yield f"examples per client          {_quantiles(sizes)}, mean {sizes.mean():.1f}, sd {sizes.std():.1f}"

    counts = label_matrix(train, header.num_actions)
    share = np.sort(counts.sum(axis=0))[::-1] / train.num_examples
    per_example = np.diff(train.labels.offsets)
    yield f"labels per example           mean {per_example.mean():.2f}, shares of 0, 1, 2, … {_shares(per_example)}"
    ranks = [rank for rank in (1, 2, 5, 10, 20, 50) if rank <= len(share)]
    yield "label share by rank          " + ", ".join(f"{rank}: {share[rank - 1]:.4f}" for rank in ranks)
    yield f"most to least frequent       {share[0] / max(share[-1], 1e-12):.1f}"
    for name, value in heterogeneity(counts).items():
        yield f"{name.replace('_', ' '):<28} {value:,.3f}".removesuffix(".000")

    if isinstance(train.features, Ragged):
        words = np.diff(train.features.offsets)
        yield f"different words per example  {_quantiles(words)}, mean {words.mean():.1f}"
        used = np.sort(np.bincount(train.features.ids, minlength=header.shape[0]))[::-1] / len(train.features.ids)
        yield "word share by rank           " + ", ".join(
            f"{rank}: {used[rank - 1]:.5f}" for rank in (1, 10, 100, 1000, 5000) if rank <= len(used)
        )
    elif not header.multilabel and len(header.shape) >= 2:
        yield f"writer effect on images      {writer_effect(train):.3f}"
        sample = np.asarray(train.contexts(np.arange(0, train.num_examples, 1 + train.num_examples // 5000)))
        yield f"mean pixel, share above 1/2  {sample.mean():.3f}, {(sample > 0.5).mean():.3f}"

    if difficulty and dataset.test is not None:
        for name, accuracy in supervised_accuracies(dataset):
            yield f"{name:<28} {accuracy:.3f}"


def _quantiles(values: np.ndarray) -> str:
    numbers = " / ".join(f"{value:.0f}" for value in np.percentile(values, _QUANTILES))
    return f"{numbers} (quantiles {', '.join(map(str, _QUANTILES))} %)"


def _shares(values: np.ndarray) -> str:
    return " ".join(f"{share:.3f}" for share in np.bincount(values) / len(values))
