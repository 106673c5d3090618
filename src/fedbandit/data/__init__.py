"""Data: federated data sets on disk, importers for the sources people have, and two embedded sets."""

import importlib
import os
from pathlib import Path

from fedbandit.core.errors import DataError
from fedbandit.data.dataset import FederatedDataset
from fedbandit.data.verification import cache_folder

EMBEDDED = {"glyphs": 1, "topics": 1}  # name -> version; a new version when what it generates changes
__all__ = ["EMBEDDED", "FederatedDataset", "cache_folder", "open_dataset"]


def open_dataset(source: str | Path, *, verify: bool = False) -> FederatedDataset:
    """An embedded data set by name (made on first use, then kept), or a folder made by `fedbandit data import`.

    Its files are read in full when it is opened for the first time, when they have changed, and when `verify` is true.

    Examples:
        >>> topics = open_dataset("topics")
        >>> topics.header.kind, topics.header.num_actions, topics.train.num_clients
        ('sparse', 50, 2000)
    """
    if str(source) in EMBEDDED:
        return FederatedDataset.open(_embedded(str(source)), verify=verify)
    if not Path(source).exists():
        raise DataError(f"data.source: {source} is neither a folder nor an embedded data set ({', '.join(EMBEDDED)})")
    return FederatedDataset.open(source, verify=verify)


def _embedded(name: str) -> Path:
    module = importlib.import_module(f"fedbandit.data.embedded.{name}")
    folder = cache_folder() / "data" / f"{name}-v{EMBEDDED[name]}"
    if not (folder / "header.json").exists():
        # Two processes may make it at once: each under a name of its own, and the first to finish is kept.
        made = module.generate(folder.with_name(f"{folder.name}-{os.getpid()}"))
        try:
            made.rename(folder)
        except OSError:
            if not (folder / "header.json").exists():
                raise
            import shutil

            shutil.rmtree(made)
    return folder
