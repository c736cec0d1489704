"""The order at a boundary, and what every end does, with parts that only say they were used."""

import signal
from collections import deque
from collections.abc import Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from runtime.clock import ManualClock
from runtime.data.samples import Collection, Group, Prompt, PromptId, Sample, Span
from runtime.errors import DiskFull, EngineDead, EvaluationFailed, PublicationFailed, RunError
from runtime.policy import PolicyId
from runtime.rundir.control import Control
from runtime.session import sequence
from runtime.session.ends import EndedBy, EndRules
from runtime.session.parts import Parts
from runtime.session.retrying import StepRetries
from runtime.session.sequence import Session
from runtime.session.signals import Signals
from runtime.session.view import SessionView
from tests.runtime.session.attempted import context_of

pytestmark = pytest.mark.anyio


class Sessions:
    """One session over parts that write down what is asked of them.

    They keep of the real ones: collections come in order and end with None, a wait for one can be
    cancelled, a commit is staged before it is settled, and every call can be told to fail.
    """

    def __init__(self, folder: Path, *sets: str, update: int = 0, num_prompts: int = 100) -> None:
        self.clock = ManualClock()
        self.context = context_of(folder, *sets, clock=self.clock)
        self.said: list[str] = []
        self.failures: dict[str, deque[RunError]] = {}
        self.update = update
        self.left = num_prompts
        self.stalls_at: int | None = None
        self.stalled = anyio.Event()
        self.has_person = False
        """Somebody asks for another try of whatever failed."""
        self.staged: list[int] = []
        self.commit_failure: RunError | None = None
        self.view = SessionView.of(self.context)
        self.seen: list[tuple[str, str | None]] = []
        self.control = Control(self.context.root)
        spec = self.context.spec
        signals = Signals.of(
            self.context.root, epoch=1, detached=True, detach_grace_s=60.0, clock=self.clock,
            over_time=self.context.is_over_time,
        )  # fmt: skip
        self.parts = parts = SimpleNamespace(
            context=self.context,
            prepared=SimpleNamespace(model="m", fingerprint="f"),
            restored=update > 0,
            trainer=SimpleNamespace(train_step=self._train_step),
            ledger=SimpleNamespace(
                digest_after=lambda ids, update: "digest",
                consume=lambda pairs, update: self._say(f"consume {update}"),
                snapshot=lambda: "segment",
            ),
            producer=SimpleNamespace(
                progress_at=0.0,
                take=self._take,
                published=lambda policy: self._say(f"admit {policy.update}"),
                consumed=lambda groups: None,
                close=self._maker("close producer"),
            ),
            publishing=SimpleNamespace(
                publish=self._publish, changing_weights=asynccontextmanager(self._weights),
                has_lost_engines=False, check_engines=self._check_engines,
            ),
            commits=self,
            evaluator=SimpleNamespace(
                sets={"held": None}, outstanding=[], evaluate=self._evaluate, final=self._final,
                settle=self._settle, ask_later=lambda policy: self._say(f"ask {policy.update}"),
            ),
            probe=SimpleNamespace(measure=self._probe),
            exporter=SimpleNamespace(export=self._export),
            steps=StepRetries(
                retries=spec.session.retries,
                backoff_s=0.0,
                detach_grace_s=60.0,
                signals=signals,
                view=self.view,
                effects=SimpleNamespace(
                    begin=lambda: self._say("hold"), asked=self._asked_again,
                    end=lambda: self._say("hold over"),
                ),
                clock=self.clock,
                sleep=self._sleep,
            ),
            signals=signals,
            view=self.view,
            books=SimpleNamespace(
                trained=lambda *_: None, published=lambda *_: None, probed=lambda *_: None,
                keep=lambda collection: self._say(f"keep {collection.id}"),
                ending=lambda end: self._say(f"end {end.by}"),
            ),
            recorder=SimpleNamespace(
                timing=SimpleNamespace(
                    stage=lambda *_, **__: nullcontext(SimpleNamespace(detail={}))
                ),
                lifecycle=SimpleNamespace(record=lambda *_, **__: None),
            ),
        )  # fmt: skip
        self.signals = signals
        rules = EndRules(
            max_updates=self.context.plan.schedule.updates,
            data_updates=-(-num_prompts // 2),
            max_run_seconds=spec.core.max_run_seconds,
            debug_exit_after=spec.core.debug_exit_after,
            first_update=update,
        )
        self.session = Session(_as_parts(parts), rules, update=update)

    async def run(self) -> EndedBy:
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.session.watch_for_ever)
                end = await self.session.run()
                tasks.cancel_scope.cancel()
        return end.by

    def fail(self, what: str, *errors: RunError) -> None:
        self.failures[what] = deque(errors)

    def stop(self, mode: Any = "stop") -> None:
        self.control.request_stop(mode, epoch=1, by="t", time=0.0)

    # --- What the parts do ----------------------------------------------------------------------

    def _say(self, what: str) -> None:
        self.seen.append((what, self.view.step))
        self.said.append(what)
        if waiting := self.failures.get(what):
            raise waiting.popleft()

    def _maker(self, what: str) -> Callable[[], Any]:
        async def act() -> None:
            self._say(what)

        return act

    async def _check_engines(self) -> None:
        if self.parts.publishing.has_lost_engines:
            raise EngineDead("engine slots [0] are dead")

    def _asked_again(self) -> None:
        self.stalls_at = None
        self.parts.publishing.has_lost_engines = False

    async def _sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)
        if self.has_person and self.view.failure is not None:
            self.control.request_retry(self.view.failure.id)
        await anyio.lowlevel.checkpoint()

    async def _weights(self) -> Any:
        yield

    async def _take(self, count: int, policy: PolicyId) -> Collection | None:
        if policy.update == self.stalls_at:
            self.stalled.set()
            await anyio.sleep_forever()
        await anyio.lowlevel.checkpoint()
        count = min(count, self.left)
        if count == 0:
            return None
        self.left -= count
        groups = tuple(_group(self.left + i, policy) for i in range(count))
        return Collection(id=policy.update + 1, groups=groups, taken_at=policy)

    async def _train_step(self, batch: Any) -> Any:
        self._say(f"train {batch.update}")
        return SimpleNamespace(values={})

    async def _publish(self, policy: PolicyId) -> Any:
        self._say(f"publish {policy.update}")
        return SimpleNamespace()

    async def _probe(self, policy: PolicyId) -> dict[str, float]:
        return {"gap_mean": 0.0}

    async def _evaluate(self, name: str, policy: PolicyId, *, kind: str) -> None:
        self._say(f"evaluate {policy.update}")

    async def _settle(self) -> None:
        pass

    async def _final(self, policy: PolicyId, **_: object) -> None:
        self._say(f"final {policy.update}")

    async def _export(self, policy: PolicyId) -> None:
        self._say(f"export {policy.update}")

    # --- Commits ----------------------------------------------------------------------------------

    @property
    def failure(self) -> RunError | None:
        return self.commit_failure

    async def commit_initial(self, segment: object, policy: PolicyId, model: object) -> None:
        self._say("commit 0")

    async def boundary(self, policy: PolicyId, snapshot: Callable[[], object]) -> Any:
        snapshot()
        self.staged.append(policy.update)
        self.commit_failure = None
        try:
            self._say(f"stage {policy.update}")
        except DiskFull as error:
            self.commit_failure = error
        return SimpleNamespace(stall_s=0.0, waited_s=0.0)

    async def settle(self) -> None:
        if self.commit_failure is not None:
            raise self.commit_failure


def _as_parts(parts: Any) -> Parts:
    return parts


def _group(row: int, policy: PolicyId) -> Group:
    sample = Sample(
        token_ids=(1,), logprobs=(-1.0,), spans=(Span(0, 1, policy),), prefill=policy,
        finish="stop", reward=1.0,
    )  # fmt: skip
    prompt = Prompt(id=PromptId(0, row), token_ids=(1,), text="", answer=None, verifier="v")
    return Group(prompt=prompt, attempt=1, samples=(sample, sample))


EXPORTS = "output.export_hf=true"
EVALUATES = "evaluation.every_updates=4"


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


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "_WATCH_S", 0.01)
