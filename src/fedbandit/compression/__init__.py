"""Compression of what clients send: stages with a client's half and a server's half. Your own is one small class.

Examples:
    >>> import numpy as np
    >>> stage = TopK(fraction=0.5)
    >>> payload = stage.encode(np.array([0.1, -3.0, 2.0, 0.0]), np.random.default_rng(0))
    >>> stage.decode(payload, 4)
    array([ 0., -3.,  2.,  0.])
"""

from typing import Any

from fedbandit.compression.quantize import Quantize
from fedbandit.compression.top_k import TopK
from fedbandit.federated.pipeline import CompressionStage, Vectors

BUILT_IN: dict[str, Any] = {"quantize": Quantize, "top-k": TopK}

__all__ = ["BUILT_IN", "CompressionStage", "Quantize", "TopK", "Vectors"]
