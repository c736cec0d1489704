from __future__ import annotations

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import ConfigError, WaitTimeout
from runtime.waits import MULTIPLIER, Wait, multiplier, stretched


@pytest.mark.parametrize("text", ["0.5", "0", "-1", "nan", "inf", "two", "1,5", " "])
def test_a_malformed_multiplier_is_refused_by_name(text):
    with pytest.raises(ConfigError, match=MULTIPLIER):
        multiplier({MULTIPLIER: text})


@given(factor=st.floats(1, 1e6), seconds=st.floats(0, 1e6))
def test_infrastructure_limits_are_stretched(factor, seconds):
    environ = {MULTIPLIER: repr(factor)}
    assert stretched("publication", seconds, environ) == seconds * factor
    assert stretched("drain", seconds, {}) == seconds


def test_other_limits_cannot_be_stretched():
    with pytest.raises(ValueError, match="verifier"):
        stretched("verifier", 1.0, {})


def test_a_wait_in_time_says_nothing():
    async def main():
        said = []
        async with Wait("a thing", 60.0, on_slow=said.append):
            await anyio.lowlevel.checkpoint()
        assert said == []

    anyio.run(main)


def test_a_wait_past_its_limit_says_what_it_waited_for():
    async def main():
        missing = ["engine 0", "engine 1"]

        async def wait():
            async with Wait(lambda: ", ".join(missing), 0.05, on_slow=lambda slow: None):
                missing.remove("engine 0")
                await anyio.sleep_forever()

        with pytest.raises(WaitTimeout, match=r"waited 0\.05 s for engine 1") as caught:
            await wait()
        assert caught.value.detail["deadline_s"] == 0.05

    anyio.run(main)


def test_warnings_come_at_the_unstretched_limit_and_then_regularly():
    async def main():
        said = []
        third = anyio.Event()

        def warn(slow):
            said.append(slow)
            if len(said) == 3:
                third.set()

        wait = Wait("a thing", 600.0, unstretched_s=0.01, on_slow=warn, warn_every_s=0.02)
        async with wait:
            await third.wait()
        assert [slow.name for slow in said] == ["a thing"] * 3
        assert [slow.deadline_s for slow in said] == [600.0] * 3
        assert said[0].waited_s < said[1].waited_s < said[2].waited_s

    anyio.run(main)


def test_no_warning_after_the_end():
    async def main():
        wait = Wait("a thing", 60.0, warn_every_s=0.01)
        async with wait:
            timer = wait._timer
        assert timer.cancelled()

    anyio.run(main)


def test_errors_and_outer_cancellation_go_through():
    async def main():
        with pytest.raises(KeyError):
            async with Wait("a thing", 60.0):
                raise KeyError("x")
        with anyio.move_on_after(0.02) as outer:
            async with Wait("a thing", 60.0, on_slow=lambda slow: None):
                await anyio.sleep_forever()
        assert outer.cancelled_caught
        with pytest.raises(WaitTimeout, match="inner"):
            async with Wait("outer", 60.0), Wait("inner", 0.01, on_slow=lambda slow: None):
                await anyio.sleep_forever()

    anyio.run(main)
