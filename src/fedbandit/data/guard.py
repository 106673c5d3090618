"""What surrounds every import: a signal or a full disk ends it in one clear line, and nothing is left behind."""

import errno
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedbandit.data.compressed import clear_unpacked
from fedbandit.data.writer import check_target
from fedbandit.errors import DataError
from fedbandit.signals import handling

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def importing(out: Path | str) -> Iterator[None]:
    """Check the target before any work; SIGTERM and SIGHUP clean up like Ctrl-C; OS errors become one line."""
    out = check_target(out)
    clear_unpacked(out)  # the writer clears its own leftovers
    with handling(_interrupt, (signal.SIGTERM, signal.SIGHUP)):
        try:
            yield
        except OSError as error:
            where = f"{error.filename}: " if error.filename else f"{out}: "
            if error.errno in _FULL:
                raise DataError(f"{where}no space left on the disk; nothing was written") from None
            raise DataError(f"{where}{error.strerror or error}; nothing was written") from None


def _interrupt(number: int) -> None:
    raise KeyboardInterrupt
