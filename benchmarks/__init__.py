"""Benchmarks: fedbandit beside a plain torch loop and other simulators, on the same data in the same run."""

import os

# Rounds are measured as in every longer run: compiled from the start.
COMPILED = "FEDBANDIT_COMPILE_AFTER_SECONDS"
os.environ[COMPILED] = "0"


def as_users_have_it() -> dict[str, str]:
    """The environment without that."""
    return {name: value for name, value in os.environ.items() if name != COMPILED}
