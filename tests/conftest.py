"""What tests share: a cache of their own, small chunks, a data set on disk, and where larger data lies."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from fedbandit.data.importers.tables import TableOptions, import_table
from fedbandit.federated.learners.base import AutogradLearner
from fedbandit.federated.learners.linear import SparseLinearLearner

# The same examples every time, and no test that fails because the machine is busy.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")

TAGS = ("red", "green", "blue", "white", "black", "grey")


@pytest.fixture(scope="session", autouse=True)
def _own_environment(tmp_path_factory):
    """Embedded data and pre-trained models are made anew for the tests, never taken from the user's cache.

    Loops are compiled from the start, as in every longer run; `core/test_loops.py` holds the plain ones to them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDBANDIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("FEDBANDIT_COMPILE_AFTER_SECONDS", "0")
        yield


@pytest.fixture
def no_wait():
    """A test that waits for a pipe, or reads without an end, fails.

    Not by an OSError, which a reader would take for a file's own, and again and again, should it be
    taken for something else.
    """

    def late(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 30, 5)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def small_chunks():
    """For cohorts of a few dozen events, which must still be cut into several chunks."""
    from fedbandit.federated.learners.linear import DenseLinearLearner
    from fedbandit.federated.learners.networks import (
        DenseLearner,  # needs torch, which most tests do without
    )

    with pytest.MonkeyPatch.context() as patch:
        for learner in (AutogradLearner, DenseLearner, DenseLinearLearner, SparseLinearLearner):
            patch.setattr(learner, "chunk_events", 12)
        yield


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory) -> Path:
    """Sixty users with a dozen titles each; a title's words give its tag away more often than not."""
    rng = np.random.default_rng(7)
    folder = tmp_path_factory.mktemp("data")
    lines = ["user,title,tags"]
    for user in range(60):
        for _ in range(12):
            tag = int(rng.choice(len(TAGS), p=[0.3, 0.25, 0.2, 0.1, 0.1, 0.05]))
            words = [
                f"w{tag}{rng.integers(3)}",
                f"w{tag}{rng.integers(3)}",
                f"noise{rng.integers(20)}",
            ]
            lines.append(f"u{user:02d},{' '.join(words)},{TAGS[tag]}")
    table = folder / "table.csv"
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = TableOptions(client="user", labels="tags", text=["title"], vocabulary=60, actions=6)
    import_table(table, folder / "tiny", options)
    return folder / "tiny"


def _test_data(*parts: str) -> Path:
    root = os.environ.get("FEDBANDIT_TEST_DATA")
    if not root:
        pytest.skip(
            "FEDBANDIT_TEST_DATA is not set: real data and the image golden run are not part of the project"
        )
    path = Path(root).joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{path} does not exist")
    return path


@pytest.fixture
def golden_run():
    """A run of the authors' code by its name: those on text are here, the one on images lies with the real data."""

    def load(name: str):
        file = f"{name}.npz"
        ours = Path(__file__).parent / "golden" / file
        return np.load(ours if ours.exists() else _test_data("golden", file))

    return load


@pytest.fixture
def real_data_folder() -> Path:
    return _test_data("data")
