"""Where fedbandit keeps what it can make again: embedded data sets, pre-trained models, downloads, stamps."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where embedded data sets and pre-trained models are kept: $FEDBANDIT_CACHE, or the user's cache folder."""
    if chosen := os.environ.get("FEDBANDIT_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedbandit"
