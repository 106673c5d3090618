"""5x5 convolutions, each followed by a 2x2 max-pool and a relu, in fewer multiplications: kernels for the CNN learner.

Winograd's F(2x2, 5x5): one tile of 6x6 inputs gives the 2x2 outputs of one pooling window, by 36 products in place of
100. The products over channels are matrix products and are left to the caller; here are the changes of basis around
them. Knows nothing of clients, losses or batches.
"""

import numba
import numpy as np

TILE = 36  # 6x6 inputs for the 2x2 outputs under one pooling window
NARROW, WIDE = 32, 64  # channels of the two convolutions; fixed, so that the loops over them become vector code
SIDE = 6
GROUP = 4  # tiles that are moved to and from the big arrays at a time: longer runs, still in the first cache
BORDER = 2  # 'same' padding of a 5x5 kernel
# Kernels to tiles, one side; tiles of 5x5 kernels are `_KERNEL_SIDE @ kernel @ _KERNEL_SIDE.T`. Points 0, ±1, ±2, ∞.
_KERNEL_SIDE = np.array(
    [
        [1 / 4, 0, 0, 0, 0],
        [-1 / 6, -1 / 6, -1 / 6, -1 / 6, -1 / 6],
        [-1 / 6, 1 / 6, -1 / 6, 1 / 6, -1 / 6],
        [1 / 24, 1 / 12, 1 / 6, 1 / 3, 2 / 3],
        [1 / 24, -1 / 12, 1 / 6, -1 / 3, 2 / 3],
        [0, 0, 0, 0, 1],
    ]
)
KERNEL_TO_TILE = np.kron(_KERNEL_SIDE, _KERNEL_SIDE)  # [36, 25]
_compiled = numba.njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy")
_inlined = numba.njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy", inline="always")


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
                for r in range(SIDE):
                    row = padded[2 * y + r]
                    if channels == 1:  # the usual case, and a loop of known length
                        for s in range(SIDE):
                            patch[r * SIDE + s] = row[2 * x + s, 0]
                    else:
                        for s in range(SIDE):
                            for c in range(channels):
                                patch[(r * SIDE + s) * channels + c] = row[2 * x + s, c]


def spread_kernel(kernel: np.ndarray, out: np.ndarray) -> None:
    """[5, 5, C, 32] -> [6, 6, C, 4, 32]: the kernel as each of the four places of a window applies it to the patch."""
    out[:] = 0
    for s in range(4):
        y, x = divmod(s, 2)
        out[y : y + 5, x : x + 5, :, s] = kernel


def gather_kernel(spread: np.ndarray, out: np.ndarray) -> None:
    """The gradient of `spread_kernel`."""
    out[:] = spread[:5, :5, :, 0]
    for s in range(1, 4):
        y, x = divmod(s, 2)
        out += spread[y : y + 5, x : x + 5, :, s]


@_compiled
def pool_windows(windows, bias, out, chosen):  # type: ignore[no-untyped-def]
    """relu(max over the 4 places of a window + bias): [n, h, w, 4 · 32] -> the inside of `out` [n, h+4, w+4, 32].

    `chosen` [n, h, w, 32] keeps which place was largest, the first among equals.
    """
    n, height, width, _ = windows.shape
    zero = bias.dtype.type(0)
    for i in range(n):
        for y in range(height):
            for x in range(width):
                window, pooled, place = windows[i, y, x], out[i, y + BORDER, x + BORDER], chosen[i, y, x]
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
    """The gradient of `pool_windows`: the inside of [n, h+4, w+4, 32] -> [n, h, w, 4 · 32], and added to the bias's."""
    n, height, width, _ = windows.shape
    zero = gradient.dtype.type(0)
    for i in range(n):
        for y in range(height):
            for x in range(width):
                above, below = gradient[i, y + BORDER, x + BORDER], pooled[i, y + BORDER, x + BORDER]
                window, place = windows[i, y, x], chosen[i, y, x]
                for c in range(NARROW):
                    value = above[c] if below[c] > 0 else zero
                    bias_gradient[c] += value
                    for s in range(4):
                        window[s * NARROW + c] = value if place[c] == s else zero


@_inlined
def _inputs_to_side(source, step, target, target_step):  # type: ignore[no-untyped-def]
    """Six rows of inputs to six rows of the tiles' basis; rows lie `step` apart."""
    two, four, five = source.dtype.type(2), source.dtype.type(4), source.dtype.type(5)
    for c in range(NARROW):
        d0, d1, d2 = source[c], source[step + c], source[2 * step + c]
        d3, d4, d5 = source[3 * step + c], source[4 * step + c], source[5 * step + c]
        even, odd, even_2, odd_2 = d4 - four * d2, d3 - four * d1, d4 - d2, two * (d3 - d1)
        target[c] = four * d0 - five * d2 + d4
        target[target_step + c] = even + odd
        target[2 * target_step + c] = even - odd
        target[3 * target_step + c] = even_2 + odd_2
        target[4 * target_step + c] = even_2 - odd_2
        target[5 * target_step + c] = four * d1 - five * d3 + d5


@_inlined
def _side_to_inputs(source, step, target, target_step, start):  # type: ignore[no-untyped-def]
    """The gradient of `_inputs_to_side`, added to `start` times what the target holds."""
    two, four, five = source.dtype.type(2), source.dtype.type(4), source.dtype.type(5)
    for c in range(NARROW):
        v0, v1, v2 = source[c], source[step + c], source[2 * step + c]
        v3, v4, v5 = source[3 * step + c], source[4 * step + c], source[5 * step + c]
        plus, minus, plus_2, minus_2 = v1 + v2, v1 - v2, v3 + v4, two * (v3 - v4)
        target[c] = start * target[c] + four * v0
        target[target_step + c] = start * target[target_step + c] + (four * (v5 - minus) - minus_2)
        target[2 * target_step + c] = start * target[2 * target_step + c] - (five * v0 + four * plus + plus_2)
        target[3 * target_step + c] = start * target[3 * target_step + c] + (minus + minus_2 - five * v5)
        target[4 * target_step + c] = start * target[4 * target_step + c] + (v0 + plus + plus_2)
        target[5 * target_step + c] = start * target[5 * target_step + c] + v5


@_compiled
def inputs_to_tiles(padded, out):  # type: ignore[no-untyped-def]
    """[n, h+4, w+4, 32] -> [36, n · (h // 2) · (w // 2), 32]: each window's 6x6 inputs in the tiles' basis."""
    n, rows, columns, _ = padded.shape
    height, width = (rows - 4) // 2, (columns - 4) // 2
    count = n * height * width
    source, target = padded.reshape(-1), out.reshape(-1)
    half = np.empty(TILE * NARROW, padded.dtype)
    group = np.empty(TILE * GROUP * NARROW, padded.dtype)
    for first in range(0, count, GROUP):
        taken = min(GROUP, count - first)
        for j in range(taken):
            image, place = divmod(first + j, height * width)
            y, x = divmod(place, width)
            for r in range(SIDE):
                start = ((image * rows + 2 * y + r) * columns + 2 * x) * NARROW
                _inputs_to_side(source[start : start + SIDE * NARROW], NARROW, half[r * NARROW :], SIDE * NARROW)
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
    """The gradient of `inputs_to_tiles`: [36, tiles, 32] -> [n, h+4, w+4, 32]; windows overlap and add up."""
    n, rows, columns, _ = padded.shape
    height, width = (rows - 4) // 2, (columns - 4) // 2
    count = n * height * width
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
            image, place = divmod(first + j, height * width)
            y, x = divmod(place, width)
            for s in range(SIDE):
                of = group[(s * GROUP + j) * NARROW :]
                _side_to_inputs(of, SIDE * GROUP * NARROW, half[s * SIDE * NARROW :], NARROW, zero)
            for r in range(SIDE):
                start = ((image * rows + 2 * y + r) * columns + 2 * x) * NARROW
                to = target[start : start + SIDE * NARROW]
                _side_to_inputs(half[r * NARROW :], SIDE * NARROW, to, NARROW, one)


@_compiled
def pool_tiles(tiles, bias, out, chosen):  # type: ignore[no-untyped-def]
    """[36, tiles, 64] -> relu(max over the tile's 2x2 outputs + bias): `out` and the place of it, `chosen`."""
    two, zero = tiles.dtype.type(2), tiles.dtype.type(0)
    half = np.empty(2 * SIDE * WIDE, tiles.dtype)
    for t in range(tiles.shape[1]):
        for s in range(SIDE):
            m0, m1, m2 = tiles[s, t], tiles[SIDE + s, t], tiles[2 * SIDE + s, t]
            m3, m4, m5 = tiles[3 * SIDE + s, t], tiles[4 * SIDE + s, t], tiles[5 * SIDE + s, t]
            to = half[s * WIDE :]
            for c in range(WIDE):
                to[c] = m0[c] + (m1[c] + m2[c]) + (m3[c] + m4[c])
                to[SIDE * WIDE + c] = (m1[c] - m2[c]) + two * (m3[c] - m4[c]) + m5[c]
        pooled, place = out[t], chosen[t]
        for c in range(WIDE):
            n0, n1, n2 = half[c], half[WIDE + c], half[2 * WIDE + c]
            n3, n4, n5 = half[3 * WIDE + c], half[4 * WIDE + c], half[5 * WIDE + c]
            best, at = n0 + (n1 + n2) + (n3 + n4), np.int32(0)
            value = (n1 - n2) + two * (n3 - n4) + n5
            at = np.int32(1) if value > best else at
            best = max(value, best)
            n0, n1, n2 = half[6 * WIDE + c], half[7 * WIDE + c], half[8 * WIDE + c]
            n3, n4, n5 = half[9 * WIDE + c], half[10 * WIDE + c], half[11 * WIDE + c]
            value = n0 + (n1 + n2) + (n3 + n4)
            at = np.int32(2) if value > best else at
            best = max(value, best)
            value = (n1 - n2) + two * (n3 - n4) + n5
            at = np.int32(3) if value > best else at
            best = max(value, best)
            pooled[c] = max(best + bias[c], zero)
            place[c] = at


@_inlined
def _outputs_to_side(y0, y1, target, step):  # type: ignore[no-untyped-def]
    """The gradient of two outputs to that of six rows of the tiles' basis."""
    two = target.dtype.type(2)
    for c in range(WIDE):
        target[c] = y0[c]
        target[step + c] = y0[c] + y1[c]
        target[2 * step + c] = y0[c] - y1[c]
        target[3 * step + c] = y0[c] + two * y1[c]
        target[4 * step + c] = y0[c] - two * y1[c]
        target[5 * step + c] = y1[c]


@_compiled
def unpool_tiles(gradient, pooled, chosen, tiles, bias_gradient):  # type: ignore[no-untyped-def]
    """The gradient of `pool_tiles`: [tiles, 64] -> [36, tiles, 64], and added to the bias's."""
    zero, count = tiles.dtype.type(0), tiles.shape[1]
    target = tiles.reshape(-1)
    outputs = np.empty(4 * WIDE, tiles.dtype)
    half = np.empty(2 * SIDE * WIDE, tiles.dtype)
    group = np.empty(TILE * GROUP * WIDE, tiles.dtype)
    for first in range(0, count, GROUP):
        taken = min(GROUP, count - first)
        for j in range(taken):
            above, below, place = gradient[first + j], pooled[first + j], chosen[first + j]
            for c in range(WIDE):
                value = above[c] if below[c] > zero else zero
                for s in range(4):
                    outputs[s * WIDE + c] = value if place[c] == s else zero
            for c in range(WIDE):
                bias_gradient[c] += above[c] if below[c] > zero else zero
            for q in range(2):
                _outputs_to_side(outputs[q * WIDE :], outputs[(2 + q) * WIDE :], half[q * WIDE :], 2 * WIDE)
            for r in range(SIDE):
                of = half[2 * r * WIDE :]
                _outputs_to_side(of, of[WIDE:], group[(r * SIDE * GROUP + j) * WIDE :], GROUP * WIDE)
        for k in range(TILE):
            of = group[k * GROUP * WIDE :]
            to = target[(k * count + first) * WIDE :]
            for c in range(taken * WIDE):
                to[c] = of[c]
