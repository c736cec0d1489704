"""`milepost run` of a submitted run is about one attempt, whatever becomes of its flow."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.load import LoadedRun
from flows.commands._submitted import Submitted, asked_of
from runtime.errors import RunError
from runtime.launch.standing import AttemptStanding
from runtime.launch.watching import Watcher
from tests.contracts.launch_worlds import RayWorld, world_of
from tests.runtime.launch.owned_runs import end, ended, own


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayWorld]:
    with world_of("ray", tmp_path, monkeypatch) as world:
        assert isinstance(world, RayWorld)
        monkeypatch.setenv("MILEPOST_LAUNCH_RECEIPTS", str(tmp_path / "receipts-one"))
        monkeypatch.setenv("RAY_AUTH_TOKEN", world.server.token)
        before = signal.getsignal(signal.SIGINT)
        try:
            yield world
        finally:
            signal.signal(signal.SIGINT, before)


def loaded_of(world: RayWorld) -> LoadedRun:
    return world.loaded(f'launch.cluster="{world.server.url}"')


@pytest.mark.parametrize("how", ["stopped", "failed", "complete"])
def test_an_attempt_that_ended_as_its_flow_broke_is_not_followed_by_another(
    world: RayWorld, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is away is met at the end of a task: just when the attempt is over."""
    loaded = loaded_of(world)

    def flow(command: Submitted) -> None:
        world.launch(command.loaded)
        own(world.root, attempt=1)
        end(world.root, ended({"stopped": "training"}.get(how, how), how))
        world.become(world.submission(loaded).key, "stopped")
        command._error = ConnectionError("no Prefect server")

    monkeypatch.setattr(Submitted, "_run_flow", flow)
    command = Submitted(loaded, None, asked_of(loaded))
    if how == "failed":
        with pytest.raises(RunError, match="attempt 1: failed"):
            command.follow()
    else:
        command.follow()
    assert world.attempts() == [1]


def test_what_its_flow_never_came_to_is_submitted_all_the_same(
    world: RayWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run needs no Prefect; the attempt before it was stopped, and a person asks for more."""
    loaded = loaded_of(world)
    world.launch(loaded)
    own(world.root, attempt=1)
    end(world.root, ended("training", "stop"))
    world.become(world.submission(loaded).key, "stopped")

    def flow(command: Submitted) -> None:
        command._error = ConnectionError("no Prefect server")

    look = Watcher.look

    def runs_to_its_end(watcher: Watcher, attempt: int) -> AttemptStanding:
        assert attempt == 2
        own(world.root, attempt=2, epoch=2)
        end(world.root, ended("complete", "max_updates", epoch=2))
        return look(watcher, attempt)

    monkeypatch.setattr(Submitted, "_run_flow", flow)
    monkeypatch.setattr(Watcher, "look", runs_to_its_end)
    Submitted(loaded, None, asked_of(loaded)).follow()
    assert world.attempts() == [1, 2]
