"""Arrays in a `.npz` file: features or images, one label per row (or a 0/1 matrix), one client per
row.

Features are read a block at a time; labels and clients are held in memory.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedbandit.core.errors import ConfigError, DataError
from fedbandit.core.progress import SILENT, ProgressReporter
from fedbandit.core.ragged import Ragged
from fedbandit.data.formats.binary import MOST_ACTIONS, Npz
from fedbandit.data.importers.common import HoldOut, add_rows, check_counts
from fedbandit.data.text import EMNIST_ACTIONS, EMNIST_LOWER_CASE, case_map, in_natural_order
from fedbandit.data.writer import DatasetWriter, check_target

_EMNIST_SHAPE = (28, 28)


@dataclass(frozen=True, kw_only=True)
class ArrayOptions:
    """Which arrays mean what; the names are those of the command line's options."""

    features: str
    labels: str
    clients: str
    invert: bool = False  # ink as high values becomes ink as low values, as in EMNIST
    case_map: bool | None = (
        None  # None: yes for 62 classes of 28x28 images, or labels named 0-9A-Za-z
    )
    actions: int | None = (
        None  # how many classes whole-number labels have; None: the largest plus one
    )
    test_fraction: float = 0.1

    def __post_init__(self) -> None:
        check_counts(actions=self.actions)
        HoldOut(self.test_fraction, by_client=False)


@dataclass(frozen=True)
class _Labels:
    rows: Ragged
    actions: list[str]
    multilabel: bool


def import_arrays(
    path: Path | str, out: Path | str, options: ArrayOptions, progress: ProgressReporter = SILENT
) -> Path:
    """Import a `.npz` file; `uint8` features are pixels, stored as they are and read as value/255."""
    check_target(out)
    with Npz(path) as arrays:
        shape, dtype = arrays.header(options.features)
        clients = _client_names(arrays, options.clients)
        labels = _read_labels(arrays, options)
        if not len(shape) or not shape[0] == len(clients) == len(labels.rows):
            counts = f"{shape[:1]}, {len(labels.rows)} and {len(clients)}"
            raise DataError(
                f"{path}: features, labels and clients have {counts} rows; they must have the same number"
            )
        shape = (
            shape[:-1] if len(shape) == 4 and shape[-1] == 1 else shape
        )  # one channel says nothing
        actions, lower_case = _name_actions(labels.actions, shape[1:], options.case_map)
        pixels = dtype == np.uint8
        hold_out = HoldOut(options.test_fraction, by_client=False)
        source = {"importer": "arrays", "file": arrays.path.name, "inverted": options.invert}
        with (
            DatasetWriter(
                out,
                name=Path(out).name,
                kind="dense",
                shape=shape[1:],
                actions=actions,
                multilabel=labels.multilabel,
                lower_case=lower_case,
                scale=1 / 255 if pixels else 1.0,
                dtype=np.uint8 if pixels else np.float32,
                source=source,
            ) as writer,
            progress.task("Writing examples", len(clients)) as advance,
        ):
            start = 0
            for block in arrays.blocks(options.features):
                block = block.reshape(len(block), *shape[1:])
                features = block if pixels else _as_float32(block, options.features)
                if options.invert:
                    features = _invert(features, options.features)
                names = clients[start : start + len(block)]
                block_labels = labels.rows.slice(start, start + len(block))
                add_rows(writer, names, features, block_labels, hold_out.is_test(names))
                start += len(block)
                advance(len(block))
            return writer.finish()


def _client_names(arrays: Npz, name: str) -> list[str]:
    values = arrays.array(name)
    if values.ndim != 1 or values.dtype.kind not in "iuUS":
        raise DataError(f"{arrays.path}: {name} must be one whole number or name per row")
    return [str(value) for value in _decoded(values, f"{arrays.path}: {name}").tolist()]


def _decoded(values: np.ndarray, where: str) -> np.ndarray:
    """Names stored as bytes in UTF-8 become text; other arrays stay as they are."""
    if values.dtype.kind != "S":
        return values
    try:
        return np.char.decode(values, "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: {error.object!r} is not text in UTF-8") from None


def _read_labels(arrays: Npz, options: ArrayOptions) -> _Labels:
    values = arrays.array(options.labels)
    where = f"{arrays.path}: {options.labels}"
    if values.ndim == 2:
        if not np.isin(values, (0, 1)).all():
            raise DataError(f"{where} has two dimensions, so it must hold only 0 and 1")
        _no_number_of(options, f"{options.labels} has a column for each")
        rows, columns = np.nonzero(values)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(values)))])
        return _Labels(
            Ragged(offsets, columns.astype(np.int32)),
            [str(i) for i in range(values.shape[1])],
            True,
        )
    if values.ndim != 1 or values.dtype.kind not in "iuUS" or not len(values):
        raise DataError(f"{where} must be one whole number or name per row, or a 0/1 matrix")
    if values.dtype.kind in "US":
        _no_number_of(options, f"{options.labels} names them")
        unique, inverse = np.unique(_decoded(values, where), return_inverse=True)
        actions = in_natural_order(str(name) for name in unique)
        position = {name: i for i, name in enumerate(actions)}
        ids = np.array([position[str(name)] for name in unique], np.int32)[inverse]
    else:
        largest = int(np.argmax(values))
        if options.actions is None and values[largest] >= MOST_ACTIONS:
            beyond = f"is larger than any data set has actions ({MOST_ACTIONS:,})"
            raise DataError(f"{where}, row {largest}: label {values[largest]} {beyond}")
        count = options.actions or int(values[largest]) + 1
        bad = np.flatnonzero((values < 0) | (values >= count))
        if len(bad):
            raise DataError(
                f"{where}, row {bad[0]}: label {values[bad[0]]} is outside 0..{count - 1}"
            )
        actions, ids = [str(i) for i in range(count)], values.astype(np.int32)
    return _Labels(Ragged(np.arange(len(ids) + 1, dtype=np.int64), ids), actions, False)


def _no_number_of(options: ArrayOptions, because: str) -> None:
    if options.actions is not None:
        raise ConfigError(f"actions: {because}; leave it out, or give labels as whole numbers")


def _name_actions(
    actions: list[str], shape: tuple[int, ...], wanted: bool | None
) -> tuple[list[str], dict[int, int]]:
    """EMNIST's names and case map for data that counts its 62 characters as EMNIST does."""
    if wanted and len(actions) != len(EMNIST_ACTIONS):
        raise ConfigError(
            f"case-map: needs the 62 classes 0-9, A-Z, a-z, found {len(actions)} classes"
        )
    numbered = actions == [str(i) for i in range(len(EMNIST_ACTIONS))]
    if wanted or (wanted is None and numbered and shape == _EMNIST_SHAPE):
        return list(EMNIST_ACTIONS), dict(EMNIST_LOWER_CASE)
    return actions, {} if wanted is False else case_map(actions)


def _as_float32(block: np.ndarray, name: str) -> np.ndarray:
    if block.dtype.kind not in "fiub":
        raise DataError(f"features {name} must be numbers, found {block.dtype}")
    with np.errstate(
        over="ignore"
    ):  # what overflows becomes infinite and is refused with its client and row
        return block.astype(np.float32)


def _invert(features: np.ndarray, name: str) -> np.ndarray:
    if features.dtype == np.uint8:
        return 255 - features
    if (
        (features < 0) | (features > 1)
    ).any():  # NaN passes here and is refused with its client and row
        raise DataError(f"features {name}: --invert needs uint8 pixels or values in [0, 1]")
    return 1 - features
