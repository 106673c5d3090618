"""What an import leaves out, counted: rows nobody owns, rows without a label, and clients left without examples."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fedbandit.data.ragged import Ragged


class Dropped:
    """Chooses the rows to keep and remembers what was not kept."""

    def __init__(self, clients: Iterable[str] = ()) -> None:
        self._seen = set(clients)  # a source may list clients that have no rows at all
        self._kept: set[str] = set()
        self._anonymous = self._unlabelled = 0

    def choose(self, clients: Sequence[str], labels: Ragged, drop_unlabelled: bool) -> np.ndarray:
        """The rows to keep: int64 [kept]. A row without a client is never kept."""
        owned = np.array([bool(client) for client in clients], bool)
        labelled = (np.diff(labels.offsets) > 0) | (not drop_unlabelled)
        keep = np.flatnonzero(owned & labelled)
        self._anonymous += int((~owned).sum())
        self._unlabelled += int((owned & ~labelled).sum())
        self._seen.update(client for client in clients if client)
        self._kept.update(clients[row] for row in keep.tolist())
        return keep

    def report(self) -> dict[str, Any]:
        """For the header's `source`: only what happened."""
        counts = {
            "dropped_clients": len(self._seen - self._kept),
            "dropped_rows_without_client": self._anonymous,
            "dropped_rows_without_label": self._unlabelled,
        }
        return {name: count for name, count in counts.items() if count}
