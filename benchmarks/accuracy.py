"""How exact the CNN learner's convolution is in single precision, beside torch's own: `python -m benchmarks.accuracy`.

Both are compared with torch in double precision, on uniform inputs and on inputs as they come out of a relu.
"""

import numpy as np
import torch

from fedbandit.models.kernels import winograd

_IMAGES, _SIDE = 4, 14


def errors(seed: int, rectified: bool) -> tuple[np.ndarray, np.ndarray]:
    """Absolute errors of the tiles' way and of torch's way, in single precision."""
    rng = np.random.default_rng(seed)
    shape = (_IMAGES, _SIDE, _SIDE, winograd.NARROW)
    windows = _SIDE // 2
    across, side = winograd.tiles_over(windows)
    padded = np.zeros((_IMAGES, side, side, winograd.NARROW), np.float32)
    inside = padded[:, 2 : _SIDE + 2, 2 : _SIDE + 2]
    inside[:] = np.maximum(rng.standard_normal(shape), 0) if rectified else rng.random(shape)
    kernel = (0.03 * rng.standard_normal((5, 5, winograd.NARROW, winograd.WIDE))).astype(np.float32)
    tiles = np.empty((winograd.TILE, _IMAGES * across**2, winograd.NARROW), np.float32)
    winograd.inputs_to_tiles(padded, tiles)
    kernel_tiles = winograd.KERNEL_TO_TILE.astype(np.float32) @ kernel.reshape(25, -1)
    products = torch.bmm(
        *map(torch.from_numpy, (tiles, kernel_tiles.reshape(winograd.TILE, *kernel.shape[2:])))
    )
    ours = np.empty((_IMAGES, windows, windows, winograd.WIDE), np.float32)
    winograd.pool_tiles(
        products.numpy(), np.zeros(winograd.WIDE, np.float32), ours, np.empty(ours.shape, np.int32)
    )

    def by_torch(dtype: type) -> np.ndarray:
        x = torch.from_numpy(inside.astype(dtype)).permute(0, 3, 1, 2)
        w = torch.from_numpy(kernel.astype(dtype)).permute(3, 2, 0, 1)
        pooled = torch.relu(torch.max_pool2d(torch.conv2d(x, w, padding=2), 2))
        return pooled.permute(0, 2, 3, 1).numpy()

    exact = by_torch(np.float64)
    return np.abs(ours - exact), np.abs(by_torch(np.float32) - exact)


if __name__ == "__main__":
    for rectified in (False, True):
        pairs = [errors(seed, rectified) for seed in range(5)]
        ratios = [ours.mean() / torchs.mean() for ours, torchs in pairs]
        print(
            f"{'after a relu' if rectified else 'uniform':14s} mean error {np.mean([o.mean() for o, _ in pairs]):.1e},"
            f" {min(ratios):.1f} to {max(ratios):.1f} times that of torch"
        )
