"""Folders and files that are their owner's alone, whoever made them and however: what a log holds is nobody else's.

Where rights cannot be changed, a warning says so and the agent works on.
"""

import logging
from pathlib import Path

_logger = logging.getLogger("fedbandit.deploy")


def make_private_folder(folder: Path) -> None:
    """Make the folder, or take an existing one, with all that stands in it, from everybody else."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True, mode=0o700)
    _restrict(folder, 0o700)
    for path in folder.iterdir():
        if path.is_file() and not path.is_symlink():
            make_private(path)


def make_private(path: Path) -> None:
    """Let only its owner read and write a file."""
    _restrict(path, 0o600)


def _restrict(path: Path, mode: int) -> None:
    try:
        if path.stat().st_mode & 0o777 & ~mode:
            path.chmod(mode)
    except FileNotFoundError:
        pass  # another process has cleared it away
    except OSError as error:
        _logger.warning("%s: others may read it, and that cannot be changed: %s", path, error.strerror)
