"""Whatever escapes a session: for whom it is, and where history stands then."""

from pathlib import Path

import anyio
import pytest

from runtime.clock import ManualClock
from runtime.errors import (
    ConfigError,
    ContractViolation,
    EngineDead,
    RetryBy,
    TrainerLost,
    TransportError,
    WaitTimeout,
)
from runtime.rundir.attempt import Outcome
from runtime.session import driver
from runtime.session.ends import End, EndedBy
from runtime.session.view import SessionView
from runtime.telemetry.recorder import Recorder
from tests.runtime.session.attempted import commit, context_of


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run a session that ends as told, up to its outcome."""
    context = context_of(tmp_path, 'tracking.mode="disabled"', clock=ManualClock())

    def end(how: BaseException | End, *, update: int = 0) -> Outcome:
        async def watched(context: object, view: SessionView, recorder: Recorder) -> End:
            view.update = update
            if isinstance(how, BaseException):
                raise how
            return how

        monkeypatch.setattr(driver, "_watched", watched)
        return anyio.run(driver._run, context)

    return end


@pytest.mark.parametrize(
    ("error", "retry"),
    [
        (TrainerLost("rank 0"), RetryBy.TASK),
        (EngineDead("no engine came up"), RetryBy.TASK),
        (WaitTimeout("nothing came"), RetryBy.TASK),
        (TransportError("connection refused"), RetryBy.TASK),
        (ConfigError("no such file"), RetryBy.NOBODY),
        (ContractViolation("log-probs differ"), RetryBy.NOBODY),
        (RuntimeError("a defect"), RetryBy.NOBODY),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_nobody_inside_retries_any_more_is_for_the_next_epoch(ended, error, retry) -> None:
    outcome = ended(ExceptionGroup("tasks", [ExceptionGroup("inner", [error])]))
    assert (outcome.state, outcome.ended_by) == ("failed", "failure")
    assert outcome.failure.retry is retry
    assert outcome.failure.message == str(error)


def test_what_came_together_is_attached_to_its_cause(ended) -> None:
    errors = [ConnectionError("reset by peer"), TrainerLost("rank 0 was killed")]
    outcome = ended(ExceptionGroup("tasks", errors))
    assert outcome.failure.error_class == "TrainerLost"
    assert outcome.failure.attached == ("ConnectionError: reset by peer",)


@pytest.mark.parametrize("how", [End(by=EndedBy.STOP), TrainerLost("rank 0")])
def test_a_session_that_did_not_open_stands_where_history_does(ended, tmp_path, how) -> None:
    commit(tmp_path / "run", update=6)
    assert ended(how).update == 6
    assert ended(how, update=7).update == 7


@pytest.mark.parametrize(
    ("by", "state", "activity"),
    [
        (EndedBy.MAX_UPDATES, "complete", None),
        (EndedBy.STOP, "training", "stopped"),
        (EndedBy.PARKED, "training", "parked"),
    ],
)
def test_an_end_is_said_as_the_workflow_says_it(ended, by, state, activity) -> None:
    outcome = ended(End(by=by), update=3)
    assert (outcome.state, outcome.activity, outcome.ended_by) == (state, activity, by.value)
