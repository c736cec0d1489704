import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from runtime.clock import ManualClock
from runtime.errors import FencedError, PublicationFailed
from runtime.rundir import atomic, chain, workflow
from runtime.rundir.failure import Failure
from runtime.rundir.layout import RunRoot
from runtime.session.view import SessionView
from tests.runtime.session.attempted import context_of, own


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def view(tmp_path: Path, clock: ManualClock) -> SessionView:
    return SessionView.of(context_of(tmp_path, clock=clock))


def written(tmp_path: Path) -> workflow.Workflow:
    found = workflow.read(RunRoot(tmp_path / "run"))
    assert found is not None
    return found


def failure() -> Failure:
    return Failure.of(PublicationFailed("none verified"), step="publication/3", time=0.0)


def test_it_says_what_is_done_and_how_far(view: SessionView, tmp_path: Path) -> None:
    view.doing("segment/2", state="training")
    view.update = 1
    view.write()
    found = written(tmp_path)
    assert (found.run, found.state, found.activity) == ("attempted", "training", "running")
    assert (found.step, found.update, found.expected.updates) == ("segment/2", 1, 8)
    assert found.paths["checkpoints"] == str(tmp_path / "run" / "checkpoints")


def test_deadlines_count_from_the_last_thing_that_moved(
    view: SessionView, clock: ManualClock, tmp_path: Path
) -> None:
    view.moved("update 1")
    clock.advance(90)
    view.write()
    assert written(tmp_path).idle_s == 90
    view.moved("update 2")
    view.write()
    assert (written(tmp_path).idle_s, written(tmp_path).progress.what) == (0, "update 2")


def test_a_held_failure_shows_until_the_step_goes_through(
    view: SessionView, tmp_path: Path
) -> None:
    failed = failure()
    view.failed(failed, attempt=1, held=False)
    view.write()
    assert (written(tmp_path).activity, written(tmp_path).failure) == ("running", failed)
    view.failed(failed, attempt=2, held=True)
    view.write()
    assert (written(tmp_path).activity, written(tmp_path).failure) == ("held", failed)
    view.recovered(failed)
    view.write()
    assert (written(tmp_path).activity, written(tmp_path).failure) == ("running", None)


def test_a_full_disk_costs_the_view_and_nothing_else(
    view: SessionView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view.moved("before")
    view.write()

    def full(operation: str, path: Path) -> None:
        if operation != "unlink":
            raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(atomic, "probe", full)
    view.moved("while it was full")
    view.write()
    monkeypatch.setattr(atomic, "probe", None)
    assert written(tmp_path).progress.what == "before"
    view.write()
    assert written(tmp_path).progress.what == "while it was full"


def test_a_newer_owner_ends_the_one_who_writes(view: SessionView, tmp_path: Path) -> None:
    view.write()
    own(view._context.root, epoch=2)
    with pytest.raises(FencedError):
        view.write()


@pytest.mark.anyio
async def test_beats_follow_one_another_without_anything_moving(
    view: SessionView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflow, "HEARTBEAT_S", 0.01)
    view.write()
    first = written(tmp_path).heartbeat.count
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(view.beat_for_ever)
        with anyio.fail_after(20):
            while written(tmp_path).heartbeat.count < first + 3:  # noqa: ASYNC110  # a file
                await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()


def test_writes_of_several_threads_at_once_take_turns(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last write of a session that is stopped while it opens meets the heartbeat's first."""
    epochs, writers = 12, 4
    context = context_of(tmp_path, clock=clock)
    for epoch in range(2, epochs + 1):
        own(context.root, epoch=epoch)
    view = SessionView.of(replace(context, epoch=epochs))
    decode = chain.decode

    def slow(*args: object, **kwargs: object) -> object:
        time.sleep(0.001)  # others get their turn between reading a record and keeping it
        return decode(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(chain, "decode", slow)
    start = threading.Barrier(writers)

    def write() -> None:
        start.wait(timeout=30)
        view.write()

    with ThreadPoolExecutor(writers) as threads:
        for written_one in [threads.submit(write) for _ in range(writers)]:
            written_one.result()
    assert written(tmp_path).heartbeat.count == writers
