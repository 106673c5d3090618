"""A full disk: the agent goes on choosing and says that it did not log, or raises; nothing is damaged either way."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from device_builders import text_model

from fedbandit.deploy import Agent, LogUnavailable, Outcome, Retention


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 512 kB, where the tests may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no right to mount a small file system here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder):
    """Write until nothing more goes in."""
    with open(folder / "filler", "wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            return


def test_the_agent_answers_and_says_that_it_did_not_log(small_disk):
    agent = Agent(small_disk, retention=Retention(max_events=100_000))
    agent.install(text_model())
    kept = agent.choose("cat")
    fill(small_disk)
    decisions = [agent.choose("cat mat") for _ in range(300)]
    refused = [decision for decision in decisions if not decision.logged]
    assert refused
    assert all("full" in decision.problem for decision in refused)
    assert all(0 <= decision.action < 4 and 0 < decision.propensity <= 1 for decision in refused)
    assert agent.reward(None, 1.0) is Outcome.UNKNOWN
    assert agent.reward(kept.event_id, 1.0) in (Outcome.NOT_STORED, Outcome.RECORDED)

    agent.close()
    agent = Agent(small_disk)  # an app that starts on a full disk
    restarted = agent.choose(
        "cat"
    )  # closing may have made a little room, so it may be logged or not
    assert restarted.action in range(4)

    (small_disk / "filler").unlink()
    later = agent.choose("cat")
    assert later.logged
    assert agent.reward(kept.event_id, 1.0) in (Outcome.RECORDED, Outcome.DUPLICATE)
    assert agent.reward(later.event_id, 0.5) is Outcome.RECORDED
    assert agent.totals().logged == sum(
        decision.logged for decision in (kept, *decisions, restarted, later)
    )
    assert agent.events().events.rewards.tolist() == [1.0, 0.5]
    agent.close()


def test_a_model_that_does_not_fit_leaves_the_one_in_use(small_disk):
    from fedbandit.core.errors import DataError

    with Agent(small_disk) as agent:
        agent.install(text_model(1))
        fill(small_disk)
        with pytest.raises(DataError, match="could not be written"):
            agent.install(text_model(2, seed=1))
        assert agent.choose("cat").model_version == 1


PROGRAM = """
    import sys, resource
    sys.path.insert(0, sys.argv[2])
    from device_builders import text_model
    from fedbandit.deploy import Agent, LogUnavailable
    agent = Agent(sys.argv[1], on_log_failure=sys.argv[3])
    agent.install(text_model())
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    logged = 0
    for _ in range(200):
        try:
            decision = agent.choose("cat")
        except LogUnavailable as error:
            print("raised", logged)
            break
        logged += decision.logged
        if not decision.logged:
            print("answered", logged)
            break
"""


@pytest.mark.parametrize(("option", "said"), [("answer", "answered"), ("raise", "raised")])
def test_a_limit_on_file_sizes_is_a_full_disk_too(tmp_path, option, said):
    here = str(Path(__file__).parents[2] / "helpers")
    program = textwrap.dedent(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), here, option],
        capture_output=True,
        text=True,
        check=True,
    )
    outcome, logged = done.stdout.split()
    assert outcome == said
    with Agent(tmp_path) as agent:
        assert agent.totals().logged == int(logged) > 0
        assert agent.choose("cat").logged


def test_a_log_that_another_process_holds_is_waited_for_and_then_given_up(tmp_path):
    import sqlite3

    agent = Agent(tmp_path, timeout=0.05, on_log_failure="raise")
    agent.install(text_model())
    event = agent.choose("cat").event_id
    holder = sqlite3.connect(tmp_path / "events.sqlite", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(LogUnavailable, match="locked"):
        agent.choose("cat")
    with pytest.raises(LogUnavailable, match="locked"):
        agent.reward(event, 1.0)
    assert agent.totals().logged == 1  # reading does not wait for a writer
    holder.execute("ROLLBACK")
    holder.close()
    assert agent.reward(event, 1.0) is Outcome.RECORDED
    agent.close()


def test_a_full_disk_is_warned_of_once_however_many_choices_are_made(tmp_path, monkeypatch, caplog):
    agent = Agent(tmp_path / "agent")
    agent.install(text_model())

    def full(record):
        raise LogUnavailable("events.sqlite: database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(agent._log, "append", full)
        assert not any(agent.choose("cat").logged for _ in range(50))
    assert caplog.text.count("disk is full") == 1
    assert agent.choose("cat").logged
    assert caplog.text.count("works again; 50 calls were not kept") == 1
    agent.choose("cat")
    assert caplog.text.count("works again") == 1
