"""Settings for the data tests: the first call of a compiled function takes seconds, so no deadline per example."""

from hypothesis import settings

settings.register_profile("compiled", deadline=None)
settings.load_profile("compiled")
