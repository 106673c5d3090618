"""Writers of the glyphs data set: a style is drawn once for a writer, and every character they draw varies around it.

Turns (writer, classes) into strokes in pixels and pen settings; knows nothing of files or splits.
"""

from dataclasses import dataclass

import numpy as np

from fedbandit.data.glyph_raster import SIDE, rasterise
from fedbandit.data.glyph_shapes import MAX_STROKES, Shapes
from fedbandit.data.labels import EMNIST_ACTIONS

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
_SIZE_KEPT = 0.35  # how much of a small letter's smallness survives the fit to the box: 0 none, 1 all
_POSITION, _POSITION_DRAWING = 0.5, 0.8  # pixels
_HALF_WIDTH, _WIDTH, _WIDTH_DRAWING = 1.5, 0.25, 0.1  # of the pen in pixels; of its logarithm
_OTHER_FORM = 0.1  # probability that a drawing uses another than the writer's usual form
_WAVES = np.array([[0, 3.1, 0], [0, 6.3, 1], [3.1, 0, 0], [6.3, 0, 1], [4.4, 4.4, 0], [4.4, -4.4, 1]], np.float32)


@dataclass(frozen=True)
class Writer:
    """What stays the same over all drawings of one writer."""

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
    usual = (rng.random(classes) ** 1.5 * forms).astype(np.int64)  # the power favours the more common forms
    return Writer(
        form=shapes.first[:-1] + usual,
        slant=_MEAN_SLANT + _SLANT * rng.standard_normal(),
        aspect=_ASPECT * rng.standard_normal(),
        rotation=_ROTATION * rng.standard_normal(),
        warp=_WARP * rng.standard_normal((waves, 2)) + _WARP_HABIT * rng.standard_normal((classes, waves, 2)),
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


def draw_characters(rng: np.random.Generator, writer: Writer, shapes: Shapes, labels: np.ndarray) -> np.ndarray:
    """The given classes in this writer's hand: uint8 [n, 28, 28], white paper 255."""
    n = len(labels)
    other = shapes.first[labels] + (rng.random(n) * np.diff(shapes.first)[labels]).astype(np.int64)
    form = np.where(rng.random(n) < _OTHER_FORM, other, writer.form[labels])
    used = np.arange(MAX_STROKES) < shapes.strokes[form][:, None]
    points = _vary_strokes(rng, writer, labels, shapes.points[form], used)
    points = _bend(points, writer.warp[labels] + _WARP_DRAWING * rng.standard_normal((n, len(_WAVES), 2)))
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
    rng: np.random.Generator, writer: Writer, labels: np.ndarray, points: np.ndarray, used: np.ndarray
) -> np.ndarray:
    """Each stroke is moved, turned and stretched about its own middle."""
    shift = writer.stroke_shift[labels] + _SHIFT_DRAWING * rng.standard_normal((*used.shape, 2))
    turn = writer.stroke_turn[labels] + _TURN_DRAWING * rng.standard_normal(used.shape)
    stretch = np.exp(writer.stroke_stretch[labels] + _STRETCH_DRAWING * rng.standard_normal(used.shape))
    middle = points.mean(axis=2, keepdims=True)
    cos, sin = (stretch * np.cos(turn))[..., None], (stretch * np.sin(turn))[..., None]
    x, y = np.moveaxis(points - middle, -1, 0)
    return np.stack([cos * x - sin * y, sin * x + cos * y], axis=-1) + middle + shift[:, :, None]


def _bend(points: np.ndarray, amplitudes: np.ndarray) -> np.ndarray:
    """Push the points along a few smooth waves over the plane; amplitudes [n, waves, 2]."""
    waves = np.sin(points @ _WAVES[:, :2].T + _WAVES[:, 2])
    return points + np.einsum("nspw,nwd->nspd", waves, amplitudes)


def _tilt(rng: np.random.Generator, writer: Writer, points: np.ndarray) -> np.ndarray:
    """Slant, narrowness and rotation of the whole character."""
    n = len(points)
    slant = writer.slant + _SLANT_DRAWING * rng.standard_normal(n)
    width = np.exp(writer.aspect + _ASPECT_DRAWING * rng.standard_normal(n))
    angle = writer.rotation + _ROTATION_DRAWING * rng.standard_normal(n)
    x, y = np.moveaxis(points, -1, 0)
    slant, width, cos, sin = (part[:, None, None] for part in (slant, width, np.cos(angle), np.sin(angle)))
    x, y = x * width - slant * y, y
    return np.stack([cos * x - sin * y, sin * x + cos * y], axis=-1)


def _fit_to_box(rng: np.random.Generator, writer: Writer, points: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Centre the character and scale it to pixels by its longer side, as the published images are prepared."""
    n = len(points)
    mask = used[:, :, None, None]
    low = np.where(mask, points, np.inf).min(axis=(1, 2))
    high = np.where(mask, points, -np.inf).max(axis=(1, 2))
    longer = (high - low).max(axis=1)
    pixels = _SIZE_PIXELS * np.exp(writer.size + _SIZE_DRAWING * rng.standard_normal(n)) * longer**_SIZE_KEPT
    scale = np.minimum(pixels, SIDE - 3.0) / longer
    target = (SIDE - 1) / 2 + writer.position + _POSITION_DRAWING * rng.standard_normal((n, 2))
    return (points - ((low + high) / 2)[:, None, None]) * scale[:, None, None, None] + target[:, None, None]


def _speckle(rng: np.random.Generator, writer: Writer, images: np.ndarray) -> np.ndarray:
    """Uneven ink: noise on what is drawn, never on the paper, which stays exactly white."""
    noise = rng.standard_normal(images.shape, np.float32) * np.float32(writer.speckle * 255)
    return np.where(images < 255, np.clip(images + noise, 0, 254), images).astype(np.uint8)
