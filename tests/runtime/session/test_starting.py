"""The start of Ray and the trainer beside the rest: who ends whose wait, and who is waited for."""

import threading
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import pytest

from runtime.errors import SessionLost
from runtime.session import assembly
from runtime.session.nodes import Nodes
from runtime.session.starting import TrainerStart

pytestmark = pytest.mark.anyio


class Ray:
    """Implements SessionRay: it comes up, or does not, once it is let go."""

    nodes = Nodes()

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.is_asked, self.may_end = threading.Event(), threading.Event()
        self.has_ended = False

    def start(self) -> None:
        self.is_asked.set()
        assert self.may_end.wait(60)
        self.has_ended = True
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        pass


def ground(tasks: Any) -> Any:
    return SimpleNamespace(tasks=tasks, context=SimpleNamespace(attempt=None), recorder=Recorder)


class Recorder:
    class timing:
        @staticmethod
        def stage(stage: object) -> Any:
            return anyio.CancelScope()  # a block of no effect


async def test_a_ray_that_does_not_come_up_ends_the_preparation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_prepared_for, was_ended = anyio.Event(), anyio.Event()

    async def prepare(attempt: object) -> None:
        is_prepared_for.set()
        try:
            await anyio.sleep_forever()
        finally:
            was_ended.set()

    monkeypatch.setattr(assembly, "prepare", prepare)
    ray = Ray(SessionLost("Ray did not start"))

    async def let_go() -> None:
        await is_prepared_for.wait()
        ray.may_end.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(let_go)
        here = ground(tasks)
        async with TrainerStart(here, ray) as start:
            with pytest.raises(ExceptionGroup) as raised:
                await assembly._prepare_beside(here, start)
            assert raised.group_contains(SessionLost, match="Ray did not start")
            assert was_ended.is_set()
            with pytest.raises(SessionLost):
                await start.trainer()


async def test_whoever_leaves_before_ray_is_up_waits_for_it() -> None:
    ray = Ray()

    async def let_go() -> None:
        await anyio.wait_all_tasks_blocked()  # the block is being left
        ray.may_end.set()

    async with anyio.create_task_group() as tasks:
        async with TrainerStart(ground(tasks), ray):
            await anyio.to_thread.run_sync(ray.is_asked.wait)
            tasks.start_soon(let_go)
        assert ray.has_ended
