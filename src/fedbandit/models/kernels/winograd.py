"""5x5 convolutions, each followed by a 2x2 max-pool and a relu, in fewer multiplications: kernels for the CNN learner.

The first convolution, of few channels, is a matrix product over the 6x6 inputs under each pooling window. The second
is Winograd's F(4x4, 5x5): one tile of 8x8 inputs gives the 4x4 outputs of four windows, by 64 products in place of 400.
The products over channels are left to the caller; here are the changes of basis around them. Knows nothing of clients,
losses or batches.
"""

import numba
import numpy as np

NARROW, WIDE = (
    32,
    64,
)  # channels of the two convolutions; fixed, so that the loops over them become vector code
BORDER = 2  # 'same' padding of a 5x5 kernel
PATCH_SIDE, PATCH = 6, 36  # inputs for the 2x2 outputs under one pooling window
SIDE, TILE = 8, 64  # inputs of a tile
STEP = 4  # outputs of a tile along one side, and the distance of tiles
GROUP = 2  # tiles that are moved to and from the big arrays at a time: longer runs, still in the first cache
RUN = GROUP * WIDE
# Kernels to tiles, one side, with the points 0, ±1, ±2, ±1/2, ∞: a kernel's tile is `_KERNEL_SIDE @ kernel @
# _KERNEL_SIDE.T`.
_KERNEL_SIDE = np.array(
    [
        [-1, 0, 0, 0, 0],
        [-2 / 9, -2 / 9, -2 / 9, -2 / 9, -2 / 9],
        [-2 / 9, 2 / 9, -2 / 9, 2 / 9, -2 / 9],
        [1 / 90, 1 / 45, 2 / 45, 4 / 45, 8 / 45],
        [1 / 90, -1 / 45, 2 / 45, -4 / 45, 8 / 45],
        [32 / 45, 16 / 45, 8 / 45, 4 / 45, 2 / 45],
        [32 / 45, -16 / 45, 8 / 45, -4 / 45, 2 / 45],
        [0, 0, 0, 0, 1],
    ]
)
KERNEL_TO_TILE = np.kron(_KERNEL_SIDE, _KERNEL_SIDE)  # [64, 25]
_compiled = numba.njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy")
_inlined = numba.njit(
    nogil=True, cache=True, fastmath={"contract"}, error_model="numpy", inline="always"
)


def tiles_over(windows: int) -> tuple[int, int]:
    """The tiles that cover a side of this many pooling windows, and the inputs they see, border included."""
    tiles = -(-2 * windows // STEP)
    return tiles, STEP * tiles + 2 * BORDER


@_compiled
def patches(images, padded, out):  # type: ignore[no-untyped-def]
    """[n, H, W, C] -> [n, H // 2, W // 2, 36 · C]: what each pooling window sees, zero beyond the border.

    `padded` [H+4, W+4, C] is room to work in whose border is zero.
    """
    n, height, width, channels = images.shape
    for i in range(n):
        for y in range(height):
            for x in range(width):
                for c in range(channels):
                    padded[y + BORDER, x + BORDER, c] = images[i, y, x, c]
        for y in range(height // 2):
            for x in range(width // 2):
                patch = out[i, y, x]
                for r in range(PATCH_SIDE):
                    row = padded[2 * y + r]
                    if channels == 1:  # the usual case, and a loop of known length
                        for s in range(PATCH_SIDE):
                            patch[r * PATCH_SIDE + s] = row[2 * x + s, 0]
                    else:
                        for s in range(PATCH_SIDE):
                            for c in range(channels):
                                patch[(r * PATCH_SIDE + s) * channels + c] = row[2 * x + s, c]


def spread_kernel(kernel: np.ndarray, out: np.ndarray) -> None:
    """[5, 5, C, 32] -> [6, 6, C, 4, 32]: the kernel as each of the four places of a window applies it to the patch."""
    out[:] = 0
    for s in range(4):
        y, x = divmod(s, 2)
        out[y : y + 5, x : x + 5, :, s] = kernel


@_compiled
def gather_kernel(spread, out):  # type: ignore[no-untyped-def]
    """The gradient of `spread_kernel`."""
    side, _, channels, _ = out.shape
    for y in range(side):
        for x in range(side):
            for i in range(channels):
                for c in range(NARROW):
                    total = spread[y, x, i, 0, c] + spread[y, x + 1, i, 1, c]
                    out[y, x, i, c] = (
                        total + spread[y + 1, x, i, 2, c] + spread[y + 1, x + 1, i, 3, c]
                    )


@_compiled
def pool_windows(windows, bias, out, chosen):  # type: ignore[no-untyped-def]
    """relu(max over the 4 places of a window + bias): [n, h, w, 4 · 32] -> `out` [n, rows, columns, 32], in its border.

    `chosen` [n, h, w, 32] keeps which place was largest, the first among equals.
    """
    n, height, width, _ = windows.shape
    zero = bias.dtype.type(0)
    for i in range(n):
        for y in range(height):
            for x in range(width):
                window, pooled, place = (
                    windows[i, y, x],
                    out[i, y + BORDER, x + BORDER],
                    chosen[i, y, x],
                )
                for c in range(NARROW):
                    best, at = window[c], np.int32(0)
                    for s in range(1, 4):
                        value = window[s * NARROW + c]
                        at = np.int32(s) if value > best else at
                        best = max(value, best)
                    pooled[c] = max(best + bias[c], zero)
                    place[c] = at


@_compiled
def unpool_windows(gradient, pooled, chosen, windows, bias_gradient):  # type: ignore[no-untyped-def]
    """The gradient of `pool_windows`: [n, rows, columns, 32] -> [n, h, w, 4 · 32], and added to the bias's."""
    n, height, width, _ = windows.shape
    zero = gradient.dtype.type(0)
    for i in range(n):
        for y in range(height):
            for x in range(width):
                above, below = (
                    gradient[i, y + BORDER, x + BORDER],
                    pooled[i, y + BORDER, x + BORDER],
                )
                window, place = windows[i, y, x], chosen[i, y, x]
                for c in range(NARROW):
                    value = above[c] if below[c] > 0 else zero
                    bias_gradient[c] += value
                    for s in range(4):
                        window[s * NARROW + c] = value if place[c] == s else zero


@_inlined
def _inputs_to_side(source, step, target, target_step):  # type: ignore[no-untyped-def]
    """Eight rows of inputs to eight rows of the tiles' basis; rows lie `step` apart."""
    kind = source.dtype.type
    quarter, half, two, four, five = kind(0.25), kind(0.5), kind(2), kind(4), kind(5)
    for c in range(NARROW):
        d0, d1, d2, d3 = source[c], source[step + c], source[2 * step + c], source[3 * step + c]
        d4, d5, d6, d7 = (
            source[4 * step + c],
            source[5 * step + c],
            source[6 * step + c],
            source[7 * step + c],
        )
        target[c] = (d6 - d0) + kind(5.25) * (d2 - d4)
        even, odd = (d2 + d6) - kind(4.25) * d4, (d1 + d5) - kind(4.25) * d3
        target[target_step + c] = even + odd
        target[2 * target_step + c] = even - odd
        even, odd = d6 + quarter * (d2 - five * d4), half * (d1 - five * d3) + two * d5
        target[3 * target_step + c] = even + odd
        target[4 * target_step + c] = even - odd
        even, odd = d6 + four * d2 - five * d4, two * d1 + half * (d5 - five * d3)
        target[5 * target_step + c] = even + odd
        target[6 * target_step + c] = even - odd
        target[7 * target_step + c] = (d7 - d1) + kind(5.25) * (d3 - d5)


@_inlined
def _side_to_inputs(source, step, target, target_step, start):  # type: ignore[no-untyped-def]
    """The gradient of `_inputs_to_side`, added to `start` times what the target holds."""
    kind = source.dtype.type
    quarter, half, two, four, five = kind(0.25), kind(0.5), kind(2), kind(4), kind(5)
    for c in range(NARROW):
        v0, v7 = kind(5.25) * source[c], source[7 * step + c]
        plus, minus = (
            source[step + c] + source[2 * step + c],
            source[step + c] - source[2 * step + c],
        )
        plus_2, minus_2 = (
            source[3 * step + c] + source[4 * step + c],
            source[3 * step + c] - source[4 * step + c],
        )
        plus_h, minus_h = (
            source[5 * step + c] + source[6 * step + c],
            source[5 * step + c] - source[6 * step + c],
        )
        target[c] = start * target[c] - source[c]
        i1 = minus + half * minus_2 + two * minus_h - v7
        i2 = v0 + plus + quarter * plus_2 + four * plus_h
        i3 = kind(5.25) * v7 - kind(4.25) * minus - kind(2.5) * (minus_2 + minus_h)
        i4 = -v0 - kind(4.25) * plus - five * (quarter * plus_2 + plus_h)
        i5 = minus + two * minus_2 + half * minus_h - kind(5.25) * v7
        i6 = source[c] + plus + plus_2 + plus_h
        target[target_step + c] = start * target[target_step + c] + i1
        target[2 * target_step + c] = start * target[2 * target_step + c] + i2
        target[3 * target_step + c] = start * target[3 * target_step + c] + i3
        target[4 * target_step + c] = start * target[4 * target_step + c] + i4
        target[5 * target_step + c] = start * target[5 * target_step + c] + i5
        target[6 * target_step + c] = start * target[6 * target_step + c] + i6
        target[7 * target_step + c] = start * target[7 * target_step + c] + v7


@_compiled
def inputs_to_tiles(padded, out):  # type: ignore[no-untyped-def]
    """[n, 4 · tiles + 4, 4 · tiles + 4, 32] -> [64, n · tiles · tiles, 32]: the tiles' inputs in their basis."""
    n, rows, columns, _ = padded.shape
    down, across = rows // STEP - 1, columns // STEP - 1
    count = n * down * across
    source, target = padded.reshape(-1), out.reshape(-1)
    half = np.empty(TILE * NARROW, padded.dtype)
    group = np.empty(TILE * GROUP * NARROW, padded.dtype)
    for first in range(0, count, GROUP):
        taken = min(GROUP, count - first)
        for j in range(taken):
            image, place = divmod(first + j, down * across)
            y, x = divmod(place, across)
            for r in range(SIDE):
                start = ((image * rows + STEP * y + r) * columns + STEP * x) * NARROW
                _inputs_to_side(
                    source[start : start + SIDE * NARROW], NARROW, half[r * NARROW :], SIDE * NARROW
                )
            for s in range(SIDE):
                to = group[(s * GROUP + j) * NARROW :]
                _inputs_to_side(half[s * SIDE * NARROW :], NARROW, to, SIDE * GROUP * NARROW)
        for k in range(TILE):
            of = group[k * GROUP * NARROW :]
            to = target[(k * count + first) * NARROW :]
            for c in range(taken * NARROW):
                to[c] = of[c]


@_compiled
def tiles_to_inputs(tiles, padded):  # type: ignore[no-untyped-def]
    """The gradient of `inputs_to_tiles`; tiles overlap and add up."""
    n, rows, columns, _ = padded.shape
    down, across = rows // STEP - 1, columns // STEP - 1
    count = n * down * across
    source, target = tiles.reshape(-1), padded.reshape(-1)
    zero, one = padded.dtype.type(0), padded.dtype.type(1)
    half = np.zeros(TILE * NARROW, padded.dtype)
    group = np.empty(TILE * GROUP * NARROW, padded.dtype)
    target[:] = zero
    for first in range(0, count, GROUP):
        taken = min(GROUP, count - first)
        for k in range(TILE):
            of = source[(k * count + first) * NARROW :]
            to = group[k * GROUP * NARROW :]
            for c in range(taken * NARROW):
                to[c] = of[c]
        for j in range(taken):
            image, place = divmod(first + j, down * across)
            y, x = divmod(place, across)
            for s in range(SIDE):
                of = group[(s * GROUP + j) * NARROW :]
                _side_to_inputs(of, SIDE * GROUP * NARROW, half[s * SIDE * NARROW :], NARROW, zero)
            for r in range(SIDE):
                start = ((image * rows + STEP * y + r) * columns + STEP * x) * NARROW
                to = target[start : start + SIDE * NARROW]
                _side_to_inputs(half[r * NARROW :], SIDE * NARROW, to, NARROW, one)


@_inlined
def _side_to_outputs(source, step, target, target_step, run):  # type: ignore[no-untyped-def]
    """Eight rows of the tiles' basis to the four outputs of a side."""
    kind = source.dtype.type
    for c in range(run):
        plus, minus = (
            source[step + c] + source[2 * step + c],
            source[step + c] - source[2 * step + c],
        )
        plus_2, minus_2 = (
            source[3 * step + c] + source[4 * step + c],
            source[3 * step + c] - source[4 * step + c],
        )
        plus_h, minus_h = (
            source[5 * step + c] + source[6 * step + c],
            source[5 * step + c] - source[6 * step + c],
        )
        target[c] = source[c] + plus + plus_2 + plus_h
        target[target_step + c] = minus + kind(2) * minus_2 + kind(0.5) * minus_h
        target[2 * target_step + c] = plus + kind(4) * plus_2 + kind(0.25) * plus_h
        target[3 * target_step + c] = (
            minus + kind(8) * minus_2 + kind(0.125) * minus_h + source[7 * step + c]
        )


@_compiled
def pool_tiles(tiles, bias, out, chosen):  # type: ignore[no-untyped-def]
    """relu(max over a window's 2x2 outputs + bias): [64, n · tiles, 64] -> `out` [n, h, w, 64] and `chosen`."""
    _, height, width, _ = out.shape
    down, across, count = (height + 1) // 2, (width + 1) // 2, tiles.shape[1]
    source, zero = tiles.reshape(-1), tiles.dtype.type(0)
    rows = np.zeros(SIDE * RUN, tiles.dtype)
    half = np.empty(STEP * SIDE * RUN, tiles.dtype)
    outputs = np.empty(STEP * STEP * RUN, tiles.dtype)
    for first in range(0, count, GROUP):
        taken = min(GROUP, count - first)
        for s in range(SIDE):
            for r in range(SIDE):
                of, to = source[((r * SIDE + s) * count + first) * WIDE :], rows[r * RUN :]
                for c in range(taken * WIDE):
                    to[c] = of[c]
            _side_to_outputs(rows, RUN, half[s * RUN :], SIDE * RUN, RUN)
        for q in range(STEP):
            _side_to_outputs(half[q * SIDE * RUN :], RUN, outputs[q * STEP * RUN :], RUN, RUN)
        for j in range(taken):
            image, place = divmod(first + j, down * across)
            y, x = divmod(place, across)
            for v in range(2 * y, min(2 * y + 2, height)):
                for u in range(2 * x, min(2 * x + 2, width)):
                    window = outputs[((v % 2) * STEP + u % 2) * 2 * RUN + j * WIDE :]
                    pooled, at = out[image, v, u], chosen[image, v, u]
                    for c in range(WIDE):
                        best, where = window[c], np.int32(0)
                        value = window[RUN + c]
                        where = np.int32(1) if value > best else where
                        best = max(value, best)
                        value = window[STEP * RUN + c]
                        where = np.int32(2) if value > best else where
                        best = max(value, best)
                        value = window[(STEP + 1) * RUN + c]
                        where = np.int32(3) if value > best else where
                        best = max(value, best)
                        pooled[c] = max(best + bias[c], zero)
                        at[c] = where


@_inlined
def _outputs_to_side(source, step, target, target_step, run):  # type: ignore[no-untyped-def]
    """The gradient of `_side_to_outputs`."""
    kind = source.dtype.type
    for c in range(run):
        y0, y1, y2, y3 = source[c], source[step + c], source[2 * step + c], source[3 * step + c]
        target[c] = y0
        even, odd = y0 + y2, y1 + y3
        target[target_step + c] = even + odd
        target[2 * target_step + c] = even - odd
        even, odd = y0 + kind(4) * y2, kind(2) * y1 + kind(8) * y3
        target[3 * target_step + c] = even + odd
        target[4 * target_step + c] = even - odd
        even, odd = y0 + kind(0.25) * y2, kind(0.5) * y1 + kind(0.125) * y3
        target[5 * target_step + c] = even + odd
        target[6 * target_step + c] = even - odd
        target[7 * target_step + c] = y3


@_compiled
def unpool_tiles(gradient, pooled, chosen, tiles, bias_gradient):  # type: ignore[no-untyped-def]
    """The gradient of `pool_tiles`: [n, h, w, 64] -> [64, n · tiles, 64], and added to the bias's."""
    _, height, width, _ = gradient.shape
    down, across, count = (height + 1) // 2, (width + 1) // 2, tiles.shape[1]
    target, zero = tiles.reshape(-1), tiles.dtype.type(0)
    outputs = np.empty(STEP * STEP * RUN, tiles.dtype)
    half = np.empty(STEP * SIDE * RUN, tiles.dtype)
    rows = np.empty(SIDE * RUN, tiles.dtype)
    for first in range(0, count, GROUP):
        taken = min(GROUP, count - first)
        outputs[:] = zero  # tiles may reach beyond the windows
        for j in range(taken):
            image, place = divmod(first + j, down * across)
            y, x = divmod(place, across)
            for v in range(2 * y, min(2 * y + 2, height)):
                for u in range(2 * x, min(2 * x + 2, width)):
                    window = outputs[((v % 2) * STEP + u % 2) * 2 * RUN + j * WIDE :]
                    above, below, at = (
                        gradient[image, v, u],
                        pooled[image, v, u],
                        chosen[image, v, u],
                    )
                    for c in range(WIDE):
                        value = above[c] if below[c] > zero else zero
                        window[c] = value if at[c] == 0 else zero
                        window[RUN + c] = value if at[c] == 1 else zero
                        window[STEP * RUN + c] = value if at[c] == 2 else zero
                        window[(STEP + 1) * RUN + c] = value if at[c] == 3 else zero
                    for c in range(WIDE):
                        bias_gradient[c] += above[c] if below[c] > zero else zero
        for q in range(STEP):
            _outputs_to_side(outputs[q * STEP * RUN :], RUN, half[q * SIDE * RUN :], RUN, RUN)
        for s in range(SIDE):
            _outputs_to_side(half[s * RUN :], SIDE * RUN, rows, RUN, RUN)
            for r in range(SIDE):
                of, to = rows[r * RUN :], target[((r * SIDE + s) * count + first) * WIDE :]
                for c in range(taken * WIDE):
                    to[c] = of[c]
