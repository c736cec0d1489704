"""Which waits are skipped: none that a thread of the loop's own will end, and all others."""

import asyncio
import threading
import time

import anyio
import anyio.to_thread

from tests.skipping_loop import SkippingLoop


def run(act) -> float:
    """Seconds that were skipped."""
    loop = SkippingLoop()
    try:
        loop.run_until_complete(act())
        return loop._skips.skipped
    finally:
        loop.close()


def test_nothing_is_skipped_while_a_thread_of_the_loop_is_at_work() -> None:
    async def act() -> None:
        with anyio.fail_after(3600.0):
            await anyio.to_thread.run_sync(time.sleep, 0.05)

    assert run(act) == 0.0


def test_a_thread_of_another_loop_stops_no_time() -> None:
    begun, let_go = threading.Event(), threading.Event()

    async def elsewhere() -> None:
        await anyio.to_thread.run_sync(lambda: begun.set() or let_go.wait())

    other = threading.Thread(target=asyncio.run, args=(elsewhere(),))
    other.start()
    begun.wait()
    try:
        assert run(lambda: anyio.sleep(2.0)) > 1.0
    finally:
        let_go.set()
        other.join()
