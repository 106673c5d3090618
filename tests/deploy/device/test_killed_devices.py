"""Real processes, really killed: what an agent has promised is there afterwards, once, and nothing is damaged."""

import multiprocessing
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from device_builders import text_model
from device_process import live_in_threads

from fedbandit.deploy import Agent, Retention
from fedbandit.deploy.device.training import DeviceMemory

PROGRAM = Path(__file__).parents[2] / "helpers" / "device_process.py"


def start(folder, seed, *count):
    command = [sys.executable, str(PROGRAM), str(folder), str(seed), *map(str, count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def kill_after(process, lines):
    """Read some lines, kill -9, and read what was on its way: everything the process was promised."""
    said = [process.stdout.readline() for _ in range(lines)]
    process.kill()
    said += process.stdout.readlines()
    process.stdout.close()
    assert process.wait() == -9
    return [line.split() for line in said if line.endswith("\n")]


def prepare(folder):
    with Agent(folder, retention=Retention(max_events=100_000)) as agent:
        agent.install(text_model())


def check(folder, said, kills):
    """Every promise is kept; at most one event and one reward per kill came without the process hearing of it."""
    made = {words[1]: words[2:] for words in said if words[0] == "made"}
    rewarded = [words for words in said if words[0] == "rewarded"]
    assert max(Counter(words[1] for words in rewarded).values()) == 1
    with Agent(folder) as agent:
        totals, rows = agent.totals(), {str(row.sequence): row for row in agent._log.read()}
    assert len(made) <= totals.logged <= len(made) + kills
    assert totals.held == totals.logged
    assert len(rewarded) <= totals.rewarded <= len(rewarded) + kills
    assert len(rows) == totals.rewarded
    for _, event, value in rewarded:
        row, (action, propensity) = rows[event.partition("-")[0]], made[event]
        assert (row.reward, row.action, row.propensity) == (
            float(value),
            int(action),
            float(propensity),
        )


def kill_again_and_again(folder, kills, processes):
    prepare(folder)
    rng, said = random.Random(1), []
    for turn in range(kills):
        running = [start(folder, turn * processes + i) for i in range(processes)]
        ends = [[] for _ in running]
        readers = [
            threading.Thread(
                target=lambda p, n, into: into.extend(kill_after(p, n)),
                args=(p, rng.randrange(1, 200), end),
            )
            for p, end in zip(running, ends, strict=True)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        said += [words for end in ends for words in end]
    check(folder, said, kills * processes)


def test_kill_at_any_moment(tmp_path):
    kill_again_and_again(tmp_path, kills=5, processes=1)


@pytest.mark.slow
def test_kill_at_any_moment_many_times_and_two_at_a_time(tmp_path):
    kill_again_and_again(tmp_path, kills=25, processes=2)


def test_killed_while_the_log_is_being_made(tmp_path):
    """The first moments of a log: it is there and whole, or not there."""
    for turn in range(5):
        folder = tmp_path / str(turn)
        with Agent(tmp_path / "model") as agent:
            agent.install(text_model())
        folder.mkdir()
        os.symlink(tmp_path / "model" / "models", folder / "models")
        process = start(folder, turn)
        process.stdout.readline() if turn == 4 else threading.Event().wait(0.1 + 0.12 * turn)
        process.kill()
        process.stdout.close()
        process.wait()
        with Agent(folder) as agent:
            assert agent.choose("cat").logged


def test_several_processes_write_one_log(tmp_path):
    prepare(tmp_path)
    running = [start(tmp_path, seed, 150) for seed in range(3)]
    said = [line.split() for process in running for line in process.stdout.read().splitlines()]
    for process in running:
        process.stdout.close()
        assert process.wait() == 0
    assert sum(words[0] == "made" for words in said) == 450
    check(tmp_path, said, kills=0)


def test_several_threads_share_an_agent(tmp_path):
    prepare(tmp_path)
    given = live_in_threads(str(tmp_path), threads=4, count=50)
    assert len(set(given)) == 200
    with Agent(tmp_path) as agent:
        rewards = Counter(agent.events().events.rewards.tolist())
    assert rewards == {float(number): 50 for number in range(4)}


def _child(agent, queue):
    queue.put([agent.choose("cat").event_id for _ in range(20)])


def test_an_agent_survives_a_fork(tmp_path):
    """Parent and children use the same agent object after the fork; each opens the file for itself."""
    prepare(tmp_path)
    agent = Agent(tmp_path)
    before = [agent.choose("mat").event_id for _ in range(5)]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    children = [context.Process(target=_child, args=(agent, queue)) for _ in range(2)]
    for child in children:
        child.start()
    own = [agent.choose("mat").event_id for _ in range(20)]
    theirs = queue.get() + queue.get()
    for child in children:
        child.join()
    assert len({*before, *own, *theirs}) == 65
    assert agent.totals().logged == 65
    agent.close()


REMEMBERS = """
import sys
from pathlib import Path
import numpy as np
from fedbandit.deploy.device.training import DeviceMemory
memory = DeviceMemory(Path(sys.argv[1]))
for mark in range(10_000):
    memory.keep(mark, mark + 1, {"own": np.full(5000, mark + 1.0)}, {"mark": mark + 1})
    print(mark + 1, flush=True)
"""


def test_what_a_device_remembers_is_whole_after_a_kill(tmp_path):
    path = tmp_path / "memory.safetensors"
    command = [sys.executable, "-c", REMEMBERS, str(path)]
    for lines in (1, 4):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        ((last,), *_) = reversed(kill_after(process, lines))
        told, memory = DeviceMemory(path).latest()
        assert told["mark"] in (int(last), int(last) + 1)
        assert np.array_equal(memory["own"], np.full(5000, told["mark"]))
        before = DeviceMemory(path).at(told["mark"] - 1)
        assert told["mark"] == 1 or np.array_equal(before["own"], memory["own"] - 1)
