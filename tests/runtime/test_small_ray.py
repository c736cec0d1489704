"""What the tests' own Ray leaves in this process."""

import os
import threading
import time
from pathlib import Path

import pytest

from tests.runtime.small_ray import one_node

TASKS = Path("/proc/self/task")
LONG_S = 30.0


def nameless() -> set[int]:
    """Threads that a library began without a name, so that they have the process's own.

    Ray names those that sleep until they are called. Those that wake by a clock have none.
    """
    of_python = {thread.native_id for thread in threading.enumerate()}
    found = {int(task.name) for task in TASKS.iterdir()} - of_python
    return {task for task in found if name(task) == name(os.getpid())}


def name(task: int) -> str | None:
    try:
        return (TASKS / str(task) / "comm").read_text()
    except FileNotFoundError:  # ended meanwhile
        return None


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_no_clock_of_a_ray_that_is_down_ticks_into_the_end_of_this_process() -> None:
    import ray  # noqa: F401  # what the import begins is not what is looked for

    before = nameless()
    with one_node():
        pass
    until = time.monotonic() + LONG_S
    while nameless() - before and time.monotonic() < until:
        time.sleep(0.05)
    assert nameless() - before == set()
