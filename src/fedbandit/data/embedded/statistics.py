"""Statistics of a data set, to compare the embedded sets with the published ones: sizes, heterogeneity, difficulty."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from fedbandit.core.errors import DataError
from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import FederatedDataset, Split

_EXAMPLES, _STEPS, _BATCH = (
    50_000,
    2500,
    128,
)  # training budget: at most this many examples, exactly this many steps
_TEST_EXAMPLES = 10_000
_WEIGHT_DECAY = 1e-5
_LEARNING_RATE = {
    "sparse linear": 0.02,
    "linear": 0.003,
    "cnn": 0.002,
}  # Adam, falling to zero along half a cosine


def supervised_accuracies(dataset: FederatedDataset, seed: int = 0) -> Iterator[tuple[str, float]]:
    """(name, share of test examples whose answer is one of their labels) for a constant and for trained models."""
    assert dataset.test is not None
    actions = dataset.header.num_actions
    rng = np.random.default_rng(seed)
    train_rows, test_rows = (
        _sample(rng, dataset.train, _EXAMPLES),
        _sample(rng, dataset.test, _TEST_EXAMPLES),
    )
    targets, answers = (
        _targets(dataset.train, train_rows, actions),
        _targets(dataset.test, test_rows, actions),
    )
    yield "best constant", float(answers[:, targets.sum(0).argmax()].mean())

    sparse = isinstance(dataset.train.features, Ragged)
    models: dict[str, Callable[[], nn.Module]] = {}
    if sparse:
        models["sparse linear"] = lambda: _SparseLinear(dataset.header.shape[0], actions)
    else:
        models["linear"] = lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(int(np.prod(dataset.header.shape)), actions)
        )
        if (
            len(dataset.header.shape) == 2 and min(dataset.header.shape) >= 4
        ):  # grey images that can be pooled twice
            models["cnn"] = lambda: _cnn(dataset.header.shape, actions)
    centre = 0.0 if sparse else _mean(dataset.train, train_rows)
    for name, build in models.items():
        with _one_thread(), torch.random.fork_rng(devices=[]):
            # Dropout takes no generator of its own; what is seeded here ends with the block.
            torch.manual_seed(seed)
            model = build()
            _train(model, dataset.train, train_rows, targets, centre, _LEARNING_RATE[name], rng)
            accuracy = _score(model, dataset.test, test_rows, answers, centre)
        yield f"supervised {name}", accuracy


@contextmanager
def _one_thread() -> Iterator[None]:
    """Models this small lose more by sharing the work than they gain, and one thread always gives the same numbers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _SparseLinear(nn.Module):
    """A linear model with bias on sparse rows."""

    def __init__(self, words: int, actions: int) -> None:
        super().__init__()
        self.weight = nn.EmbeddingBag(words, actions, mode="sum")
        self.bias = nn.Parameter(torch.zeros(actions))
        nn.init.zeros_(self.weight.weight)

    def forward(self, rows: Ragged) -> torch.Tensor:
        ids, offsets = (
            torch.from_numpy(rows.ids.astype(np.int64)),
            torch.from_numpy(rows.offsets[:-1]),
        )
        summed: torch.Tensor = self.weight(
            ids, offsets, per_sample_weights=torch.from_numpy(rows.values)
        )
        return summed + self.bias


def _cnn(shape: tuple[int, ...], actions: int) -> nn.Module:
    """Two small convolutions and a hidden layer: a tenth of the FedAvg model's work, most of its accuracy."""
    height, width = shape[0] // 4, shape[1] // 4
    return nn.Sequential(
        nn.Unflatten(1, (1, shape[0])),
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * height * width, 128),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Linear(128, actions),
    )


def _sample(rng: np.random.Generator, split: Split, most: int) -> np.ndarray:
    return np.sort(rng.permutation(split.num_examples)[:most])


def _targets(split: Split, rows: np.ndarray, actions: int) -> np.ndarray:
    """1 where an example carries a label: float32 [n, actions]."""
    labels = split.labels.take(rows)
    targets = np.zeros((len(rows), actions), np.float32)
    targets[labels.row_of_entry(), labels.ids] = 1
    return targets


def _mean(split: Split, rows: np.ndarray) -> np.ndarray:
    mean: np.ndarray = np.asarray(split.shared(rows[:: 1 + len(rows) // 5000])).mean(axis=0)
    return mean


def _contexts(split: Split, rows: np.ndarray, centre: np.ndarray | float) -> Ragged | torch.Tensor:
    contexts = split.shared(rows)
    return contexts if isinstance(contexts, Ragged) else torch.from_numpy(contexts - centre)


def _train(
    model: nn.Module,
    split: Split,
    rows: np.ndarray,
    targets: np.ndarray,
    centre: np.ndarray | float,
    learning_rate: float,
    rng: np.random.Generator,
) -> None:
    """Cross-entropy against the labels of each example, equally shared where there are several."""
    shares = targets / np.maximum(targets.sum(axis=1, keepdims=True), 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, weight_decay=_WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
    model.train()
    epochs = -(-_STEPS * _BATCH // len(rows))
    order = np.concatenate([rng.permutation(len(rows)) for _ in range(epochs)])[: _STEPS * _BATCH]
    for batch in order.reshape(_STEPS, _BATCH):
        optimizer.zero_grad()
        scores = model(_contexts(split, rows[batch], centre))
        nn.functional.cross_entropy(scores, torch.from_numpy(shares[batch])).backward()
        optimizer.step()
        schedule.step()


def _score(
    model: nn.Module,
    split: Split,
    rows: np.ndarray,
    answers: np.ndarray,
    centre: np.ndarray | float,
) -> float:
    model.eval()
    with torch.no_grad():
        chosen = [
            model(_contexts(split, rows[start : start + 1000], centre)).argmax(1).numpy()
            for start in range(0, len(rows), 1000)
        ]
    return float(answers[np.arange(len(rows)), np.concatenate(chosen)].mean())


_MIN_LABELS = 20  # clients with fewer labels say too little about their own distribution
_QUANTILES = (0, 5, 25, 50, 75, 95, 100)


def label_matrix(split: Split, actions: int) -> np.ndarray:
    """How often each client has each label: float64 [clients, actions]."""
    client_of_row = np.repeat(np.arange(split.num_clients), split.sizes())
    client_of_label = client_of_row[split.labels.row_of_entry()]
    flat = np.bincount(
        client_of_label * actions + split.labels.ids, minlength=split.num_clients * actions
    )
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
    distances: np.ndarray = np.abs(shares - population).sum(axis=1) / 2
    return distances


def writer_effect(split: Split, pairs: int = 20_000, seed: int = 0) -> float:
    """Of the squared distance between two images of a class, the share that goes away when one client drew both."""
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

    if difficulty and dataset.test is not None:
        for name, accuracy in supervised_accuracies(dataset):
            yield f"{name:<28} {accuracy:.3f}"


def _quantiles(values: np.ndarray) -> str:
    numbers = " / ".join(f"{value:.0f}" for value in np.percentile(values, _QUANTILES))
    return f"{numbers} (quantiles {', '.join(map(str, _QUANTILES))} %)"


def _shares(values: np.ndarray) -> str:
    return " ".join(f"{share:.3f}" for share in np.bincount(values) / len(values))
