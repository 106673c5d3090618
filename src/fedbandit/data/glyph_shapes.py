"""Stroke descriptions turned into arrays of points, evenly spaced along each stroke; knows nothing of writers."""

from dataclasses import dataclass

import numpy as np

from fedbandit.data.glyph_strokes import FORMS
from fedbandit.data.labels import EMNIST_ACTIONS

MAX_STROKES = 4
POINTS = 24  # per stroke: enough that the straight pieces between them do not show at 28 pixels


@dataclass(frozen=True)
class Shapes:
    """All forms of all characters, numbered through; unused strokes are zero."""

    points: np.ndarray  # float32 [forms, strokes, points, 2]
    strokes: np.ndarray  # int32 [forms]: how many strokes are used
    first: np.ndarray  # int32 [62 + 1]: the forms of class c are first[c]:first[c + 1]


def load_shapes() -> Shapes:
    """Read the stroke table."""
    forms = [_parse(form) for character in EMNIST_ACTIONS for form in FORMS[character]]
    points = np.zeros((len(forms), MAX_STROKES, POINTS, 2), np.float32)
    for place, strokes in zip(points, forms, strict=True):
        place[: len(strokes)] = strokes
    counts = np.array([len(strokes) for strokes in forms], np.int32)
    starts = np.cumsum([0, *(len(FORMS[character]) for character in EMNIST_ACTIONS)], dtype=np.int32)
    return Shapes(points, counts, starts)


def _parse(form: str) -> list[np.ndarray]:
    return [_stroke(*description.split()) for description in form.split(";")]


def _stroke(kind: str, *numbers: str) -> np.ndarray:
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
        0.5 * (2 * b + (c - a) * t + (2 * a - 5 * b + 4 * c - d) * t**2 + (3 * b - a - 3 * c + d) * t**3)
        for a, b, c, d in zip(padded, padded[1:], padded[2:], padded[3:], strict=False)
    ]
    return np.concatenate(pieces)


def _evenly_spaced(path: np.ndarray) -> np.ndarray:
    along = np.concatenate([[0], np.cumsum(np.hypot(*np.diff(path, axis=0).T))])
    places = np.linspace(0, along[-1], POINTS)
    if len(path) <= 6:  # straight lines: points move to the nearest corner, so that corners stay sharp
        for corner in along[1:-1]:
            places[np.abs(places - corner).argmin()] = corner
    return np.stack([np.interp(places, along, path[:, axis]) for axis in (0, 1)], axis=1)
