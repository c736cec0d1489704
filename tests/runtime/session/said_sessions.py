"""Sessions over parts that only say they were used."""

from collections import deque
from collections.abc import Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel

from runtime.clock import ManualClock
from runtime.data.samples import Collection, Group, Prompt, PromptId, Sample, Span
from runtime.errors import DiskFull, EngineDead, RunError
from runtime.policy import PolicyId
from runtime.rundir.control import Control
from runtime.session.ends import EndedBy, EndRules
from runtime.session.parts import Parts
from runtime.session.retrying import StepRetries
from runtime.session.sequence import Session
from runtime.session.signals import Signals
from runtime.session.view import SessionView
from tests.runtime.session.attempted import context_of


class Sessions:
    """One session over parts that write down what is asked of them.

    They keep of the real ones: collections come in order and end with None, a wait for one can be
    cancelled, a commit is staged before it is settled, and every call can be told to fail.
    """

    def __init__(
        self,
        folder: Path,
        *sets: str,
        update: int = 0,
        num_prompts: int = 100,
        has_copies: bool = False,
    ) -> None:
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
            copies=SimpleNamespace(tell_rewinds=self._maker("tell")) if has_copies else None,
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
