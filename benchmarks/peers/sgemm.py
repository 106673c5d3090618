"""What the machine can do: single-precision matrix products on so many threads, one intra-op thread each."""

import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from protocol import serve

SIZE, REPEATS = 1024, 12
FLOP = 2 * SIZE**3 * REPEATS  # per thread and round


def multiply(_: int) -> None:
    torch.set_num_threads(1)
    a, b, c = torch.rand(SIZE, SIZE), torch.rand(SIZE, SIZE), torch.empty(SIZE, SIZE)
    for _repeat in range(REPEATS):
        torch.mm(a, b, out=c)


if __name__ == "__main__":
    threads = int(sys.argv[1])
    pool = ThreadPoolExecutor(threads)
    serve(lambda: list(pool.map(multiply, range(threads))))
