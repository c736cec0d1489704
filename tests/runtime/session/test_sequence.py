"""The order at a boundary, and what every end does, with parts that only say they were used."""

from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from runtime.checkpoints.bucket import StoreUnreachable
from runtime.errors import DiskFull, PublicationFailed
from runtime.session.ends import EndedBy
from tests.runtime.session.said_sessions import EVALUATES, EXPORTS, Sessions

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("soon")]


async def test_the_order_at_a_boundary(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, "core.max_updates=4", EXPORTS, "evaluation.every_updates=2")
    assert await sessions.run() is EndedBy.MAX_UPDATES
    assert sessions.said == [
        "publish 0", "commit 0", "admit 0",
        "train 1", "consume 1", "keep 1", "publish 1", "admit 1",
        "train 2", "consume 2", "keep 2", "stage 2", "publish 2", "admit 2", "evaluate 2",
        "train 3", "consume 3", "keep 3", "publish 3", "admit 3",
        "train 4", "consume 4", "keep 4", "stage 4", "publish 4", "admit 4",
        "end max_updates", "close producer", "export 4", "final 4",
    ]  # fmt: skip


async def test_the_view_names_the_segment_up_to_the_next_commit(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, "core.max_updates=5")
    await sessions.run()
    steps = {what: step for what, step in sessions.seen if what.startswith("train")}
    assert steps == {
        "train 1": "segment/2", "train 2": "segment/2", "train 3": "segment/4",
        "train 4": "segment/4", "train 5": "segment/5",
    }  # fmt: skip


async def test_a_restored_session_makes_no_commit_0_and_evaluates_what_it_owes(
    tmp_path: Path,
) -> None:
    sessions = Sessions(tmp_path, "core.max_updates=6", EVALUATES, update=4)
    await sessions.run()
    assert sessions.said[:4] == ["publish 4", "evaluate 4", "admit 4", "train 5"]


@pytest.mark.parametrize(("update", "commits"), [(0, 1), (4, 0)])
async def test_a_final_stop_of_a_held_rendezvous_is_complete_with_a_commit(
    tmp_path: Path, update: int, commits: int
) -> None:
    sessions = Sessions(tmp_path, "core.max_updates=6", update=update)
    sessions.fail(f"publish {update}", *[PublicationFailed("no engine")] * 20)
    sessions.stop("final")
    assert await sessions.run() is EndedBy.STOP_FINAL
    assert sessions.said.count("commit 0") == commits
    assert "admit 0" not in sessions.said


async def test_nothing_is_published_before_the_store_knows_what_was_undone(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, "core.max_updates=5", update=4, has_copies=True)
    tries = sessions.context.spec.session.retries + 1
    sessions.fail("tell", *[StoreUnreachable("away")] * tries)
    sessions.has_person = True
    assert await sessions.run() is EndedBy.MAX_UPDATES
    assert sessions.said[: tries + 4] == [
        *["tell"] * tries, "hold", "tell", "hold over", "publish 4",
    ]  # fmt: skip
    assert {step for what, step in sessions.seen if what == "hold"} == {"upload/4"}


@pytest.mark.parametrize(("mode", "end"), [("stop", EndedBy.STOP), ("final", EndedBy.PARKED)])
async def test_a_run_whose_rewind_the_store_does_not_know_is_never_complete(
    tmp_path: Path, mode: str, end: EndedBy
) -> None:
    sessions = Sessions(tmp_path, "core.max_updates=5", EXPORTS, update=4, has_copies=True)
    sessions.fail("tell", *[StoreUnreachable("away")] * 50)
    sessions.stop(mode)
    assert await sessions.run() is end
    assert {*sessions.said} <= {"tell", "hold", "end stop", "end stop_final", "close producer"}


async def test_a_session_restored_at_the_end_owes_the_final_evaluation_alone(
    tmp_path: Path,
) -> None:
    sessions = Sessions(tmp_path, "core.max_updates=4", EVALUATES, update=4)
    assert await sessions.run() is EndedBy.MAX_UPDATES
    assert sessions.said == [
        "publish 4", "admit 4", "end max_updates", "close producer", "final 4",
    ]  # fmt: skip


async def test_the_last_collection_may_be_short_and_ends_with_the_data(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, "core.max_updates=50", EXPORTS, num_prompts=5)
    assert await sessions.run() is EndedBy.DATA
    assert sessions.said[-4:] == ["end data", "close producer", "export 3", "final 3"]
    assert sessions.staged == [2, 3]


async def test_a_stop_interrupts_the_wait_commits_and_owes_nothing(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, EXPORTS)
    sessions.stalls_at = 3
    async with anyio.create_task_group() as tasks:

        async def stop() -> None:
            await sessions.stalled.wait()
            sessions.stop()

        tasks.start_soon(stop)
        assert await sessions.run() is EndedBy.STOP
    assert sessions.staged == [2, 3]
    assert sessions.said[-3:] == ["end stop", "stage 3", "close producer"]


async def test_a_run_at_its_end_is_complete_whoever_stops_it_there(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, "core.max_updates=2", EXPORTS, update=2)
    sessions.stop()
    assert await sessions.run() is EndedBy.MAX_UPDATES
    assert sessions.said[-2:] == ["export 2", "final 2"]


async def test_the_wall_clock_ends_it_off_cadence_with_all_that_is_owed(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, "core.max_run_seconds=60", EXPORTS)
    sessions.stalls_at = 3
    async with anyio.create_task_group() as tasks:

        async def wait() -> None:
            await sessions.stalled.wait()
            sessions.clock.advance(61)

        tasks.start_soon(wait)
        assert await sessions.run() is EndedBy.WALL_CLOCK
    assert sessions.staged == [2, 3]
    assert sessions.said[-2:] == ["export 3", "final 3"]


async def test_the_wall_clock_lets_a_held_step_go(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, "core.max_run_seconds=30", EXPORTS)
    sessions.fail("publish 3", *[PublicationFailed("none verified")] * 9)
    assert await sessions.run() is EndedBy.WALL_CLOCK
    assert sessions.said[-2:] == ["export 3", "final 3"]


async def test_a_run_at_its_end_is_not_stopped_by_the_wall_clock(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, "core.max_updates=2", "core.max_run_seconds=30", EXPORTS)
    sessions.fail("export 2", *[DiskFull("full")] * 9)
    assert await sessions.run() is EndedBy.PARKED  # detach_grace comes, the bound says nothing


async def test_debug_exit_counts_from_the_update_that_was_restored(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, "core.debug_exit_after=3", update=2)
    assert await sessions.run() is EndedBy.DEBUG_EXIT
    assert sessions.staged == [4, 5]
    assert "final 5" not in sessions.said
