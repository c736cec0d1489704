"""What SIGTERM does to a session: a commit, a question, an export, by what is asked of it."""

import signal
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from runtime.errors import DiskFull
from runtime.session.ends import EndedBy
from tests.runtime.session.said_sessions import EXPORTS, Sessions

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("soon")]


async def terminated(sessions: Sessions, *, waited_s: float = 0.0) -> EndedBy:
    """SIGTERM while the fourth collection is waited for; ``waited_s`` of the grace go by."""
    sessions.stalls_at = 3
    async with anyio.create_task_group() as tasks:

        async def terminate() -> None:
            await sessions.stalled.wait()
            sessions.signals.on_signal(signal.SIGTERM)
            sessions.clock.advance(waited_s)

        tasks.start_soon(terminate)
        return await sessions.run()


async def test_sigterm_without_resumption_commits_asks_and_exports(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, EXPORTS)
    assert await terminated(sessions) is EndedBy.SIGTERM
    assert sessions.staged == [2, 3]
    assert sessions.said[-4:] == ["stage 3", "close producer", "ask 3", "export 3"]


async def test_sigterm_with_no_time_left_does_without_the_export(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, EXPORTS)
    assert await terminated(sessions, waited_s=50.0) is EndedBy.SIGTERM
    assert sessions.said[-1] == "ask 3"


async def test_sigterm_of_a_run_that_will_be_resumed_owes_a_commit_alone(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, EXPORTS, 'launch.auto_resume="milepost"')
    assert await terminated(sessions) is EndedBy.SIGTERM
    assert sessions.said[-2:] == ["stage 3", "close producer"]


async def test_sigterm_without_a_commit_asks_for_nothing(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, EXPORTS)
    sessions.fail("stage 3", *[DiskFull("full")] * 9)
    assert await terminated(sessions) is EndedBy.SIGTERM
    assert not {"ask 3", "export 3"} & set(sessions.said)


async def test_an_export_without_room_after_sigterm_stops_nothing(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, EXPORTS)
    sessions.fail("export 3", DiskFull("full"))
    assert await terminated(sessions) is EndedBy.SIGTERM
    assert sessions.said[-2:] == ["ask 3", "export 3"]
