"""The event log against a model of it in ten lines of Python, through whatever order of calls hypothesis thinks of."""

import shutil
import tempfile
from pathlib import Path

from device_builders import HandClock, a_record
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from fedbandit.deploy import Outcome, Retention
from fedbandit.deploy.device.log import EventLog

MAX_EVENTS, MAX_AGE, REWARD_WITHIN = 5, 1000.0, 100.0


class LogMachine(RuleBasedStateMachine):
    """`made` and `rewards` say all there is to say about a log; what can be read follows from them and the time."""

    ids = Bundle("ids")

    @initialize(without_reward=st.sampled_from(["drop", "zero"]))
    def start(self, without_reward):
        self.folder = Path(tempfile.mkdtemp())
        self.clock, self.now = HandClock(), 0.0
        self.rules = Retention(MAX_EVENTS, MAX_AGE, REWARD_WITHIN, without_reward)
        self.made: dict[str, float] = {}
        self.rewards: dict[str, float] = {}
        self.open(self.rules)

    def open(self, rules=None):
        self.log = EventLog(self.folder / "events.sqlite", rules, clocks=self.clock)
        self.log.totals()

    @rule(target=ids, action=st.integers(0, 9), propensity=st.floats(2**-20, 1.0))
    def append(self, action, propensity):
        event = self.log.append(a_record(action=action, propensity=propensity, value=float(action)))
        assert event not in self.made
        self.made[event] = self.now
        return event

    @rule(event=ids, value=st.floats(-10, 10))
    def reward(self, event, value):
        outcome = self.log.reward(event, value)
        in_time = self.now - self.made[event] < REWARD_WITHIN
        if event not in list(self.made)[-MAX_EVENTS:]:
            assert outcome is Outcome.EXPIRED
        elif event in self.rewards and self.now - self.made[event] < MAX_AGE:
            assert outcome is Outcome.DUPLICATE
        elif event not in self.rewards and in_time:
            assert outcome is Outcome.RECORDED
            self.rewards[event] = value
        else:
            assert outcome in (
                Outcome.EXPIRED,
                Outcome.DUPLICATE,
            )  # aged: gone, or waiting to be cleared away

    @rule(event=ids)
    def reward_of_a_forged_id(self, event):
        sequence, _, nonce = event.partition("-")
        forged = f"{sequence}-{(int(nonce, 16) ^ 1):014x}"
        assert self.log.reward(forged, 1.0) in (Outcome.UNKNOWN, Outcome.EXPIRED)

    @rule(seconds=st.sampled_from([1.0, 60.0, 99.0, 500.0, 1000.0]))
    def wait(self, seconds):
        self.clock.wait(seconds)
        self.now += seconds

    @rule(by=st.floats(-1e9, 1e9))
    def set_the_wall_clock(self, by):
        self.clock.set_wall(by)

    @rule(off_for=st.sampled_from([-1e6, 0.0, 16.0, 128.0]))
    def reboot(self, off_for):
        self.open_again(
            False
        )  # time across a boot is measured from the last thing written before it
        self.log.close()
        self.clock.reboot(off_for)
        self.now += max(0.0, off_for)
        self.open()

    @rule(tell_rules=st.booleans())
    def open_again(self, tell_rules):
        self.log.close()
        self.open(self.rules if tell_rules else None)

    @invariant()
    def what_can_be_read_is_what_the_rules_say(self):
        if not hasattr(self, "log"):
            return
        newest = list(self.made)[-MAX_EVENTS:]
        expected = []
        for event in newest:
            age, reward = self.now - self.made[event], self.rewards.get(event)
            if age >= MAX_AGE:
                continue
            if self.rules.without_reward == "zero":
                if age >= REWARD_WITHIN:
                    expected.append((int(event.split("-")[0]), reward or 0.0))
            elif reward is not None:
                expected.append((int(event.split("-")[0]), reward))
        assert [(row.sequence, row.reward) for row in self.log.read()] == expected
        totals = self.log.totals()
        assert totals.logged == len(self.made)
        assert totals.rewarded == len(self.rewards)
        assert totals.held <= MAX_EVENTS

    def teardown(self):
        if hasattr(self, "log"):
            self.log.close()
            shutil.rmtree(self.folder)


LogMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, derandomize=True
)
TestLog = LogMachine.TestCase
