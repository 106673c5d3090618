"""Engines: where the chunks of a cohort run. The same results everywhere; only the
place differs.
"""

from fedbandit.engines.ray import RayEngine
from fedbandit.engines.threads import ThreadEngine

__all__ = ["RayEngine", "ThreadEngine"]
