"""The story of an attempt: open, then collection after collection, then whatever its end owes.

The order at a boundary is the protocol (ARCHITECTURE.md): mark consumed -> ledger snapshot and
staging -> publish -> evaluation -> tests for the end. The next collection goes to the trainer only
after staging.
"""

from __future__ import annotations

from functools import partial

import anyio
import anyio.to_thread

from configs.schedule import commit_due, evaluation_due
from runtime import faults
from runtime.data.collections import to_sequences
from runtime.data.samples import Collection
from runtime.errors import EngineRefused, ServingError, StoreError
from runtime.evaluation.asking import void_unstarted
from runtime.policy import PolicyId
from runtime.rundir.chain import Chain
from runtime.session.ends import End, EndedBy, EndRules
from runtime.session.parts import Parts
from runtime.session.probing import EVERY as PROBE_EVERY
from runtime.session.retrying import StepEnded
from runtime.telemetry.events import Event
from runtime.telemetry.log import get_logger
from runtime.telemetry.timing import Stage
from runtime.trainer.advantages import group_advantages
from runtime.trainer.protocol import TrainBatch

_log = get_logger()
_WATCH_S = 0.2
_TEARDOWN_S = 15.0
"""Of a grace: for trainers, engines and Ray to leave."""


class Session:
    """One attempt's run through its run file. Made of ready parts; ends, never restarts."""

    def __init__(self, parts: Parts, rules: EndRules, *, update: int) -> None:
        self._parts = parts
        self._rules = rules
        self._update = update
        self._staged: int | None = None
        """Update of the newest commit that stands or is being written."""
        self._asked: End | None = None
        self._waiting: anyio.CancelScope | None = None
        self._publications = 0

    @property
    def policy(self) -> PolicyId:
        """What the trainer holds now."""
        return PolicyId(self._parts.context.epoch, self._update)

    async def run(self) -> End:
        """Train until an end is reached; returns once everything it owes is done.

        Raises:
            RunError: what no one inside the session can mend.
        """
        try:
            await self._open()
            end = await self._train()
        except StepEnded as let_go:
            end = let_go.end
        try:
            await self._leave(end)
        except StepEnded as let_go:
            # What the end owes could not be done: the run is not over, whatever was asked.
            end = End(by=EndedBy.STOP) if let_go.end.is_complete else let_go.end
            await self._commit_at_end(end)
        return end

    async def watch_for_ever(self) -> None:
        """Look for requests to end and for lost engines, which interrupt a wait for a collection.

        Groups that move are progress too: a collection may take longer than anybody's patience.
        """
        moved_at = 0.0
        while True:
            await anyio.sleep(_WATCH_S)
            if self._parts.producer.progress_at != moved_at:
                moved_at = self._parts.producer.progress_at
                self._parts.view.moved(f"update {self._update}, groups under way")
            self._asked = self._parts.signals.end_requested() or self._over_time() or self._asked
            is_over = self._asked is not None or self._parts.publishing.has_lost_engines
            if is_over and self._waiting is not None:
                self._waiting.cancel()

    # --- Opening ------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Publish what was loaded, make commit 0 on a fresh start, then admit the first prompt."""
        parts = self._parts
        if faults.plan is not None:
            await faults.plan.pause("session.open")
        await self._tell_rewinds()
        parts.view.doing("rendezvous")
        await parts.steps.run("rendezvous", partial(parts.publishing.publish, self.policy))
        await self._probe()
        if not parts.restored:
            await parts.steps.run("checkpoint/0", self._commit_initial)
        self._staged = self._update
        # The attempt before may have ended between commit and result. What the run's end owes is
        # the final evaluation's, whose failure holds nothing.
        spec = parts.context.spec
        has_final = self._rules.reached(self._update) is not None and spec.evaluation.final
        if self._update and evaluation_due(spec, self._update) and not has_final:
            await self._evaluate()
        if self._rules.reached(self._update) is None:
            for key in await anyio.to_thread.run_sync(self._void_unstarted):
                parts.recorder.lifecycle.record(Event.EVALUATION_VOIDED, key=key)
        parts.view.doing(self._segment, state="training")
        parts.recorder.lifecycle.record(Event.SESSION_READY, update=self._update)
        parts.producer.published(self.policy)

    async def _tell_rewinds(self, *, leaving: End | None = None) -> None:
        """Nothing of an epoch is published, made or called complete that a copy may contradict."""
        if (copies := self._parts.copies) is not None:
            step = f"upload/{self._update}"
            self._parts.view.doing(step)
            await self._parts.steps.run(step, copies.tell_rewinds, leaving=leaving)

    def _void_unstarted(self) -> list[str]:
        context = self._parts.context
        records = Chain(context.root).read()
        return void_unstarted(context.root, records, time=context.clock.time())

    async def _commit_initial(self) -> None:
        if faults.plan is not None:
            await faults.plan.pause("session.initial")
        parts = self._parts
        model = {"model": parts.prepared.model, "prepared": parts.prepared.fingerprint}
        await parts.commits.commit_initial(parts.ledger.snapshot(), self.policy, model)

    # --- Collection after collection -----------------------------------------------------------

    async def _train(self) -> End:
        while True:
            # A run that has reached its end is over, whoever asked it to stop at that boundary.
            end = (
                self._rules.reached(self._update)
                or self._asked
                or self._rules.after(self._update, age_s=self._parts.context.age_s)
            )
            if end is not None:
                return end
            collection = await self._collect()
            if isinstance(collection, End):
                return collection
            if collection.groups:
                await self._train_on(collection)
            await self._boundary(collection)

    async def _collect(self) -> Collection | End:
        """Wait for a collection, or for whatever ends the wait.

        No publication would come to tell of an engine that is lost for good meanwhile, and nobody
        may be left to make the collection: the wait itself is the step that is held then.
        """
        parts = self._parts
        while True:
            if faults.plan is not None:
                await faults.plan.pause("session.collect")
            collection: Collection | None = None
            with (
                parts.recorder.timing.stage(Stage.ROLLOUT_WAIT, update=self._next_update),
                anyio.CancelScope() as self._waiting,
            ):
                collection = await parts.producer.take(
                    parts.context.spec.rollout.groups_per_collection, self.policy
                )
            was_interrupted, self._waiting = self._waiting.cancelled_caught, None
            if not was_interrupted:
                return End(by=EndedBy.DATA) if collection is None else collection
            if self._asked is not None:
                return self._asked
            await parts.steps.run(self._segment, parts.publishing.check_engines)

    async def _train_on(self, collection: Collection) -> None:
        parts = self._parts
        update = self._next_update
        row = parts.context.spec.core.loss_row
        advantages = [
            group_advantages(group.rewards, normalize_std=row.normalize_std).tolist()
            for group in collection.groups
        ]
        batch = TrainBatch(
            update=update,
            sequences=to_sequences(collection, advantages),
            consumed_digest=parts.ledger.digest_after(
                [group.prompt.id for group in collection.groups], update
            ),
        )
        if faults.plan is not None:
            await faults.plan.pause("session.train")
        async with parts.publishing.changing_weights():
            with parts.recorder.timing.stage(Stage.TRAIN, update=update):
                metrics = await parts.trainer.train_step(batch)
        if faults.plan is not None:
            await faults.plan.pause("session.trained")
        self._update = update
        parts.ledger.consume([(g.prompt.id, g.attempt) for g in collection.groups], update)
        parts.producer.consumed(collection.groups)
        parts.books.trained(collection, update, metrics)

    async def _boundary(self, collection: Collection) -> None:
        if faults.plan is not None:
            await faults.plan.pause("session.boundary")
        parts = self._parts
        spec = parts.context.spec
        end = self._rules.after(self._update, age_s=parts.context.age_s)
        # Before its commit: a run that goes on from there never comes by this collection again.
        parts.books.keep(collection)
        # A commit that could not be written is made good at once, on or off cadence.
        if commit_due(spec, self._update) or end is not None or parts.commits.failure is not None:
            await self._stage()
            parts.view.doing(self._segment)
        parts.view.update = self._update
        await self._publish()
        has_final = end is not None and end.owes_evaluation and spec.evaluation.final
        if evaluation_due(spec, self._update) and not has_final:
            await self._evaluate()
        parts.view.moved(f"update {self._update}")

    async def _stage(self) -> None:
        """Copy the trainer's state and let its commit be written beside training."""
        if self._staged == self._update:
            return
        if faults.plan is not None:
            await faults.plan.pause("session.stage")
        parts = self._parts
        with parts.recorder.timing.stage(Stage.STAGE_STATE, update=self._update) as stage:
            boundary = await parts.commits.boundary(self.policy, parts.ledger.snapshot)
            stage.detail.update(stall_s=boundary.stall_s, waited_s=boundary.waited_s)
        self._staged = self._update

    async def _publish(self) -> None:
        if faults.plan is not None:
            await faults.plan.pause("session.publish")
        parts = self._parts
        with parts.recorder.timing.stage(Stage.PUBLISH, update=self._update):
            decision = await parts.steps.run(
                f"publication/{self._update}", partial(parts.publishing.publish, self.policy)
            )
        parts.producer.published(self.policy)
        parts.books.published(self._update, decision)
        self._publications += 1
        if self._publications % PROBE_EVERY == 0:
            await self._probe()

    async def _probe(self) -> None:
        """Measure policy agreement at the policy just published; a violation ends the run."""
        parts = self._parts
        figures: dict[str, float] | None = None
        try:
            figures = await parts.probe.measure(self.policy)
        except (ServingError, EngineRefused) as error:
            # An engine that dies just now is the monitor's; the contract says "not measured".
            _log.warning(Event.REQUEST_FAILED, error=error.message, probe=str(self.policy))
        parts.books.probed(self._update, figures)

    async def _evaluate(self) -> None:
        """Run every set, or ask for it; its commit was staged at this boundary."""
        if faults.plan is not None:
            await faults.plan.pause("session.evaluate")
        parts = self._parts
        is_shared = parts.context.spec.evaluation.mode == "shared"
        stage = Stage.EVALUATE if is_shared else Stage.SNAPSHOT
        for name in parts.evaluator.sets:
            step = f"evaluation/{self._update}/{name}"
            parts.view.doing(step)
            with parts.recorder.timing.stage(stage, update=self._update, set=name):
                await parts.steps.run(
                    step, partial(parts.evaluator.evaluate, name, self.policy, kind="cadence")
                )
        parts.view.doing(self._segment)

    # --- Ends ---------------------------------------------------------------------------------

    async def _leave(self, end: End) -> None:
        """Commit, then what a finished run owes; the processes go afterwards."""
        parts = self._parts
        if faults.plan is not None:
            await faults.plan.pause("session.leave")
        parts.books.ending(end)
        if end.is_complete:
            await self._tell_rewinds(leaving=end)
        await self._commit_at_end(end)
        await parts.producer.close()
        await parts.evaluator.settle()
        if end.by is EndedBy.SIGTERM:
            await self._leave_for_good()
        if end.owes_export and parts.context.spec.output.export_hf:
            step = f"export/{self._update}"
            parts.view.doing(step)
            with parts.recorder.timing.stage(Stage.EXPORT, update=self._update):
                export = partial(parts.exporter.export, self.policy)
                await parts.steps.run(step, export, leaving=end)
        if end.owes_evaluation and parts.context.spec.evaluation.final:
            await self._evaluate_at_end()

    async def _commit_at_end(self, end: End) -> None:
        parts = self._parts
        if self._staged is None:
            # Nothing was opened: there is no state worth more than the commit before. A fresh run
            # has none yet, and without one nothing that ends can be called complete.
            if end.is_complete and not parts.restored:
                await parts.steps.run("checkpoint/0", self._commit_initial, leaving=end)
            return
        if faults.plan is not None:
            await faults.plan.pause("session.settle")
        parts.view.doing(f"checkpoint/{self._update}")

        async def settled() -> None:
            if parts.commits.failure is not None:
                self._staged = None
            await self._stage()
            await parts.commits.settle()

        if end.is_complete:
            await parts.steps.run(f"checkpoint/{self._update}", settled, leaving=end)
            return
        try:
            await settled()
        except StoreError as error:
            # Whoever stops a run gets it stopped: the commit before stands.
            _log.error(Event.CHECKPOINT_FAILED, update=self._update, error=error.message)

    async def _leave_for_good(self) -> None:
        """What a terminated run owes when nobody resumes it: a request, an export while time is.

        An attempt that goes on all the same voids the request, if it has not started.
        """
        parts = self._parts
        spec, order = parts.context.spec, parts.context.order
        has_commit = self._staged == self._update and parts.commits.failure is None
        if spec.launch.auto_resume != "off" or not has_commit or self._update == 0:
            return
        if spec.evaluation.final:
            parts.evaluator.ask_later(self.policy)
        left_s = parts.signals.grace_left_s(order.grace_s) - _TEARDOWN_S
        if not spec.output.export_hf or left_s <= 0:
            return
        parts.view.doing(f"export/{self._update}")
        with (
            parts.recorder.timing.stage(Stage.EXPORT, update=self._update),
            anyio.move_on_after(left_s),
        ):
            try:
                await parts.exporter.export(self.policy)
            except StoreError as error:
                _log.warning(Event.EXPORT_FAILED, update=self._update, error=error.message)

    async def _evaluate_at_end(self) -> None:
        """A final evaluation that fails leaves the run complete, with its sets outstanding."""
        parts = self._parts
        parts.view.doing(f"evaluation/{self._update}/final")
        session = parts.context.spec.session
        with parts.recorder.timing.stage(Stage.EVALUATE, update=self._update):
            await parts.evaluator.final(
                self.policy, retries=session.retries, backoff_s=session.retry_backoff
            )
        parts.view.outstanding = tuple(parts.evaluator.outstanding)

    # --- Small things -------------------------------------------------------------------------

    @property
    def _next_update(self) -> int:
        return self._update + self._parts.context.spec.core.updates_per_collection

    @property
    def _segment(self) -> str:
        """The step in hand: the collections up to the next commit."""
        spec = self._parts.context.spec
        update = self._next_update
        while not commit_due(spec, update) and self._rules.reached(update) is None:
            update += spec.core.updates_per_collection
        return f"segment/{update}"

    def _over_time(self) -> End | None:
        bound = self._rules.max_run_seconds
        if bound is not None and self._parts.context.age_s >= bound:
            return End(by=EndedBy.WALL_CLOCK)
        return None
