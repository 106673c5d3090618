"""What an import has to itself: a file or folder beside its target, locked as long as it works.

The system lets go of the lock when the process ends, however it ends, so a killed import stops nobody.
"""

import fcntl
import os
from pathlib import Path

from fedbandit.errors import DataError


def claim(path: Path, flags: int, out: Path) -> int:
    """Open `path`, locked: a descriptor to close in the end. While it is open, other imports of `out` are refused."""
    lock = os.open(path, flags, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(lock), os.stat(path)):
            raise BlockingIOError
    except (BlockingIOError, FileNotFoundError):  # another one holds it, or has this moment renamed or removed it
        os.close(lock)
        raise DataError(f"{out}: another import is writing it; nothing was overwritten") from None
    return lock
