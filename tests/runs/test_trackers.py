"""What a run tells its trackers, built in and of one's own."""

import sys

import pytest
from builders import random_text
from small_runs import small_config

from fedbandit.core.errors import ConfigError
from fedbandit.runs.reporting import tracker_named
from fedbandit.runs.run import run

MADE = []


class Collecting:
    """A tracker as a user would write one."""

    def __init__(self, folder, config):
        self.folder, self.config, self.rounds, self.closed = folder, config, [], False
        MADE.append(self)

    def update(self, metrics):
        self.rounds.append(metrics["round"])

    def close(self):
        self.closed = True


class Halfway:
    def __init__(self, folder, config):
        pass

    def update(self, metrics):
        pass


def test_a_tracker_of_ones_own_is_told_every_round_and_closed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "my_trackers", sys.modules[__name__])
    MADE.clear()
    run(small_config(), tmp_path / "run", dataset=random_text(), tracker=tracker_named("my_trackers:Collecting"))
    [tracker] = MADE
    assert tracker.rounds == list(range(1, 13))
    assert tracker.closed
    assert tracker.folder == tmp_path / "run"


def test_wrong_trackers_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "my_trackers", sys.modules[__name__])
    with pytest.raises(ConfigError, match="did you mean tensorboard"):
        tracker_named("tensorbord")
    with pytest.raises(ConfigError, match="no method close"):
        run(small_config(), tmp_path / "run", dataset=random_text(), tracker=tracker_named("my_trackers:Halfway"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own imports
def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(small_config(), tmp_path / "run", dataset=random_text(), tracker=tracker_named("tensorboard"))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("running_reward")] == list(range(1, 13))
    assert "client_reward/p50" in events.Tags()["scalars"]
