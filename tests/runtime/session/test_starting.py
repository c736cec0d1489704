"""The start of Ray and the trainer beside the rest: who ends whose wait, and in which order."""

import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import pytest
from ray.exceptions import ActorDiedError

from runtime.errors import EngineDead, SessionLost, TrainerLost, WaitTimeout
from runtime.session import assembly
from runtime.session.nodes import Nodes
from runtime.session.starting import TrainerStart
from runtime.trainer import group
from runtime.trainer.actor import Placement
from runtime.waits import MULTIPLIER
from tests.runtime.session.attempted import context_of

pytestmark = pytest.mark.anyio
LONG_S = 60


class Ray:
    """Implements SessionRay: it comes up, or does not, once it is let go or stopped."""

    nodes = Nodes()

    def __init__(self, story: list[str], error: Exception | None = None) -> None:
        self.story, self.error = story, error
        self.is_asked, self.may_end = threading.Event(), threading.Event()

    def start(self) -> None:
        self.is_asked.set()
        assert self.may_end.wait(LONG_S)
        self.story.append("Ray started")
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        self.story.append("Ray stopped")
        self.may_end.set()


class Rank:
    """A rank's actor: every call is noted, and answered by what stands in its place."""

    def __init__(self, world: "World") -> None:
        self.world = world

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args, **more: self._answer(name))

    async def _answer(self, name: str) -> Any:
        self.world.story.append(f"rank: {name}")
        self.world.rank_is_asked.set()
        return await self.world.rank() if name == "info" else {}


class Monitor:
    """The engines, of which only start and end matter here."""

    def __init__(self, world: "World") -> None:
        self.world = world

    async def start_engines(self) -> None:
        self.world.story.append("engines asked for")
        self.world.engines_are_asked.set()
        await self.world.engines()
        self.world.story.append("engines started")

    async def stop(self) -> None:
        self.world.story.append("engines stopped")


class World:
    """A session whose Ray, ranks and engines do as a test says; ``story`` has what became of it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.story: list[str] = []
        self.ray = Ray(self.story)
        self.context = context_of(folder / "attempt")
        self.rank_is_asked, self.engines_are_asked = anyio.Event(), anyio.Event()
        self.rank: Callable[[], Awaitable[Any]] = self.at_once
        self.engines: Callable[[], Awaitable[Any]] = self.at_once
        self.prepare: Callable[[], Awaitable[Any]] = self.at_once
        monkeypatch.setattr(assembly, "_ray_of", lambda ground: self.ray)
        monkeypatch.setattr(assembly, "prepare", self._prepare)
        monkeypatch.setattr(assembly, "make_engines", self._make_engines)
        monkeypatch.setattr(assembly, "running", self._running)
        monkeypatch.setattr(group, "make_actor", lambda *args: Rank(self))
        monkeypatch.setattr(
            group.ray, "kill", lambda actor, no_restart: self.story.append("rank killed")
        )

    async def at_once(self) -> Any:
        return SimpleNamespace(rank=0, host="here", pid=7)

    async def _prepare(self, attempt: object) -> Any:
        await self.prepare()
        return SimpleNamespace(model="model", fingerprint="f")

    def _make_engines(self, *args: object, **more: object) -> Any:
        return SimpleNamespace(monitor=Monitor(self))

    @asynccontextmanager
    async def _running(self, *args: object) -> AsyncGenerator[None]:
        yield
        self.story.append("session over")

    def ground(self, tasks: Any) -> Any:
        def nothing(*args: object, **more: object) -> None:
            pass

        return SimpleNamespace(
            tasks=tasks,
            context=self.context,
            scratch=None,
            caches=None,
            view=SimpleNamespace(doing=nothing),
            recorder=SimpleNamespace(
                timing=SimpleNamespace(stage=lambda stage: anyio.CancelScope()),  # of no effect
                lifecycle=SimpleNamespace(record=nothing),
            ),
        )

    async def run(self, until: Callable[[], Awaitable[object]] | None = None) -> None:
        """Open the session and leave it at once; ``until`` returns when a signal cancels that."""
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as opening:

                async def signal(wait: Callable[[], Awaitable[object]]) -> None:
                    await wait()
                    opening.cancel()

                if until is not None:
                    tasks.start_soon(signal, until)
                async with assembly.session_of(self.ground(tasks)):
                    self.story.append("session open")
            tasks.cancel_scope.cancel()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


async def test_a_ray_that_does_not_come_up_ends_the_preparation(world: World) -> None:
    was_ended = anyio.Event()
    world.ray.error = SessionLost("Ray did not start")

    async def prepare() -> None:
        world.ray.may_end.set()
        try:
            await anyio.sleep_forever()
        finally:
            was_ended.set()

    world.prepare = prepare
    with pytest.raises(ExceptionGroup) as raised:
        await world.run()
    assert raised.group_contains(SessionLost, match="Ray did not start")
    assert was_ended.is_set()
    assert world.story == ["Ray started", "Ray stopped"]


@pytest.mark.parametrize("error", [None, SessionLost("the start of Ray was given up")])
async def test_whoever_leaves_while_ray_starts_stops_it_and_asks_for_no_ranks(
    world: World, error: Exception | None
) -> None:
    world.ray.error = error  # stopped just before it is up, or just after
    async with anyio.create_task_group() as tasks:
        async with TrainerStart(world.ground(tasks), world.ray) as start:
            await anyio.to_thread.run_sync(world.ray.is_asked.wait)
        assert start._error is None
        with pytest.raises(SessionLost, match="given up"):
            await start.trainer()
    assert world.story == ["Ray stopped", "Ray started"]


async def test_a_signal_while_ray_starts_stops_it(world: World) -> None:
    await world.run(until=lambda: anyio.to_thread.run_sync(world.ray.is_asked.wait))
    assert world.story == ["Ray stopped", "Ray started", "Ray stopped"]


async def test_a_signal_between_ray_and_the_ranks_kills_them(world: World) -> None:
    world.ray.may_end.set()
    world.rank = world.prepare = anyio.sleep_forever
    await world.run(until=world.rank_is_asked.wait)
    assert world.story == ["Ray started", "rank: info", "rank killed", "Ray stopped"]


async def test_a_rank_that_fails_while_engines_start_stops_them(world: World) -> None:
    world.ray.may_end.set()
    world.engines = anyio.sleep_forever

    async def fail() -> None:
        await world.engines_are_asked.wait()
        raise ActorDiedError

    world.rank = fail
    with pytest.raises(ExceptionGroup) as raised:
        await world.run()
    assert raised.group_contains(TrainerLost)
    assert_one_cause(raised.value)
    assert "engines started" not in world.story
    assert "rank killed" in world.story
    assert world.story[-2:] == ["engines stopped", "Ray stopped"]


async def test_an_engine_that_fails_while_ranks_meet_kills_them(world: World) -> None:
    world.ray.may_end.set()
    world.rank = anyio.sleep_forever

    async def fail() -> None:
        await world.rank_is_asked.wait()
        raise EngineDead("engine 0 did not start")

    world.engines = fail
    with pytest.raises(ExceptionGroup) as raised:
        await world.run()
    assert raised.group_contains(EngineDead)
    assert_one_cause(raised.value)
    assert world.story[-3:] == ["rank killed", "engines stopped", "Ray stopped"]


async def test_ranks_have_longer_on_a_machine_that_is_slow(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MULTIPLIER, "3")
    world.rank = anyio.sleep_forever
    settings: Any = SimpleNamespace(distributed_timeout_s=600.0)
    with pytest.raises(WaitTimeout, match=r"within 0\.06 s"):
        await group.TrainerGroup.start(settings, Placement(start_deadline_s=0.02), epoch=1)
    assert world.story[-1] == "rank killed"


async def test_what_was_started_ends_in_order(world: World) -> None:
    world.ray.may_end.set()
    await world.run()
    leaving = world.story[world.story.index("session open") + 1 :]
    assert leaving == [
        "session over",
        "rank: stop",
        "rank killed",
        "engines stopped",
        "Ray stopped",
    ]


def assert_one_cause(error: BaseException) -> None:
    """Nothing of the taking down hides or joins what went wrong."""
    while isinstance(error, BaseExceptionGroup):
        assert len(error.exceptions) == 1, error.exceptions
        error = error.exceptions[0]
