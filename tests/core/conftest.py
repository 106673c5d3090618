"""Small chunks for the tests of the core: their cohorts have a few dozen events, and must still be cut into several."""

import pytest

from fedbandit.federated.learners.base import AutogradLearner
from fedbandit.federated.learners.sparse import SparseLinearLearner


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    for learner in (AutogradLearner, SparseLinearLearner):
        monkeypatch.setattr(learner, "chunk_events", 12)
