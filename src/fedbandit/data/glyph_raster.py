"""Drawing pen strokes on a pixel grid: the ink of a pixel depends on its distance to the nearest stroke."""

import numba
import numpy as np

SIDE = 28  # pixels


@numba.njit(nogil=True, cache=True)
def rasterise(points, strokes, half_width, softness, darkness, out):  # type: ignore[no-untyped-def]
    """Fill `out`, uint8 [n, 28, 28], white paper 255; `points` float32 [n, strokes, points, 2] in pixels, x then y."""
    nearest = np.empty((SIDE, SIDE), np.float32)
    for image in range(len(points)):
        nearest[:] = 1e6
        reach = half_width[image] + softness[image]
        for stroke in range(strokes[image]):
            path = points[image, stroke]
            for i in range(len(path) - 1):
                _mark_segment(nearest, path[i, 0], path[i, 1], path[i + 1, 0], path[i + 1, 1], reach)
        for row in range(SIDE):
            for column in range(SIDE):
                edge = (reach - np.sqrt(nearest[row, column])) / (2 * softness[image])
                ink = darkness[image] * min(max(edge, 0.0), 1.0)
                out[image, row, column] = np.uint8(255.0 * (1.0 - ink) + 0.5)


@numba.njit(nogil=True, cache=True)
def _mark_segment(nearest, x0, y0, x1, y1, reach):  # type: ignore[no-untyped-def]
    """Lower the squared distances of the pixels within reach of one straight piece."""
    left, right = max(int(np.floor(min(x0, x1) - reach)), 0), min(int(np.ceil(max(x0, x1) + reach)), SIDE - 1)
    top, bottom = max(int(np.floor(min(y0, y1) - reach)), 0), min(int(np.ceil(max(y0, y1) + reach)), SIDE - 1)
    dx, dy = x1 - x0, y1 - y0
    length = dx * dx + dy * dy + np.float32(1e-9)
    for row in range(top, bottom + 1):
        for column in range(left, right + 1):
            px, py = column - x0, row - y0
            along = min(max((px * dx + py * dy) / length, 0.0), 1.0)
            ox, oy = px - along * dx, py - along * dy
            distance = ox * ox + oy * oy
            nearest[row, column] = min(nearest[row, column], distance)
