"""Facts and arrays as Flower's records, and back. What comes in may be anything; the unreadable raises DataError."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedbandit.errors import DataError


def to_records(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> RecordDict:
    """One text and some arrays, ready to be sent."""
    return RecordDict(
        {
            "facts": ConfigRecord({"json": json.dumps(dict(facts))}),
            "arrays": ArrayRecord({name: Array(np.ascontiguousarray(array)) for name, array in arrays.items()}),
        }
    )


def from_records(content: RecordDict) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What `to_records` was given."""
    try:
        facts = json.loads(str(content["facts"]["json"]))
        arrays = {name: array.numpy() for name, array in content.array_records["arrays"].items()}
    except Exception as error:  # whatever a stranger's bytes make a parser do
        raise DataError(f"unreadable: {error!r}"[:300]) from None
    if not isinstance(facts, dict):
        raise DataError(f"unreadable: a {type(facts).__name__} where facts were expected")
    return facts, arrays
