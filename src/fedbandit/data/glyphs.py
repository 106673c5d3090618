"""The embedded image data set: 62 characters drawn by synthetic writers, each with a style of their own, from a seed.

Writers are drawn one by one from random numbers of their own. The statistics and where they come from are in
docs/embedded-data.md; nothing here knows of policies or models.
"""

from pathlib import Path

import numpy as np

from fedbandit.data.glyph_raster import SIDE
from fedbandit.data.glyph_shapes import Shapes, load_shapes
from fedbandit.data.glyph_writers import draw_characters, draw_writer
from fedbandit.data.labels import EMNIST_ACTIONS, EMNIST_LOWER_CASE
from fedbandit.data.ragged import Ragged
from fedbandit.data.writer import DatasetWriter
from fedbandit.errors import ConfigError
from fedbandit.randomness import Purpose, generator

# Images per writer, over the mean: most writers filled short forms, the others long ones. (share, centre, spread) each.
_SHORT_FORMS, _LONG_FORMS, _SIZE_RANGE = (0.62, 0.72, 0.11), (0.38, 1.455, 0.22), (0.1, 2.2)
_LABEL_LOYALTY = 100.0  # the smaller, the more writers' label frequencies differ
# How often EMNIST has each letter, A to Z and a to z, in hundreds; all digits are about equally frequent.
_DIGIT_HUNDREDS = 403
_UPPER_HUNDREDS = "75 45 118 53 58 106 30 37 140 40 29 59 105 96 291 97 30 59 243 114 146 54 55 32 55 32"
_LOWER_HUNDREDS = "117 60 33 119 287 30 43 102 32 22 30 179 31 133 32 28 35 164 31 212 33 34 32 33 27 32"


def generate(
    out: Path, *, seed: int = 0, writers: int = 500, mean_examples: float = 100, test_fraction: float = 0.1
) -> Path:
    """Write the data set to the folder `out`: about `mean_examples` training images from each of `writers`.

    `test_fraction` of each writer's images are held out. EMNIST has 3,400 writers and 198 training images for each.
    """
    if writers < 1:
        raise ConfigError(f"writers: must be at least 1, got {writers}")
    if not mean_examples >= 10:
        raise ConfigError(f"mean_examples: must be at least 10, got {mean_examples}")
    if not 0 <= test_fraction <= 0.5:
        raise ConfigError(f"test_fraction: must be between 0 and 0.5, got {test_fraction}")
    shapes = load_shapes()
    with DatasetWriter(
        out,
        name="glyphs",
        kind="dense",
        shape=(SIDE, SIDE),
        actions=EMNIST_ACTIONS,
        lower_case=EMNIST_LOWER_CASE,
        scale=1 / 255,
        dtype=np.uint8,
        source={
            "embedded": "glyphs",
            "seed": seed,
            "writers": writers,
            "mean_examples": mean_examples,
            "test_fraction": test_fraction,
        },
    ) as writer:
        for number in range(writers):
            images, labels = _draw(seed, number, shapes, mean_examples / (1 - test_fraction))
            held_out = round(test_fraction * len(labels))
            for split, part in (("test", slice(0, held_out)), ("train", slice(held_out, None))):
                rows = Ragged(np.arange(len(labels[part]) + 1), labels[part])
                writer.add_many(np.full(len(rows), f"writer{number:05d}"), images[part], rows, split=split)
        return writer.finish()


def label_frequencies() -> np.ndarray:
    """How often each of the 62 classes occurs: float64 [62]."""
    letters = [int(count) for count in f"{_UPPER_HUNDREDS} {_LOWER_HUNDREDS}".split()]
    counts = np.array([_DIGIT_HUNDREDS] * 10 + letters, np.float64)
    return counts / counts.sum()


def _draw(seed: int, number: int, shapes: Shapes, mean_examples: float) -> tuple[np.ndarray, np.ndarray]:
    """All images of one writer, in random order, and their labels."""
    rng = generator(seed, Purpose.DATA, number)
    _, centre, spread = _SHORT_FORMS if rng.random() < _SHORT_FORMS[0] else _LONG_FORMS
    size = round(mean_examples * float(np.clip(rng.normal(centre, spread), *_SIZE_RANGE)))
    shares = rng.dirichlet(_LABEL_LOYALTY * label_frequencies())
    labels = rng.choice(len(EMNIST_ACTIONS), size, p=shares).astype(np.int32)
    return draw_characters(rng, draw_writer(rng, shapes), shapes, labels), labels
