"""What surrounds every import: a signal or a full disk ends it in one clear line, and nothing is left behind."""

import errno
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fedbandit.data.compressed import unpacked_name
from fedbandit.data.writer import check_target
from fedbandit.errors import DataError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def importing(out: Path | str) -> Iterator[None]:
    """Check the target before any work; SIGTERM and SIGHUP clean up like Ctrl-C; OS errors become one line."""
    out = check_target(out)
    unpacked_name(out).unlink(missing_ok=True)  # the writer clears its own leftovers
    with _signals_interrupt():
        try:
            yield
        except OSError as error:
            where = f"{error.filename}: " if error.filename else f"{out}: "
            if error.errno in _FULL:
                raise DataError(f"{where}no space left on the disk; nothing was written") from None
            raise DataError(f"{where}{error.strerror or error}; nothing was written") from None


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield
        return
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
