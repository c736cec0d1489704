import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from runtime.clock import ManualClock
from runtime.rollout.stop_rule import SUSTAINED_S, WINDOW_S, StopRule


class Driven:
    """A rule with the clock it runs by."""

    def __init__(self):
        self.clock = ManualClock(0.0)
        self.rule = StopRule(self.clock)

    def at(self, seconds, *outcomes):
        self.clock.advance(seconds - self.clock.monotonic())
        for outcome in outcomes:
            self.rule.record(failed=outcome == "failed")
        return self.rule.read()


def test_twenty_seconds_of_failures_then_ten_silent_minutes_do_not_stop():
    driven = Driven()
    for second in range(21):
        driven.at(second, "failed")
    for second in range(21, 621):
        assert not driven.at(second).is_fatal
    assert driven.at(621).window_attempts == 0


def test_failures_after_the_silence_start_a_stretch_of_their_own():
    driven = Driven()
    for second in range(21):
        driven.at(second, "failed")
    reading = driven.at(700, "failed")
    assert (reading.window_attempts, reading.high_s) == (1, 0)
    assert not driven.at(700 + SUSTAINED_S - 1, "failed").is_fatal


def test_five_minutes_of_failures_stop_at_the_attempt_that_completes_them():
    driven = Driven()
    for second in range(0, 300, 10):
        assert not driven.at(second, "failed").is_fatal
    assert not driven.at(299.9).is_fatal
    assert driven.at(300, "failed").is_fatal


def test_time_without_completed_attempts_does_not_count():
    driven = Driven()
    for second in range(0, 300, 10):
        driven.at(second, "failed")
    assert not driven.at(310).is_fatal
    assert driven.at(310).high_s == 290
    assert driven.at(311, "failed").is_fatal


def test_exactly_half_is_high_and_less_is_not():
    driven = Driven()
    assert driven.at(0, "failed", "ok").high_s == 0
    assert driven.at(10, "failed", "ok").high_s == 10
    assert driven.at(20, "ok").high_s == 0
    assert driven.at(30, "failed").high_s == 0, "the time has started over"


def test_share_falls_when_failures_leave_the_window():
    driven = Driven()
    driven.at(0, "failed", "failed")
    driven.at(200, "ok")
    assert driven.at(WINDOW_S - 0.5).fraction == pytest.approx(2 / 3)
    assert driven.at(WINDOW_S).fraction == 0.0
    driven.at(WINDOW_S + 1, "failed")
    assert driven.at(WINDOW_S + 1).high_s == 0


def test_share_rises_when_successes_leave_the_window():
    driven = Driven()
    driven.at(0, "ok", "ok")
    driven.at(100, "failed")
    reading = driven.at(400 - 1, "failed")
    assert reading.high_s == pytest.approx(99), "high since the successes left at 300"


def test_an_attempt_is_in_the_window_for_exactly_its_length():
    driven = Driven()
    driven.at(0, "failed")
    assert driven.at(WINDOW_S - 1e-6).window_attempts == 1
    assert driven.at(WINDOW_S).window_attempts == 0


def test_an_empty_window_starts_the_time_over():
    driven = Driven()
    for second in range(0, 200, 10):
        driven.at(second, "failed")
    assert driven.at(190 + WINDOW_S).window_attempts == 0
    assert driven.at(190.5 + WINDOW_S, "failed").high_s == 0


def expected(events, now):
    """The rule, read off the definition: look at every moment at which the window changes."""
    moments = sorted({t for t, _ in events} | {t + WINDOW_S for t, _ in events} | {now})
    since = None
    for moment in (m for m in moments if m <= now):
        window = [failed for t, failed in events if t <= moment < t + WINDOW_S]
        is_high = bool(window) and sum(window) * 2 >= len(window)
        since = None if not is_high else (moment if since is None else since)
    newest = max((t for t, _ in events), default=0.0)
    high = 0.0 if since is None else max(0.0, newest - since)
    window = [failed for t, failed in events if t <= now < t + WINDOW_S]
    return len(window), sum(window), high


class StopRuleMachine(RuleBasedStateMachine):
    """Attempts and looks at any moments, the edges of window and stretch among them."""

    def __init__(self):
        super().__init__()
        self.clock = ManualClock(0.0)
        self.rule = StopRule(self.clock)
        self.events = []

    @rule(gap=st.sampled_from([0, 0.5, 1, 7, 50, 149, 150, 299, 300, 301, 700]))
    def wait(self, gap):
        self.clock.advance(gap)

    @rule(outcomes=st.lists(st.booleans(), min_size=1, max_size=3))
    def attempts_complete(self, outcomes):
        for failed in outcomes:
            self.rule.record(failed=failed)
            self.events.append((self.clock.monotonic(), failed))

    @rule()
    def look(self):
        """Reading it, as every tick of a wait does, changes nothing."""
        reading = self.rule.read()
        assert self.rule.read() == reading
        found = (reading.window_attempts, reading.window_failed, reading.high_s)
        assert found == expected(self.events, self.clock.monotonic())
        assert reading.is_fatal == (reading.high_s >= SUSTAINED_S)
        assert reading.fraction == (found[1] / found[0] if found[0] else 0.0)

    def teardown(self):
        self.look()


TestStopRuleMachine = StopRuleMachine.TestCase
TestStopRuleMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
