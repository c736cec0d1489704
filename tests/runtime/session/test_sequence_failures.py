"""Steps that fail at a boundary: made good, held, tried again, parked."""

from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from runtime.errors import DiskFull, EvaluationFailed, PublicationFailed
from runtime.session.ends import EndedBy
from tests.runtime.session.said_sessions import EVALUATES, EXPORTS, Sessions

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("soon")]


async def engine_lost(sessions: Sessions) -> None:
    await sessions.stalled.wait()
    sessions.parts.publishing.has_lost_engines = True


async def test_a_lost_engine_holds_the_wait_until_a_person_asks_for_another_try(
    tmp_path: Path,
) -> None:
    sessions = Sessions(tmp_path, "core.max_updates=5")
    sessions.stalls_at = 3
    sessions.has_person = True
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine_lost, sessions)
        assert await sessions.run() is EndedBy.MAX_UPDATES
    since = sessions.said.index("hold")
    assert sessions.said[since : since + 3] == ["hold", "hold over", "train 4"]
    assert sessions.seen[since][1] == "segment/4"


async def test_a_wait_that_stays_held_is_parked_with_a_commit(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path)
    sessions.stalls_at = 3
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine_lost, sessions)
        assert await sessions.run() is EndedBy.PARKED
    assert sessions.staged == [2, 3]
    assert "hold over" not in sessions.said


async def test_a_commit_that_found_no_room_is_made_good_at_the_next_boundary(
    tmp_path: Path,
) -> None:
    sessions = Sessions(tmp_path, "core.max_updates=4", "checkpoint.every_updates=2")
    sessions.fail("stage 2", DiskFull("full"))
    assert await sessions.run() is EndedBy.MAX_UPDATES
    assert sessions.staged == [2, 3, 4]


async def test_no_room_when_stopped_still_stops(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, "core.debug_exit_after=1")
    sessions.fail("stage 1", *[DiskFull("full")] * 9)
    assert await sessions.run() is EndedBy.DEBUG_EXIT


async def test_a_publication_that_stays_failed_is_held_then_parked_with_a_commit(
    tmp_path: Path,
) -> None:
    sessions = Sessions(tmp_path)
    sessions.fail("publish 3", *[PublicationFailed("none verified")] * 9)
    assert await sessions.run() is EndedBy.PARKED
    assert sessions.said.count("publish 3") == 2  # and one retry
    assert sessions.staged == [2, 3]
    assert "keep 3" in sessions.said  # who resumes from 3 never comes by it again
    assert sessions.view.failure is not None


async def test_a_failed_evaluation_is_tried_again_and_training_goes_on(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, "core.max_updates=6", EVALUATES)
    sessions.fail("evaluate 4", EvaluationFailed("2 of 8 failed"))
    assert await sessions.run() is EndedBy.MAX_UPDATES
    assert sessions.said.count("evaluate 4") == 2
    assert sessions.view.failure is None


async def test_an_evaluation_that_stays_failed_is_held_and_takes_the_session_down_with_its_error(
    tmp_path: Path,
) -> None:
    sessions = Sessions(tmp_path, "core.max_updates=8", EVALUATES)
    sessions.fail("evaluate 4", *[EvaluationFailed("2 of 8 failed")] * 9)
    assert await sessions.run() is EndedBy.PARKED
    assert sessions.said.count("evaluate 4") == 2  # and one retry
    assert sessions.said.index("hold") > sessions.said.index("evaluate 4")
    assert "train 5" not in sessions.said
    assert sessions.view.failure is not None
    assert sessions.view.failure.error_class == "EvaluationFailed"
    assert sessions.staged[-1] == 4


async def test_an_evaluation_that_a_person_mends_goes_on_from_where_it_was_held(
    tmp_path: Path,
) -> None:
    sessions = Sessions(tmp_path, "core.max_updates=6", EVALUATES)
    sessions.has_person = True
    sessions.fail("evaluate 4", *[EvaluationFailed("2 of 8 failed")] * 3)
    assert await sessions.run() is EndedBy.MAX_UPDATES
    assert sessions.said.count("evaluate 4") == 4
    assert sessions.said.index("hold") < sessions.said.index("hold over")
    assert sessions.said.index("hold over") < sessions.said.index("train 5")
    assert sessions.view.failure is None


async def test_a_held_export_that_nobody_mends_leaves_the_run_resumable(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, "core.max_updates=2", EXPORTS)
    sessions.fail("export 2", *[DiskFull("full")] * 9)
    assert await sessions.run() is EndedBy.PARKED
    assert "final 2" not in sessions.said
    assert sessions.staged == [2]


async def test_a_final_stop_does_not_cut_its_own_export_short(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, EXPORTS)
    sessions.fail("export 0", DiskFull("full"))
    sessions.stalls_at = 0
    sessions.stop("final")
    assert await sessions.run() is EndedBy.STOP_FINAL
    assert sessions.said[-3:] == ["export 0", "export 0", "final 0"]
