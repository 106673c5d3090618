"""Draw photos of the embedded `gallery` for the docs: each embedding as a picture, likes framed.

python scripts/gallery_picture.py docs/images/featured-photo.png
"""

import sys

import numpy as np
from matplotlib.figure import Figure

from fedbandit import open_dataset


def photo(embedding: np.ndarray, side: int = 48) -> np.ndarray:
    """A picture of an embedding: a sky, a ground and a few shapes whose colours are its numbers."""
    y, x = np.mgrid[0 : 1 : side * 1j, 0 : 1 : side * 1j]
    numbers = 1 / (1 + np.exp(-embedding))
    horizon = 0.35 + 0.3 * numbers[0] + 0.06 * np.sin(6 * x + 6 * numbers[1])
    image = np.where((y < horizon)[..., None], numbers[2:5], numbers[5:8])
    for shape in range(3):
        at, colour = (
            numbers[8 + 2 * shape : 10 + 2 * shape],
            numbers[[shape, 7 - shape, 10 + shape]],
        )
        inside = np.hypot(x - at[0], y - at[1]) < 0.08 + 0.12 * numbers[13 + shape]
        image = np.where(inside[..., None], 1 - colour, image)
    return image


def main(path: str) -> None:
    """Three users, a decision each: what could be featured, and which of it they would like."""
    split = open_dataset("gallery").train
    rows = split.offsets[[0, 1, 4]] + 2
    figure = Figure(figsize=(9, 3.9))
    axes = figure.subplots(3, 8)
    for line, row in zip(axes, rows, strict=True):
        shown = split.contexts(np.array([row])).candidates
        liked = split.labels.take(np.array([row])).ids
        for place, axis in enumerate(line):
            axis.set_axis_off()
            if place < len(shown.items):
                axis.imshow(photo(shown.features[place]))
                if place in liked:
                    frame = {"fill": False, "edgecolor": "#d62728", "linewidth": 6}
                    axis.add_patch(matplotlib_rectangle(frame))
    figure.suptitle("What could be featured for three users; they would like the framed ones")
    figure.savefig(path, dpi=110, bbox_inches="tight")


def matplotlib_rectangle(style: dict) -> object:
    """A frame around a picture of 48 x 48."""
    from matplotlib.patches import Rectangle

    return Rectangle((-0.5, -0.5), 48, 48, **style)


if __name__ == "__main__":
    main(sys.argv[1])
