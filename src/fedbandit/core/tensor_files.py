"""Named arrays and texts in one safetensors file with a checksum over all of it, verified before anything is used.

Any reader of safetensors opens these files. Knows nothing of what the arrays mean.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

_CHECKSUM = "sha256"
_LONGEST_HEADER = 100_000_000  # bytes, as safetensors itself has it


def pack(tensors: Mapping[str, np.ndarray], texts: Mapping[str, str]) -> bytes:
    """The bytes of a file with these arrays and texts, and the checksum of both."""
    from safetensors.numpy import save

    header, data = _split(save({name: np.ascontiguousarray(array) for name, array in tensors.items()}))
    header["__metadata__"] = dict(texts)
    header["__metadata__"][_CHECKSUM] = _checksum(header, data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the arrays are aligned
    return b"".join((len(text).to_bytes(8, "little"), text, data))


def unpack(payload: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays and texts of a file; `ValueError` where its bytes are not those that were written.

    A file without a checksum, of an older version or of another program, is checked in its structure alone.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    header, data = _split(payload)
    texts = header.get("__metadata__", {})
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError("its header is damaged")
    expected = texts.pop(_CHECKSUM, None)
    if expected is not None and expected != _checksum(header, data):
        raise ValueError("its checksum does not match")
    try:
        return load(payload), texts
    except (SafetensorError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"its structure is damaged ({error})") from None


def _split(payload: bytes) -> tuple[dict[str, Any], memoryview]:
    """The header, and the bytes of the arrays behind it."""
    length = int.from_bytes(payload[:8], "little")
    if len(payload) < 8 or not 2 <= length <= min(_LONGEST_HEADER, len(payload) - 8):
        raise ValueError("it is cut short")
    try:
        header = json.loads(payload[8 : 8 + length])
    except (ValueError, RecursionError):
        raise ValueError("its header is damaged") from None
    if not isinstance(header, dict):
        raise ValueError("its header is damaged")
    return header, memoryview(payload)[8 + length :]


def _checksum(header: Mapping[str, Any], data: memoryview) -> str:
    """Over names, types, shapes, places, texts and the arrays themselves."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    digest.update(data)
    return digest.hexdigest()
