"""Engines: where the chunks of a cohort run. The same results everywhere; only the place differs."""

from fedbandit.engines.base import CHUNK_CLIENTS, Engine, chunks_of
from fedbandit.engines.threads import ThreadEngine

__all__ = ["CHUNK_CLIENTS", "Engine", "ThreadEngine", "chunks_of"]
