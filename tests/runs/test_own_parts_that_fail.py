"""A part of a user's own that raises, exits or draws without a seed: one line, and never a silent end."""

import os
import signal
import subprocess
import sys
import time

import pytest

POLICIES = """
import sys
import numpy as np
from fedbandit.policies import Softmax

class Base:
    def __init__(self):
        self.asked = 0
    def probabilities(self, prediction, available=None):
        self.asked += 1
        if self.asked > 4:  # not while it is tried before round 1
            self.fail()
        return Softmax(0.1).probabilities(prediction, available)

class Raises(Base):
    def fail(self):
        raise RuntimeError("no idea")

class Exits(Base):
    def fail(self):
        sys.exit(0)

class ExitsAtOnce(Base):
    def probabilities(self, prediction, available=None):
        sys.exit(0)

class RaisesAtOnce(Base):
    def probabilities(self, prediction, available=None):
        raise ZeroDivisionError("at once")

class ExitsWhenMade:
    def __init__(self):
        sys.exit(0)
    def probabilities(self, prediction, available=None): ...

class Unseeded(Base):
    def fail(self):
        np.random.rand()

class Over(Base):
    def probabilities(self, prediction, available=None):
        return 1.0009 * Softmax(0.1).probabilities(prediction, available)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "failing.py").write_text(POLICIES)
    return tmp_path


def run_with(policy, *more, **environment):
    words = ["run", "so-scratch-softmax", "-o", "out", "--rounds", "2", "--quiet"]
    words += ["--set", f"policy.name=failing:{policy}", "--set", "clients_per_round=4", *more]
    return subprocess.run(
        [sys.executable, "-m", "fedbandit", *words],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def only_line(done):
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize(
    ("policy", "said"), [("Raises", "RuntimeError: no idea"), ("Exits", "SystemExit: 0")]
)
def test_a_policy_that_fails_in_a_round_is_named_with_round_and_client(here, policy, said, threads):
    line = only_line(run_with(policy, "--threads", threads))
    assert f"failing:{policy}" in line
    assert "round 1, client " in line
    assert said in line
    assert "failing.py, line " in line


def test_the_traceback_is_there_for_those_who_ask(here):
    done = run_with("Raises", FEDBANDIT_DEBUG="1")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert 'raise RuntimeError("no idea")' in done.stderr


@pytest.mark.parametrize("policy", ["ExitsAtOnce", "RaisesAtOnce", "ExitsWhenMade"])
def test_a_policy_that_fails_before_round_1(here, policy):
    assert f"failing:{policy}" in only_line(run_with(policy))


def test_draws_without_a_seed_are_refused(here):
    line = only_line(run_with("Unseeded"))
    assert "failing:Unseeded" in line
    assert "np.random" in line


def test_probabilities_that_miss_1_by_a_thousandth_are_refused(here):
    assert "sum to 1.0009" in only_line(run_with("Over"))


@pytest.mark.parametrize("after", [0.0, 1.0, 2.5])
def test_an_interrupted_comparison_says_so_in_one_line(here, after):
    words = ["compare", "so-scratch-softmax", "so-scratch-greedy", "-o", "compared", "--seeds", "2"]
    words += ["--set", "rounds=100000", "--workers", "2"]
    started = subprocess.Popen(
        [sys.executable, "-m", "fedbandit", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + 60
    while not (here / "compared").exists() and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(after)
    os.killpg(started.pid, signal.SIGINT)  # as a terminal does
    try:
        _, said = started.communicate(timeout=120)
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
    assert "Traceback" not in said
    assert started.returncode in (130, -signal.SIGINT), said
