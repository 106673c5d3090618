"""Rows with differing columns as an Arrow table, for Parquet, CSV and data frames. Knows nothing of what they mean."""

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from fedbandit.core.errors import FedbanditError


def arrow_table(rows: Sequence[Mapping[str, Any]], first: Sequence[str] = ()) -> Any:
    """A `pyarrow.Table` with a column for every key that any row has, null where a row lacks it.

    Columns named `first` lead. Whole numbers among fractions become fractions; lists, and values of mixed kinds,
    become JSON text.
    """
    pa = needed("pyarrow")
    names = dict.fromkeys([*first, *(name for row in rows for name in row)])
    return pa.table({name: _column(pa, [row.get(name) for row in rows]) for name in names})


def needed(module: str) -> Any:
    """A library that not every installation has; one line says which extra brings it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise FedbanditError(f"this needs {module}: pip install 'fedbandit[simulation]'") from None


def _column(pa: Any, values: list[Any]) -> Any:
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        return pa.array([None if value is None else float(value) for value in values])
    if len(kinds) > 1 or kinds & {list, tuple, dict}:
        return pa.array([None if value is None else json.dumps(value) for value in values])
    return pa.array(values) if kinds else pa.nulls(len(values), pa.float64())
