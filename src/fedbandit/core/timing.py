"""Where time goes, by name. Timings never enter results: the same run gives the same metrics on any machine."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Adds up seconds by name: `with watch("step"): ...`"""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def add(self, seconds: dict[str, float]) -> None:
        """Add seconds measured elsewhere."""
        for name, value in seconds.items():
            self.seconds[name] += value

    def take(self) -> dict[str, float]:
        """What was added up since the last time, and start again from nothing."""
        taken = dict(self.seconds)
        self.seconds.clear()
        return taken
