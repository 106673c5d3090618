"""The colours of curves: seen on white, and told apart by people who see fewer colours."""

from itertools import combinations

import numpy as np
import pytest

from fedbandit.core.errors import ConfigError
from fedbandit.results.plots import COLOURS, OTHER_COLOURS, draw_curves, require_picture, styles_of

ALL = (*COLOURS.values(), *OTHER_COLOURS)

# What colours look like without one of the three kinds of cones (Machado et al. 2009, severity 1), in linear RGB.
EYES = {
    "usual": np.eye(3),
    "no red cones": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "no green cones": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "no blue cones": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.3039],
    ],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def _linear(colour):
    parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def _lab(linear):
    x, y, z = np.cbrt(np.maximum(TO_XYZ @ linear.clip(0, 1) / TO_XYZ.sum(axis=1), 1e-6))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("colour", ALL)
def test_lines_stand_out_from_white(colour):
    luminance = TO_XYZ[1] @ _linear(colour)
    assert 1.05 / (luminance + 0.05) >= 3  # what WCAG 2.1 (1.4.11) asks of graphics


@pytest.mark.parametrize("eye", EYES)
def test_no_two_colours_look_alike(eye):
    """A distance of 2.3 in CIELAB is just noticeable side by side; lines in a legend need several times that."""
    seen = {colour: _lab(np.array(EYES[eye]) @ _linear(colour)) for colour in ALL}
    for one, other in combinations(ALL, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 10, (one, other)


def test_other_names_take_the_policies_colours_only_where_no_policy_is_named():
    palette = list(COLOURS.values())
    assert [colour for colour, _ in styles_of(["one", "two", "three"]).values()] == palette[:3]
    assert styles_of(["one", "softmax"]) == {
        "one": (OTHER_COLOURS[0], False),
        "softmax": (COLOURS["softmax"], False),
    }


def test_a_name_that_no_picture_can_have_is_refused(tmp_path):
    for name in ("picture", "picture.foo", "picture.png.gz"):
        with pytest.raises(ConfigError, match=r"must end in \.png or \.svg"):
            require_picture(tmp_path / name)
        with pytest.raises(ConfigError):
            draw_curves({}, tmp_path / name, title="")
    require_picture(tmp_path / "picture.PNG")
    assert not list(tmp_path.iterdir())
