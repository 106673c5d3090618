"""The event log, rule by rule: rewards once and in time, caps and ages, and clocks that jump."""

import math

import pytest
from device_builders import HandClock, a_record

from fedbandit.deploy import Outcome, Retention
from fedbandit.deploy.device.log import EventLog


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def make_log(tmp_path, clock):
    opened = []

    def make(**rules):
        opened.append(
            EventLog(
                tmp_path / "events.sqlite", Retention(**rules) if rules else None, clocks=clock
            )
        )
        return opened[-1]

    yield make
    for log in opened:
        log.close()


def test_rewards_come_once_and_in_any_order(make_log):
    log = make_log()
    first, second, third = (log.append(a_record(action=i)) for i in range(3))
    assert log.reward(third, 3.0) is Outcome.RECORDED
    assert log.reward(first, 1.0) is Outcome.RECORDED
    assert log.reward(third, 9.0) is Outcome.DUPLICATE
    assert [(row.action, row.reward) for row in log.read()] == [(0, 1.0), (2, 3.0)]
    assert log.reward(second, 2.0) is Outcome.RECORDED
    assert [row.reward for row in log.read()] == [1.0, 2.0, 3.0]
    assert [row.settled for row in log.read()] == [2, 3, 1]
    assert log.totals().rewarded == 3


@pytest.mark.parametrize(
    "event_id", ["", "1", "-", "x-y", "0-0", "99-00", "-1-00", f"{2**70}-00", "1-" + "f" * 40]
)
def test_an_id_that_was_never_given_is_unknown(make_log, event_id):
    log = make_log()
    log.append(a_record())
    assert log.reward(event_id, 1.0) is Outcome.UNKNOWN
    assert log.read() == []


def test_an_id_of_another_log_is_unknown(make_log, tmp_path, clock):
    other = EventLog(tmp_path / "other.sqlite", clocks=clock)
    foreign = other.append(a_record())
    other.close()
    log = make_log()
    log.append(a_record())
    assert log.reward(foreign, 1.0) is Outcome.UNKNOWN


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_is_a_finite_number(make_log, value):
    log = make_log()
    event = log.append(a_record())
    with pytest.raises(ValueError, match="finite"):
        log.reward(event, value)
    assert log.reward(event, -2.5) is Outcome.RECORDED


def test_only_the_newest_events_are_kept(make_log):
    log = make_log(max_events=3)
    events = [log.append(a_record(action=i)) for i in range(5)]
    assert log.totals().held == 3
    assert [log.reward(event, 1.0) for event in events[:3]] == [
        Outcome.EXPIRED,
        Outcome.EXPIRED,
        Outcome.RECORDED,
    ]
    assert [row.sequence for row in log.read()] == [3]


def test_a_late_reward_is_refused_and_the_event_dropped(make_log, clock):
    log = make_log(reward_within=60, without_reward="drop")
    late, punctual = log.append(a_record(action=1)), log.append(a_record(action=2))
    clock.wait(59)
    assert log.reward(punctual, 1.0) is Outcome.RECORDED
    clock.wait(1)
    assert log.reward(late, 1.0) is Outcome.EXPIRED
    log.append(a_record())
    assert log.totals().held == 2
    assert log.reward(late, 1.0) is Outcome.EXPIRED
    assert [row.action for row in log.read()] == [2]


def test_a_missing_reward_counts_as_zero_once_its_time_is_over(make_log, clock):
    log = make_log(reward_within=60, without_reward="zero")
    silent, clicked = log.append(a_record(action=1)), log.append(a_record(action=2))
    log.reward(clicked, 1.0)
    assert log.read() == []  # neither is seen before both are: else only the clicked would teach
    clock.wait(60)
    assert [(row.action, row.reward) for row in log.read()] == [(1, 0.0), (2, 1.0)]
    assert (
        log.reward(silent, 1.0) is Outcome.EXPIRED
    )  # what may have been learned from does not change
    assert [row.reward for row in log.read()] == [0.0, 1.0]


def test_old_events_leave_even_when_nothing_new_comes(make_log, clock):
    log = make_log(max_age=1000, reward_within=100)
    event = log.append(a_record())
    log.reward(event, 1.0)
    clock.wait(999)
    assert len(log.read()) == 1
    clock.wait(1)
    assert log.read() == []
    log.append(a_record())
    assert log.totals().held == 1


@pytest.mark.parametrize("jump", [-50 * 365 * 86400.0, -3600.0, 3600.0, 50 * 365 * 86400.0])
def test_a_wall_clock_that_is_set_changes_nothing(make_log, clock, jump):
    log = make_log(max_age=1000, reward_within=100)
    first = log.append(a_record(action=0))
    clock.set_wall(jump)
    second = log.append(a_record(action=1))
    clock.wait(99)
    assert log.reward(first, 1.0) is Outcome.RECORDED
    assert log.reward(second, 1.0) is Outcome.RECORDED
    clock.set_wall(-2 * jump)
    assert [row.action for row in log.read()] == [0, 1]
    clock.wait(1000)
    assert log.read() == []


def test_after_a_reboot_the_wall_clock_tells_how_long_the_device_was_off(make_log, clock):
    log = make_log(max_age=1000, reward_within=100)
    event = log.append(a_record())
    clock.reboot(off_for=50)
    log = make_log()
    assert log.reward(event, 1.0) is Outcome.RECORDED
    clock.reboot(off_for=949)
    log = make_log()
    assert len(log.read()) == 1
    clock.set_wall(1e9)
    assert len(log.read()) == 1
    clock.wait(1)
    assert log.read() == []


def test_a_device_that_wakes_up_in_the_past_loses_nothing_and_keeps_its_order(make_log, clock):
    log = make_log(max_age=1000, reward_within=100)
    first = log.append(a_record(action=0))
    clock.reboot(off_for=-1_700_000_000)  # a flat battery: 1970
    log = make_log()
    second = log.append(a_record(action=1))
    clock.set_wall(1_700_000_000)  # the network sets the clock
    third = log.append(a_record(action=2))
    for event in (third, second, first):
        assert log.reward(event, 1.0) is Outcome.RECORDED
    assert [row.action for row in log.read()] == [0, 1, 2]


def test_the_log_remembers_its_rules(make_log, clock):
    rules = Retention(max_events=7, max_age=5000, reward_within=50, without_reward="zero")
    make_log(**vars(rules)).append(a_record())
    trainer = make_log()  # another process, which was told nothing
    assert trainer.retention() == rules
    clock.wait(50)
    assert [row.reward for row in trainer.read()] == [0.0]
    make_log(max_events=9)
    make_log().append(a_record())
    assert trainer.retention() == rules  # a log that is only constructed has not been opened yet


def test_reading_consumes_nothing_and_shows_one_moment(make_log):
    log = make_log()
    log.reward(log.append(a_record(action=1)), 1.0)
    before = log.read()
    log.reward(log.append(a_record(action=2)), 1.0)
    assert [row.action for row in before] == [1]
    assert log.read() == log.read()
    assert len(log.read()) == 2


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"max_events": 0}, "max_events"),
        ({"max_age": 0}, "max_age"),
        ({"reward_within": -1}, "reward_within"),
        ({"reward_within": math.nan}, "reward_within"),
        ({"without_reward": "guess"}, "without_reward"),
        ({"without_reward": "zero", "max_age": 10, "reward_within": 10}, "max_age"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rules, message):
    with pytest.raises(ValueError, match=message):
        Retention(**rules)
