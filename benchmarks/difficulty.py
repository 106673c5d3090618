"""How hard a data set is: held-out accuracy of a constant and of models trained with all labels in one place.

`python -m benchmarks.difficulty topics` (seconds) or `glyphs` (two minutes, most of them a CNN) prints the last rows of
docs/embedded-data.md; it takes any data set folder.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from fedbandit.core.ragged import Ragged
from fedbandit.data import FederatedDataset, open_dataset
from fedbandit.data.dataset import Split

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


if __name__ == "__main__":
    for source in sys.argv[1:] or ("topics", "glyphs"):
        for model, accuracy in supervised_accuracies(open_dataset(source)):
            print(f"{source:<8} {model:<28} {accuracy:.3f}", flush=True)
