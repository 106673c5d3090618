"""Pixels as bytes where that loses nothing: published images are multiples of 1/255 stored as floats."""

import numpy as np

BYTE_SCALE = 1 / 255


class NotBytes(Exception):
    """Some pixel is no multiple of 1/255: the data set has to be stored as floats."""


def as_bytes(pixels: np.ndarray) -> np.ndarray:
    """Float pixels as uint8 with scale 1/255; raises `NotBytes` unless every one is exactly representable."""
    levels = np.rint(pixels * np.float32(255))
    with np.errstate(invalid="ignore"):
        inside = (levels >= 0) & (levels <= 255)
        close = np.abs(levels * np.float32(BYTE_SCALE) - pixels) < 1e-6
    if not (inside & close).all():  # NaN is neither
        raise NotBytes
    return levels.astype(np.uint8)
