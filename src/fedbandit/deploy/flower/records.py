"""Facts and arrays as Flower's records, and back. What comes in may be anything; the unreadable raises DataError."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS as SEALED

from fedbandit.errors import DataError


def to_records(
    facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray], sealed: Mapping[str, Any] | None = None
) -> RecordDict:
    """One text, some arrays and perhaps a message of SecAgg+, ready to be sent."""
    content = RecordDict(
        {
            "facts": ConfigRecord({"json": json.dumps(dict(facts))}),
            "arrays": ArrayRecord({name: Array(np.ascontiguousarray(array)) for name, array in arrays.items()}),
        }
    )
    if sealed:
        content.config_records[SEALED] = ConfigRecord(dict(sealed))
    return content


def from_records(content: RecordDict) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The facts and arrays that `to_records` was given."""
    try:
        facts = json.loads(str(content["facts"]["json"]))
        arrays = {name: array.numpy() for name, array in content.array_records["arrays"].items()}
    except Exception as error:  # whatever a stranger's bytes make a parser do
        raise DataError(f"unreadable: {error!r}"[:300]) from None
    if not isinstance(facts, dict):
        raise DataError(f"unreadable: a {type(facts).__name__} where facts were expected")
    return facts, arrays


def sealed_in(content: RecordDict) -> dict[str, Any]:
    """The message of SecAgg+ that `to_records` was given."""
    return dict(content.config_records.get(SEALED, {}))
