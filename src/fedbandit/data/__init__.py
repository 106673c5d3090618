"""Data: federated data sets on disk, importers for the sources people have, and two embedded sets."""

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedbandit.core.errors import DataError
from fedbandit.core.ragged import Ragged
from fedbandit.data.dataset import Catalogue, FederatedDataset, Header, Log, Split
from fedbandit.data.encoder import Column, Encoder
from fedbandit.data.validation import cache_folder
from fedbandit.data.writer import DatasetWriter

EMBEDDED = {
    "catalogue": 1,
    "gallery": 1,
    "glyphs": 1,
    "topics": 1,
}  # name -> version; a new version when what it generates changes
__all__ = [
    "EMBEDDED",
    "Catalogue",
    "Column",
    "DatasetWriter",
    "Encoder",
    "FederatedDataset",
    "Header",
    "Log",
    "Ragged",
    "Split",
    "cache_folder",
    "import_frame",
    "import_log",
    "open_dataset",
]


def open_dataset(source: str | Path, *, verify: bool = False) -> FederatedDataset:
    """An embedded data set by name (made on first use, then kept), or a folder made by `fedbandit
    data import`.

    Its files are read in full when it is opened for the first time, when they have changed, and
    when `verify` is true.

    Examples:
        >>> topics = open_dataset("topics")
        >>> topics.header.kind, topics.header.num_actions, topics.train.num_clients
        ('sparse', 50, 2000)
    """
    if str(source) in EMBEDDED:
        return FederatedDataset.open(_embedded(str(source)), verify=verify)
    if not Path(source).exists():
        raise DataError(
            f"data.source: {source} is neither a folder nor an embedded data set ({', '.join(EMBEDDED)})"
        )
    return FederatedDataset.open(source, verify=verify)


def import_frame(
    frame: Any, out: str | Path, *, client: str, labels: str | Sequence[str], **options: Any
) -> FederatedDataset:
    """Make a data set of a table with labels: a pandas or polars frame, an Arrow table, or a file's
    name.

    A data set of Hugging Face's `datasets` is taken, too. Its options are those of `fedbandit data
    import table`, with `treat` for `--as`. What is made of each column is printed by `fedbandit
    data info`, and shown beforehand by `fedbandit.data.importers.tables.preview_table`.

    Examples:
        >>> import pandas as pd
        >>> visits = pd.DataFrame({
        ...     "visitor": ["ann", "ann", "bob", "cyd"], "age": [31, 31, None, 52],
        ...     "device": ["phone", "tv", "tv", "tv"], "clicked": ["news", "films", "films", None],
        ... })
        >>> shop = import_frame(visits, "shop", client="visitor", labels="clicked", test_fraction=0)
        >>> shop.header.encoder.features()
        ['age', 'age is missing', 'device=phone', 'device=tv']
        >>> shop.train.num_examples, shop.header.actions
        (3, ('films', 'news'))
    """
    from fedbandit.data.importers.tables import TableOptions

    return _imported(frame, out, TableOptions, client=client, labels=labels, **options)


def import_log(
    frame: Any,
    out: str | Path,
    *,
    client: str,
    action: str,
    reward: str,
    propensity: str,
    **options: Any,
) -> FederatedDataset:
    """Make a data set of logged decisions; `frame` is what `import_frame` takes, the options those
    of `import logged`.

    Examples:
        >>> import pandas as pd
        >>> shown = pd.DataFrame({
        ...     "user": ["ann", "bob", "cyd"], "hour": [8, 12, 20], "did": ["call", "mail", "mail"],
        ...     "answered": [0, 1, 1], "p": [0.5, 0.5, 0.5],
        ... })
        >>> columns = {"client": "user", "action": "did", "reward": "answered", "propensity": "p"}
        >>> log = import_log(shown, "calls", **columns, test_fraction=0)
        >>> log.train.log.actions.tolist(), log.header.actions
        ([0, 1, 1], ('call', 'mail'))
    """
    from fedbandit.data.importers.tables import LoggedOptions

    columns = {"client": client, "action": action, "reward": reward, "propensity": propensity}
    return _imported(frame, out, LoggedOptions, **columns, **options)


def _imported(frame: Any, out: str | Path, kind: Any, **options: Any) -> FederatedDataset:
    """Import a frame with options of this kind, and open the result."""
    from fedbandit.data.importers import importing
    from fedbandit.data.importers.tables import import_table

    with importing(out):
        return FederatedDataset.open(import_table(frame, out, kind(**options)))


def _embedded(name: str) -> Path:
    """The folder of an embedded data set in the cache, made on first use."""
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
