"""The two workloads, made from a seed and kept as plain arrays that every contestant's environment can read.

E: images for the FedAvg CNN, 64 clients with about 12,500 examples. S: short texts for a linear model, 64 clients with
256 examples each, 10,000 words, 50 tags. Actions and rewards are a log to train on; labels are for those who act.
"""

from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / ".data"
FLOP_FORWARD, FLOP_TRAINING = (
    24.6e6,
    72.5e6,
)  # per example of E, by the plain definition of the network
WORDS_PER_TEXT = 10


def images(clients: int = 64, seed: int = 0) -> Path:
    """Write workload E for so many clients, unless it is there; sizes are spread as those of real writers are."""
    folder = FOLDER / f"images-{clients}"
    if (folder / "done").exists():
        return folder
    rng = np.random.default_rng(seed)
    sizes = np.clip(rng.normal(195, 80, clients).round(), 20, 450).astype(np.int64)
    n = int(sizes.sum())
    return _write(
        folder,
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        images=rng.random((n, 28, 28), np.float32),
        **_log(rng, n, 62),
    )


def texts(
    clients: int = 64, examples: int = 256, words: int = 10_000, actions: int = 50, seed: int = 0
) -> Path:
    """Write workload S, unless it is there: Zipf words, one tag each."""
    folder = FOLDER / f"texts-{clients}-{examples}-{words}-{actions}"
    if (folder / "done").exists():
        return folder
    rng = np.random.default_rng(seed)
    n = clients * examples
    frequency = np.cumsum(1 / np.arange(1, words + 1))
    ids = np.searchsorted(frequency, rng.random((n, WORDS_PER_TEXT)) * frequency[-1]).astype(
        np.int32
    )
    ids.sort(axis=1)
    return _write(
        folder,
        offsets=np.arange(0, n + 1, examples),
        ids=ids,
        value=np.array(WORDS_PER_TEXT**-0.5, np.float32),
        **_log(rng, n, actions),
    )


def _log(rng: np.random.Generator, n: int, actions: int) -> dict[str, np.ndarray]:
    return {
        "labels": rng.integers(0, actions, n).astype(np.int32),
        "actions": rng.integers(0, actions, n),
        "rewards": rng.random(n, np.float32),
        "num_actions": np.array(actions),
    }


def _write(folder: Path, **arrays: np.ndarray) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    (folder / "done").touch()
    return folder
