"""Compression of what clients send: stages with a client's half and a server's half. Your own is one small class."""

from typing import Any

from fedbandit.compression.quantize import Quantize
from fedbandit.compression.top_k import TopK
from fedbandit.federated.pipeline import Stage, Vectors

BUILT_IN: dict[str, Any] = {"quantize": Quantize, "top-k": TopK}

__all__ = ["BUILT_IN", "Quantize", "Stage", "TopK", "Vectors"]
