"""`glyphs`: 62 handwritten characters by synthetic writers, each with a style, made
from a seed.
"""

from dataclasses import dataclass
from pathlib import Path

import numba
import numpy as np

from fedbandit.core.errors import ConfigError, refuse
from fedbandit.core.progress import SILENT, ProgressReporter
from fedbandit.core.ragged import Ragged
from fedbandit.core.randomness import Purpose, generator
from fedbandit.data.text import EMNIST_ACTIONS, EMNIST_LOWER_CASE
from fedbandit.data.writer import DatasetWriter

SIDE = 28  # pixels
MAX_STROKES = 4  # of a character
POINTS = 24  # per stroke: enough that the straight pieces between them do not show at 28 pixels


@dataclass(frozen=True)
class Shapes:
    """All forms of all characters, numbered through; unused strokes are zero."""

    points: np.ndarray  # float32 [forms, strokes, points, 2]
    strokes: np.ndarray  # int32 [forms]: how many strokes are used
    first: np.ndarray  # int32 [62 + 1]: the forms of class c are first[c]:first[c + 1]


def load_shapes() -> Shapes:
    """The forms in `strokes.txt`, classes in the order of EMNIST."""
    lines = Path(__file__).with_name("strokes.txt").read_text(encoding="utf-8").splitlines()
    given = [line.split(maxsplit=1) for line in lines if not line.startswith("#")]
    given.sort(key=lambda form: EMNIST_ACTIONS.index(form[0]))  # stable: forms keep their order
    forms = [[_stroke(*one.split()) for one in form.split(";")] for _, form in given]
    points = np.zeros((len(forms), MAX_STROKES, POINTS, 2), np.float32)
    for place, strokes in zip(points, forms, strict=True):
        place[: len(strokes)] = strokes
    classes = np.array([EMNIST_ACTIONS.index(character) for character, _ in given])
    starts = np.searchsorted(classes, np.arange(len(EMNIST_ACTIONS) + 1)).astype(np.int32)
    return Shapes(points, np.array([len(strokes) for strokes in forms], np.int32), starts)


def _stroke(kind: str, *numbers: str) -> np.ndarray:
    """A stroke of the table as points at even distances: float64 [points, 2]."""
    values = np.array(numbers, np.float64)
    if kind == "O":
        x, y, radius_x, radius_y, start, stop = values
        angle = np.radians(np.linspace(start, stop, 200))
        path = np.stack([x + radius_x * np.cos(angle), y + radius_y * np.sin(angle)], axis=1)
    elif kind == "C":
        path = _smooth(values.reshape(-1, 2))
    else:
        path = values.reshape(-1, 2)
    return _evenly_spaced(path)


def _smooth(knots: np.ndarray) -> np.ndarray:
    """A Catmull-Rom curve through the knots."""
    padded = np.concatenate([2 * knots[:1] - knots[1:2], knots, 2 * knots[-1:] - knots[-2:-1]])
    t = np.linspace(0, 1, 20)[:, None]
    pieces = [
        0.5
        * (
            2 * b
            + (c - a) * t
            + (2 * a - 5 * b + 4 * c - d) * t**2
            + (3 * b - a - 3 * c + d) * t**3
        )
        for a, b, c, d in zip(padded, padded[1:], padded[2:], padded[3:], strict=False)
    ]
    return np.concatenate(pieces)


def _evenly_spaced(path: np.ndarray) -> np.ndarray:
    """`POINTS` points along a path, at even distances; the corners of straight lines are kept."""
    along = np.concatenate([[0], np.cumsum(np.hypot(*np.diff(path, axis=0).T))])
    places = np.linspace(0, along[-1], POINTS)
    if (
        len(path) <= 6
    ):  # straight lines: points move to the nearest corner, so that corners stay sharp
        for corner in along[1:-1]:
            places[np.abs(places - corner).argmin()] = corner
    return np.stack([np.interp(places, along, path[:, axis]) for axis in (0, 1)], axis=1)


@numba.njit(nogil=True, cache=True)
def rasterise(points, strokes, half_width, softness, darkness, out):  # type: ignore[no-untyped-def]
    """Fill `out`, uint8 [n, 28, 28], white paper 255; `points` float32 [n, strokes, points, 2] in
    pixels, x then y.
    """
    nearest = np.empty((SIDE, SIDE), np.float32)
    for image in range(len(points)):
        nearest[:] = 1e6
        reach = half_width[image] + softness[image]
        for stroke in range(strokes[image]):
            path = points[image, stroke]
            for i in range(len(path) - 1):
                _mark_segment(
                    nearest, path[i, 0], path[i, 1], path[i + 1, 0], path[i + 1, 1], reach
                )
        for row in range(SIDE):
            for column in range(SIDE):
                edge = (reach - np.sqrt(nearest[row, column])) / (2 * softness[image])
                ink = darkness[image] * min(max(edge, 0.0), 1.0)
                out[image, row, column] = np.uint8(255.0 * (1.0 - ink) + 0.5)


@numba.njit(nogil=True, cache=True)
def _mark_segment(nearest, x0, y0, x1, y1, reach):  # type: ignore[no-untyped-def]
    """Lower the squared distances of the pixels within reach of one straight piece."""
    left, right = (
        max(int(np.floor(min(x0, x1) - reach)), 0),
        min(int(np.ceil(max(x0, x1) + reach)), SIDE - 1),
    )
    top, bottom = (
        max(int(np.floor(min(y0, y1) - reach)), 0),
        min(int(np.ceil(max(y0, y1) + reach)), SIDE - 1),
    )
    dx, dy = x1 - x0, y1 - y0
    length = dx * dx + dy * dy + np.float32(1e-9)
    for row in range(top, bottom + 1):
        for column in range(left, right + 1):
            px, py = column - x0, row - y0
            along = min(max((px * dx + py * dy) / length, 0.0), 1.0)
            ox, oy = px - along * dx, py - along * dy
            distance = ox * ox + oy * oy
            nearest[row, column] = min(nearest[row, column], distance)


# Standard deviations, in heights of a capital letter unless said otherwise: between writers, between one writer's
# characters ("habit": the same each time that writer draws the class), and between drawings of the same character.
_SLANT, _SLANT_DRAWING, _MEAN_SLANT = 0.18, 0.07, 0.08
_ASPECT, _ASPECT_DRAWING = 0.15, 0.08  # of the logarithm of width over height
_ROTATION, _ROTATION_DRAWING = 0.05, 0.06  # radians
_WARP, _WARP_HABIT, _WARP_DRAWING = 0.02, 0.025, 0.022  # smooth bending
_SHIFT_HABIT, _SHIFT_DRAWING = 0.03, 0.03  # of a single stroke, against the others
_TURN_HABIT, _TURN_DRAWING = 0.07, 0.07  # radians, of a single stroke
_STRETCH_HABIT, _STRETCH_DRAWING = 0.08, 0.07  # of the logarithm of a single stroke's size
_SIZE_PIXELS, _SIZE, _SIZE_DRAWING = 19.5, 0.07, 0.06  # longer side of the box; of its logarithm
_SIZE_KEPT = (
    0.35  # how much of a small letter's smallness survives the fit to the box: 0 none, 1 all
)
_POSITION, _POSITION_DRAWING = 0.5, 0.8  # pixels
_HALF_WIDTH, _WIDTH, _WIDTH_DRAWING = 1.5, 0.25, 0.1  # of the pen in pixels; of its logarithm
_OTHER_FORM = 0.1  # probability that a drawing uses another than the writer's usual form
_WAVES = np.array(
    [[0, 3.1, 0], [0, 6.3, 1], [3.1, 0, 0], [6.3, 0, 1], [4.4, 4.4, 0], [4.4, -4.4, 1]], np.float32
)


@dataclass(frozen=True)
class Writer:
    """The style of one writer: everything that all their drawings share.

    A writer has a usual form of each character, a slant, an aspect and a pen; and habits, which
    bend, move, turn and stretch the strokes of a character the same way each time. Drawings vary
    around that, so that two images of one writer are closer than those of two.
    """

    form: np.ndarray  # int [62]: the usual form of each class
    slant: float
    aspect: float
    rotation: float
    warp: np.ndarray  # [62, waves, 2]
    stroke_shift: np.ndarray  # [62, strokes, 2]
    stroke_turn: np.ndarray  # [62, strokes]
    stroke_stretch: np.ndarray  # [62, strokes]
    size: float
    position: np.ndarray  # [2], pixels
    half_width: float
    softness: float
    darkness: float
    speckle: float


def draw_writer(rng: np.random.Generator, shapes: Shapes) -> Writer:
    """A new writer."""
    classes, waves = len(EMNIST_ACTIONS), len(_WAVES)
    forms = np.diff(shapes.first)
    usual = (rng.random(classes) ** 1.5 * forms).astype(
        np.int64
    )  # the power favours the more common forms
    return Writer(
        form=shapes.first[:-1] + usual,
        slant=_MEAN_SLANT + _SLANT * rng.standard_normal(),
        aspect=_ASPECT * rng.standard_normal(),
        rotation=_ROTATION * rng.standard_normal(),
        warp=_WARP * rng.standard_normal((waves, 2))
        + _WARP_HABIT * rng.standard_normal((classes, waves, 2)),
        stroke_shift=_SHIFT_HABIT * rng.standard_normal((classes, MAX_STROKES, 2)),
        stroke_turn=_TURN_HABIT * rng.standard_normal((classes, MAX_STROKES)),
        stroke_stretch=_STRETCH_HABIT * rng.standard_normal((classes, MAX_STROKES)),
        size=_SIZE * rng.standard_normal(),
        position=_POSITION * rng.standard_normal(2),
        half_width=_HALF_WIDTH * np.exp(_WIDTH * rng.standard_normal()),
        softness=rng.uniform(0.4, 0.9),
        darkness=rng.uniform(0.8, 1.0),
        speckle=max(0.0, rng.normal(0, 0.03)),
    )


def draw_characters(
    rng: np.random.Generator, writer: Writer, shapes: Shapes, labels: np.ndarray
) -> np.ndarray:
    """The given classes in this writer's hand: uint8 [n, 28, 28], white paper 255.

    A form is chosen for each, its strokes are varied, the whole is bent, tilted and fitted to the
    box as the published images are, and drawn with the writer's pen.
    """
    n = len(labels)
    other = shapes.first[labels] + (rng.random(n) * np.diff(shapes.first)[labels]).astype(np.int64)
    form = np.where(rng.random(n) < _OTHER_FORM, other, writer.form[labels])
    used = np.arange(MAX_STROKES) < shapes.strokes[form][:, None]
    points = _vary_strokes(rng, writer, labels, shapes.points[form], used)
    points = _bend(
        points, writer.warp[labels] + _WARP_DRAWING * rng.standard_normal((n, len(_WAVES), 2))
    )
    points = _tilt(rng, writer, points)
    points = _fit_to_box(rng, writer, points, used)
    images = np.empty((n, SIDE, SIDE), np.uint8)
    rasterise(
        points.astype(np.float32),
        shapes.strokes[form],
        (writer.half_width * np.exp(_WIDTH_DRAWING * rng.standard_normal(n))).astype(np.float32),
        np.full(n, writer.softness, np.float32),
        np.full(n, writer.darkness, np.float32),
        images,
    )
    return _speckle(rng, writer, images)


def _vary_strokes(
    rng: np.random.Generator,
    writer: Writer,
    labels: np.ndarray,
    points: np.ndarray,
    used: np.ndarray,
) -> np.ndarray:
    """Each stroke is moved, turned and stretched about its own middle."""
    shift = writer.stroke_shift[labels] + _SHIFT_DRAWING * rng.standard_normal((*used.shape, 2))
    turn = writer.stroke_turn[labels] + _TURN_DRAWING * rng.standard_normal(used.shape)
    stretch = np.exp(
        writer.stroke_stretch[labels] + _STRETCH_DRAWING * rng.standard_normal(used.shape)
    )
    middle = points.mean(axis=2, keepdims=True)
    cos, sin = (stretch * np.cos(turn))[..., None], (stretch * np.sin(turn))[..., None]
    x, y = np.moveaxis(points - middle, -1, 0)
    turned = np.stack([cos * x - sin * y, sin * x + cos * y], axis=-1)
    return np.asarray(turned + middle + shift[:, :, None])


def _bend(points: np.ndarray, amplitudes: np.ndarray) -> np.ndarray:
    """Push the points along a few smooth waves over the plane; amplitudes [n, waves, 2]."""
    waves = np.sin(points @ _WAVES[:, :2].T + _WAVES[:, 2])
    return np.asarray(points + np.einsum("nspw,nwd->nspd", waves, amplitudes))


def _tilt(rng: np.random.Generator, writer: Writer, points: np.ndarray) -> np.ndarray:
    """Slant, narrowness and rotation of the whole character."""
    n = len(points)
    slant = writer.slant + _SLANT_DRAWING * rng.standard_normal(n)
    width = np.exp(writer.aspect + _ASPECT_DRAWING * rng.standard_normal(n))
    angle = writer.rotation + _ROTATION_DRAWING * rng.standard_normal(n)
    x, y = np.moveaxis(points, -1, 0)
    slant, width, cos, sin = (
        part[:, None, None] for part in (slant, width, np.cos(angle), np.sin(angle))
    )
    x, y = x * width - slant * y, y
    return np.stack([cos * x - sin * y, sin * x + cos * y], axis=-1)


def _fit_to_box(
    rng: np.random.Generator, writer: Writer, points: np.ndarray, used: np.ndarray
) -> np.ndarray:
    """Centre the character and scale it to pixels by its longer side, as the published images are
    prepared.
    """
    n = len(points)
    mask = used[:, :, None, None]
    low = np.where(mask, points, np.inf).min(axis=(1, 2))
    high = np.where(mask, points, -np.inf).max(axis=(1, 2))
    longer = (high - low).max(axis=1)
    pixels = (
        _SIZE_PIXELS
        * np.exp(writer.size + _SIZE_DRAWING * rng.standard_normal(n))
        * longer**_SIZE_KEPT
    )
    scale = np.minimum(pixels, SIDE - 3.0) / longer
    target = (SIDE - 1) / 2 + writer.position + _POSITION_DRAWING * rng.standard_normal((n, 2))
    centred = points - ((low + high) / 2)[:, None, None]
    return np.asarray(centred * scale[:, None, None, None] + target[:, None, None])


def _speckle(rng: np.random.Generator, writer: Writer, images: np.ndarray) -> np.ndarray:
    """Uneven ink: noise on what is drawn, never on the paper, which stays exactly white."""
    noise = rng.standard_normal(images.shape, np.float32) * np.float32(writer.speckle * 255)
    return np.where(images < 255, np.clip(images + noise, 0, 254), images).astype(np.uint8)


# Images per writer, over the mean: most writers filled short forms, the others long ones. (share, centre, spread) each.
_SHORT_FORMS, _LONG_FORMS, _SIZE_RANGE = (0.62, 0.72, 0.11), (0.38, 1.455, 0.22), (0.1, 2.2)
_LABEL_LOYALTY = 100.0  # the smaller, the more writers' label frequencies differ
# How often EMNIST has each letter, A to Z and a to z, in hundreds; all digits are about equally frequent.
_DIGIT_HUNDREDS = 403
_UPPER_HUNDREDS = (
    "75 45 118 53 58 106 30 37 140 40 29 59 105 96 291 97 30 59 243 114 146 54 55 32 55 32"
)
_LOWER_HUNDREDS = (
    "117 60 33 119 287 30 43 102 32 22 30 179 31 133 32 28 35 164 31 212 33 34 32 33 27 32"
)


# Writers' mean number of training images, and the share held out. "emnist": 671,585 and 77,483 images of 3,400 writers.
SHAPES = {"glyphs": (100, 0.1), "emnist": (671_585 / 3400, 77_483 / (671_585 + 77_483))}


def generate(
    out: Path,
    *,
    seed: int = 0,
    writers: int = 500,
    mean_examples: float | None = None,
    test_fraction: float | None = None,
    like: str = "glyphs",
    progress: ProgressReporter = SILENT,
) -> Path:
    """Write the data set to the folder `out`: about `mean_examples` training images from each of
    `writers`.

    `test_fraction` of each writer's images are held out. Where these are not given, `like` says
    what they are.
    """
    if like not in SHAPES:
        raise ConfigError(f"like: should be {' or '.join(SHAPES)}, not {like!r}")
    mean_examples = SHAPES[like][0] if mean_examples is None else mean_examples
    test_fraction = SHAPES[like][1] if test_fraction is None else test_fraction
    outside = f"test_fraction: must be between 0 and 0.5, got {test_fraction}"
    refuse(
        (writers < 1, f"writers: must be at least 1, got {writers}"),
        (not mean_examples >= 10, f"mean_examples: must be at least 10, got {mean_examples}"),
        (not 0 <= test_fraction <= 0.5, outside),
    )
    shapes = load_shapes()
    source = {
        "embedded": "glyphs",
        "seed": seed,
        "writers": writers,
        "mean_examples": mean_examples,
        "test_fraction": test_fraction,
    }
    with DatasetWriter(
        out,
        name="glyphs" if like == "glyphs" else f"glyphs-like-{like}",
        kind="dense",
        shape=(SIDE, SIDE),
        actions=EMNIST_ACTIONS,
        lower_case=EMNIST_LOWER_CASE,
        scale=1 / 255,
        dtype=np.uint8,
        source=source if like == "glyphs" else {**source, "like": like},
    ) as writer:
        with progress.task("Drawing writers", writers, unit="writers") as advance:
            for number in range(writers):
                images, labels = _draw(seed, number, shapes, mean_examples / (1 - test_fraction))
                held_out = round(test_fraction * len(labels))
                for split, part in (("test", slice(0, held_out)), ("train", slice(held_out, None))):
                    rows = Ragged(np.arange(len(labels[part]) + 1), labels[part])
                    writer.add_many(
                        np.full(len(rows), f"writer{number:05d}"), images[part], rows, split=split
                    )
                advance(1)
        return writer.finish(progress)


def label_frequencies() -> np.ndarray:
    """Frequency of each of the 62 classes: float64 [62]."""
    letters = [int(count) for count in f"{_UPPER_HUNDREDS} {_LOWER_HUNDREDS}".split()]
    counts = np.array([_DIGIT_HUNDREDS] * 10 + letters, np.float64)
    return np.asarray(counts / counts.sum())


def _draw(
    seed: int, number: int, shapes: Shapes, mean_examples: float
) -> tuple[np.ndarray, np.ndarray]:
    """All images of one writer, in random order, and their labels."""
    rng = generator(seed, Purpose.DATA, number)
    _, centre, spread = _SHORT_FORMS if rng.random() < _SHORT_FORMS[0] else _LONG_FORMS
    size = round(mean_examples * float(np.clip(rng.normal(centre, spread), *_SIZE_RANGE)))
    shares = rng.dirichlet(_LABEL_LOYALTY * label_frequencies())
    labels = rng.choice(len(EMNIST_ACTIONS), size, p=shares).astype(np.int32)
    return draw_characters(rng, draw_writer(rng, shapes), shapes, labels), labels
