"""Requests to stop: signals call a function for the duration of a block."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def handling(handle: Callable[[int], None], numbers: tuple[signal.Signals, ...] = STOPPING) -> Iterator[None]:
    """Call `handle(number)` for each of these signals; only the main thread can, elsewhere nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda received, frame: handle(received)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
