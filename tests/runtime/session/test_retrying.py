from functools import partial
from types import SimpleNamespace

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.clock import ManualClock
from runtime.errors import (
    ContractViolation,
    DiskFull,
    EvaluationFailed,
    PublicationFailed,
    RunError,
    TrainerLost,
)
from runtime.rundir.control import Control
from runtime.rundir.failure import Failure
from runtime.rundir.layout import RunRoot
from runtime.session.ends import End, EndedBy
from runtime.session.retrying import StepEnded, StepRetries
from runtime.session.signals import Signals

GRACE_S = 60.0


class Told:
    """A view that keeps what it was told, with the time."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.failures: list[tuple[float, Failure, bool]] = []
        self.recovered_from: list[Failure] = []

    def failed(self, failure: Failure, *, attempt: int, held: bool) -> None:
        assert attempt == len(self.failures) + 1
        self.failures.append((self.clock.monotonic(), failure, held))

    def recovered(self, failure: Failure) -> None:
        self.recovered_from.append(failure)

    @property
    def held(self) -> list[Failure]:
        return [failure for _, failure, held in self.failures if held]


class Step:
    """A step that fails a number of times, and a person who acts at given times."""

    def __init__(self, root: RunRoot, *, retries: int = 2, error: RunError | None = None) -> None:
        root.create()
        self.clock = ManualClock()
        self.begin = self.clock.monotonic()
        self.view = Told(self.clock)
        self.control = Control(root)
        self.signals = Signals.of(
            root, epoch=1, detached=True, detach_grace_s=GRACE_S, clock=self.clock
        )
        self.error = error or PublicationFailed("no engine was verified")
        self.tries: list[float] = []
        self.effects: list[str] = []
        self.plans: list[tuple[float, object]] = []
        self.steps = StepRetries(
            retries=retries,
            backoff_s=2.0,
            detach_grace_s=GRACE_S,
            signals=self.signals,
            view=self.view,
            effects=SimpleNamespace(
                **{what: partial(self.effects.append, what) for what in ("begin", "asked", "end")}
            ),
            clock=self.clock,
            sleep=self._sleep,
        )

    def run(self, *, fails: int, leaving: End | None = None) -> str:
        async def action() -> str:
            self.tries.append(self.clock.monotonic() - self.begin)
            if len(self.tries) <= fails:
                raise self.error
            return "done"

        return anyio.run(partial(self.steps.run, "publication/5", action, leaving=leaving))

    def at(self, seconds: float, act: object) -> None:
        self.plans.append((self.begin + seconds, act))

    async def _sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.clock.advance(seconds)
        for plan in [p for p in self.plans if p[0] <= self.clock.monotonic()]:
            self.plans.remove(plan)
            plan[1]()  # type: ignore[operator]


def test_what_goes_through_at_once_is_not_mentioned(root: RunRoot) -> None:
    step = Step(root)
    assert step.run(fails=0) == "done"
    assert (step.tries, step.view.failures, step.view.recovered_from) == ([0.0], [], [])


def test_tries_come_after_pauses_that_double(root: RunRoot) -> None:
    step = Step(root)
    assert step.run(fails=2) == "done"
    assert step.tries == pytest.approx([0, 2, 6])
    assert step.view.held == []
    assert step.view.recovered_from == [step.view.failures[-1][1]]


def test_beyond_its_retries_a_step_is_held_until_a_person_asks_once_more(root: RunRoot) -> None:
    step = Step(root)
    step.at(30, lambda: step.control.request_retry(step.view.held[-1].id))
    assert step.run(fails=3) == "done"
    assert len(step.view.held) == 1
    assert step.tries[:3] == pytest.approx([0, 2, 6])
    assert step.tries[3] >= 30
    assert step.view.recovered_from == step.view.held


def test_a_hold_is_felt_from_its_begin_to_the_try_that_goes_through(root: RunRoot) -> None:
    step = Step(root, retries=1)
    for after_s in (10, 20):
        step.at(after_s, lambda: step.control.request_retry(step.view.held[-1].id))
    assert step.run(fails=3) == "done"
    assert step.effects == ["begin", "asked", "begin", "asked", "end"]
    mended = Step(root, retries=3)
    assert mended.run(fails=3) == "done"
    assert mended.effects == []


def test_a_retry_asked_for_another_failure_changes_nothing(root: RunRoot) -> None:
    step = Step(root)
    step.control.request_retry("f-00000000")
    with pytest.raises(StepEnded) as ended:
        step.run(fails=99)
    assert ended.value.end == End(by=EndedBy.PARKED)
    assert len(step.tries) == 3


def test_one_request_is_good_for_one_try(root: RunRoot) -> None:
    step = Step(root)
    step.at(10, lambda: step.control.request_retry(step.view.held[-1].id))
    with pytest.raises(StepEnded):
        step.run(fails=99)
    assert len(step.tries) == 4
    assert len({f.id for f in step.view.held}) == 2


def test_the_grace_counts_from_the_last_try(root: RunRoot) -> None:
    step = Step(root)
    step.at(50, lambda: step.control.request_retry(step.view.held[-1].id))
    with pytest.raises(StepEnded) as ended:
        step.run(fails=99)
    assert ended.value.end.activity == "parked"
    assert ended.value.failure is not None
    assert step.clock.monotonic() - step.begin == pytest.approx(step.tries[-1] + GRACE_S, abs=1)


@pytest.mark.parametrize(
    ("mode", "by"), [("stop", EndedBy.STOP), ("final", EndedBy.STOP_FINAL), ("now", EndedBy.STOP)]
)
@pytest.mark.parametrize("after_s", [1, 30])
def test_a_stop_ends_a_pause_and_a_hold(
    root: RunRoot, mode: str, by: EndedBy, after_s: float
) -> None:
    step = Step(root)
    step.at(after_s, lambda: step.control.request_stop(mode, epoch=1, by="t", time=0.0))  # type: ignore[arg-type]
    with pytest.raises(StepEnded) as ended:
        step.run(fails=99)
    assert ended.value.end.by is by
    assert step.clock.monotonic() - step.begin == pytest.approx(after_s, abs=0.6)


def test_a_stop_of_another_epoch_is_not_ours(root: RunRoot) -> None:
    step = Step(root)
    step.control.request_stop("stop", epoch=2, by="t", time=0.0)
    assert step.run(fails=1) == "done"


def test_the_request_that_is_being_honoured_takes_no_retry_away(root: RunRoot) -> None:
    step = Step(root)
    step.control.request_stop("final", epoch=1, by="t", time=0.0)
    assert step.run(fails=2, leaving=End(by=EndedBy.STOP_FINAL)) == "done"
    again = Step(root)
    with pytest.raises(StepEnded):
        again.run(fails=2, leaving=End(by=EndedBy.MAX_UPDATES))


@pytest.mark.parametrize(
    "error", [TrainerLost("rank 1 is gone"), ContractViolation("log-probs differ")]
)
def test_what_the_session_cannot_mend_leaves_at_once(root: RunRoot, error: RunError) -> None:
    step = Step(root, error=error)
    with pytest.raises(type(error)):
        step.run(fails=99)
    assert (step.tries, step.view.failures) == ([0.0], [])


@given(retries=st.integers(0, 5), fails=st.integers(0, 6))
def test_held_exactly_when_the_retries_are_used_up(
    tmp_path_factory: pytest.TempPathFactory, retries: int, fails: int
) -> None:
    root = RunRoot(tmp_path_factory.mktemp("held") / "run")
    errors = [DiskFull("full"), EvaluationFailed("items failed"), PublicationFailed("none")]
    step = Step(root, retries=retries, error=errors[fails % 3])
    if fails <= retries:
        assert step.run(fails=fails) == "done"
        assert step.view.held == []
        assert len(step.tries) == fails + 1
    else:
        with pytest.raises(StepEnded):
            step.run(fails=fails)
        assert len(step.view.held) == 1
        assert len(step.tries) == retries + 1
