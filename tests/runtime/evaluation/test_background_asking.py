"""What a session asks others to evaluate: snapshots beside training, requests, results landed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import save_file

from runtime.checkpoints.export import export_live
from runtime.clock import ManualClock
from runtime.errors import DiskFull
from runtime.evaluation import files, receipts
from runtime.evaluation.asking import void_unstarted
from runtime.evaluation.background import BackgroundEvaluator
from runtime.evaluation.opening import Asker
from runtime.evaluation.receipts import EvaluationReceipt
from runtime.evaluation.records import Result, Started
from runtime.evaluation.snapshots import find_weights, pinned_policies, release_snapshots
from runtime.policy import PolicyId
from runtime.publication.checksum import checksums
from runtime.publication.told import WrittenSnapshot
from runtime.rundir import atomic
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.telemetry.events import Event
from runtime.telemetry.protocol import Axis
from tests.runtime.evaluation.asked import Asked
from tests.runtime.evaluation.test_evaluator import Told
from tests.runtime.session.attempted import commit, own

pytestmark = pytest.mark.anyio
P4, P8 = PolicyId(1, 4), PolicyId(1, 8)


class Weights:
    """A trainer that is one tensor; writing it can fail, and others act while it is written."""

    def __init__(self) -> None:
        self.value = 0.0
        self.error: Exception | None = None
        self.meanwhile: Callable[[], object] = lambda: None

    async def write_snapshot(self, folder: str) -> WrittenSnapshot:
        self.meanwhile()
        if self.error is not None:
            raise self.error
        tensors = {"w": torch.full((4,), self.value)}
        save_file(tensors, Path(folder) / "model.safetensors")
        return WrittenSnapshot(
            num_tensors=1, num_bytes=16, digests={"sha256": checksums(tensors.items())}
        )

    async def write_adapter(self, folder: str) -> WrittenSnapshot:
        tensors = {"a": torch.zeros(2)}
        save_file(tensors, Path(folder) / "adapter_model.safetensors")
        (Path(folder) / "adapter_config.json").write_text("{}")
        return WrittenSnapshot(
            num_tensors=1, num_bytes=8, digests={"sha256": checksums(tensors.items())}
        )


class Asking:
    def __init__(self, folder: Path, tasks: Any, *, epoch: int = 1, overflow: str = "wait") -> None:
        self.root = RunRoot(folder / "run")
        self.root.create()
        if not Chain(self.root).read():
            own(self.root, epoch=1)
        self.model = folder / "model"
        self.model.mkdir(exist_ok=True)
        (self.model / "config.json").write_text("{}")
        self.source, self.told, self.clock = Weights(), Told(), ManualClock()
        frozen = Asked(folder).frozen
        self.evaluator = BackgroundEvaluator(
            root=self.root,
            sets={"held": frozen},
            asker=Asker(run="test", attempt=1, epoch=epoch, clock=self.clock),
            source=self.source,
            model=self.model,
            overflow=overflow,  # type: ignore[arg-type]
            tasks=tasks,
            metrics=self.told,
            lifecycle=self.told,  # type: ignore[arg-type]
            clock=self.clock,
        )

    async def ask(self, policy: PolicyId, kind: Any = "cadence") -> None:
        await self.evaluator.evaluate("held", policy, kind=kind)
        await self.evaluator.settle()

    def by_hand(self, policy: PolicyId) -> bool:
        """What a person's ``milepost evaluate`` writes, in a process of its own."""
        evaluator = self.evaluator
        request = evaluator.asker.request(
            evaluator.sets["held"], policy, "cadence", mode="background"
        )
        return files.ask_once(self.root.evaluation(str(policy), "held"), request)

    def receipt(self, policy: PolicyId) -> EvaluationReceipt:
        found = receipts.derive(self.root.evaluation(str(policy), "held"), stands=True)
        assert found is not None
        return found

    def answer(self, policy: PolicyId, **result: Any) -> None:
        folder = self.root.evaluation(str(policy), "held")
        claim = files.claim_try(folder, by="flow", time=self.clock.time())
        assert claim is not None
        files.start_try(folder, claim[0], Started(time=self.clock.time(), host="h", pid=1))
        made = {"time": self.clock.time(), "state": "succeeded", "metrics": {"mean": 0.5}, **result}
        files.finish_try(folder, claim[0], Result.model_validate(made))


def commit_of(root: RunRoot, *, update: int) -> int:
    commit(root.path, update=update)
    return Chain(root).read()[-1].seq


def own_again(root: RunRoot, *, restored: tuple[str, int]) -> None:
    chain = Chain(root)
    first = chain.read()[0]
    policy, seq = restored
    changed = {"epoch": 2, "restored": policy, "restored_seq": seq, "lease_s": None}
    chain.append(first.model_copy(update=changed))


async def in_session(body: Callable[[Any], Any]) -> None:
    async with anyio.create_task_group() as tasks:
        await body(tasks)
        tasks.cancel_scope.cancel()


async def test_training_goes_on_once_the_weights_have_left(tmp_path: Path) -> None:
    async def body(tasks: Any) -> None:
        asking = Asking(tmp_path, tasks)
        await asking.evaluator.evaluate("held", P4, kind="cadence")
        asking.source.value = 1.0  # the next update, while files are still being proved
        await asking.evaluator.settle()
        request = asking.receipt(P4).request
        assert (request.mode, request.kind, request.required) == ("background", "cadence", False)
        found = find_weights(asking.root, Chain(asking.root).read(), request)
        assert found is not None
        assert found.receipt.checksums == checksums({"w": torch.zeros(4)}.items())

    await in_session(body)


async def test_a_damaged_receipt_of_an_older_epoch_ends_no_run(tmp_path: Path) -> None:
    async def body(tasks: Any) -> None:
        first = Asking(tmp_path, tasks)
        await first.ask(P4)
        first.answer(P4)
        seq = commit_of(first.root, update=4)
        (first.root.evaluation(str(P4), "held") / "request.json").write_text("{")
        own_again(first.root, restored=("e1.u4", seq))
        second = Asking(tmp_path, tasks, epoch=2)
        await second.evaluator.final(PolicyId(2, 4), retries=0, backoff_s=0.0)
        assert second.evaluator.outstanding == ["evaluation/4/held"]
        assert second.receipt(PolicyId(2, 4)).request.kind == "final"

    await in_session(body)


async def test_asking_again_is_nothing_in_this_session_and_in_the_next(tmp_path: Path) -> None:
    async def body(tasks: Any) -> None:
        first = Asking(tmp_path, tasks)
        await first.ask(P4)
        before = sorted(first.root.path.rglob("*"))
        await first.ask(P4)
        seq = commit_of(first.root, update=4)
        own_again(first.root, restored=("e1.u4", seq))
        second = Asking(tmp_path, tasks, epoch=2)
        await second.ask(PolicyId(2, 4))  # the same weights, restored
        made = set(first.root.path.rglob("*")) - set(before)
        assert {path.parent.name for path in made} == {"chain"}

    await in_session(body)


async def test_without_room_the_receipt_says_so_and_the_commit_is_kept(tmp_path: Path) -> None:
    async def body(tasks: Any) -> None:
        asking = Asking(tmp_path, tasks)
        asking.source.error = DiskFull("no space")
        await asking.ask(P4, "final")
        receipt = asking.receipt(P4)
        assert (receipt.state, receipt.reason) == ("skipped", "export_failed")
        assert receipt.next_try_at is not None
        assert pinned_policies(asking.root, Chain(asking.root).read()) == {"e1.u4"}
        assert list(asking.root.snapshots.iterdir()) == []

    await in_session(body)


async def test_a_disk_that_fills_while_it_is_proved_says_so_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(operation: str, path: Path) -> None:
        if operation == "fsync" and path.name == "config.json":
            raise OSError(28, "No space left on device", str(path))

    async def body(tasks: Any) -> None:
        asking = Asking(tmp_path, tasks)
        monkeypatch.setattr(atomic, "probe", full)
        await asking.ask(P4)
        monkeypatch.setattr(atomic, "probe", None)
        assert asking.receipt(P4).reason == "export_failed"

    await in_session(body)


async def test_a_third_one_is_skipped_as_busy_where_that_is_asked(tmp_path: Path) -> None:
    async def body(tasks: Any) -> None:
        asking = Asking(tmp_path, tasks, overflow="skip")
        for update in (2, 4, 6):
            await asking.ask(PolicyId(1, update))
        assert asking.receipt(PolicyId(1, 6)).reason == "busy"
        assert asking.receipt(P4).state == "requested"
        asking.answer(P4)
        await asking.ask(P8)
        assert asking.receipt(P8).state == "requested"
        # The final one always waits for its turn.
        await asking.evaluator.final(PolicyId(1, 10), retries=0, backoff_s=0.0)
        assert asking.receipt(PolicyId(1, 10)).state == "requested"

    await in_session(body)


@pytest.mark.parametrize("how", ["complete", "terminated"])
async def test_what_was_skipped_as_busy_is_owed_once_it_is_the_last(
    tmp_path: Path, how: str
) -> None:
    async def body(tasks: Any) -> None:
        asking = Asking(tmp_path, tasks, overflow="skip")
        for update in (2, 4, 8):
            await asking.ask(PolicyId(1, update))
        assert asking.receipt(P8).reason == "busy"
        for _ in range(2):  # a session that is killed meanwhile asks again
            if how == "complete":
                await asking.evaluator.final(P8, retries=0, backoff_s=0.0)
            else:
                asking.evaluator.ask_later(P8)
        receipt = asking.receipt(P8)
        assert (receipt.state, receipt.next_try, receipt.is_settled) == ("requested", 1, False)
        assert (receipt.request.kind, receipt.request.required) == ("final", True)
        records = Chain(asking.root).read()
        assert void_unstarted(asking.root, records, time=1.0) == [
            "test/e1.u8/held",
        ]
        assert asking.receipt(P8).reason == "superseded"

    await in_session(body)


async def test_what_is_required_is_not_skipped_as_busy(tmp_path: Path) -> None:
    async def body(tasks: Any) -> None:
        asking = Asking(tmp_path, tasks, overflow="skip")
        held = asking.evaluator.sets["held"]
        asked = replace(held.asked, required=True)
        asking.evaluator.sets = {"held": replace(held, asked=asked)}
        for update in (2, 4, 6):
            await asking.ask(PolicyId(1, update))
        assert asking.receipt(PolicyId(1, 6)).state == "requested"

    await in_session(body)


@pytest.mark.parametrize("moment", ["before", "snapshot", "no room", "after"])
async def test_a_person_who_asks_at_the_end_as_well_is_in_nobodys_way(
    tmp_path: Path, moment: str
) -> None:
    async def body(tasks: Any) -> None:
        asking = Asking(tmp_path, tasks)
        asked: list[bool] = []

        def by_hand() -> None:
            asked.append(asking.by_hand(P8))

        if moment == "before":
            by_hand()
        elif moment != "after":
            asking.source.meanwhile = by_hand
        if moment == "no room":
            asking.source.error = DiskFull("no space")
        await asking.evaluator.final(P8, retries=0, backoff_s=0.0)
        if moment == "after":
            by_hand()
        is_theirs = moment != "after"
        assert asked == [is_theirs]
        receipt = asking.receipt(P8)
        assert receipt.request.kind == ("cadence" if is_theirs else "final")
        # Theirs needs no snapshot of ours: that there was no room for one is none of its business.
        assert receipt.state == "requested"
        assert asking.evaluator.outstanding == ["evaluation/8/held"]

    await in_session(body)


async def test_a_person_who_asks_while_a_busy_one_is_skipped_is_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(tasks: Any) -> None:
        asking = Asking(tmp_path, tasks, overflow="skip")
        for update in (2, 4):
            await asking.ask(PolicyId(1, update))

        def num_unsettled() -> int:
            assert asking.by_hand(P8)
            return 2

        monkeypatch.setattr(BackgroundEvaluator, "_num_unsettled", lambda _: num_unsettled())
        await asking.ask(P8)
        assert asking.receipt(P8).state == "requested"

    await in_session(body)


async def test_the_final_export_is_the_final_snapshot_and_all_is_outstanding(
    tmp_path: Path,
) -> None:
    async def body(tasks: Any) -> None:
        asking = Asking(tmp_path, tasks)
        await export_live(asking.root, asking.source, P8, model=asking.model, epoch=1, final=True)
        await asking.evaluator.final(P8, retries=0, backoff_s=0.0)
        snapshot = asking.receipt(P8).request.snapshot
        assert snapshot is not None
        assert (snapshot.path, snapshot.lease) == (str(asking.root.export), None)
        assert asking.evaluator.outstanding == ["evaluation/8/held"]
        assert not asking.root.snapshots.exists()

    await in_session(body)


async def test_adapters_alone_are_no_snapshot(tmp_path: Path) -> None:
    async def body(tasks: Any) -> None:
        asking = Asking(tmp_path, tasks)
        await export_live(
            asking.root, asking.source, P8, model=asking.model, epoch=1, final=True, adapter=True
        )
        await asking.evaluator.final(P8, retries=0, backoff_s=0.0)
        request = asking.receipt(P8).request
        assert request.snapshot is not None
        assert request.snapshot.path == str(asking.root.snapshots / str(P8))
        unsaid = request.model_copy(update={"snapshot": None})
        weights = find_weights(asking.root, Chain(asking.root).read(), unsaid)
        assert weights is not None
        assert weights.folder == asking.root.snapshots / str(P8)

    await in_session(body)


async def test_a_snapshot_is_kept_until_its_evaluation_is_settled(tmp_path: Path) -> None:
    async def body(tasks: Any) -> None:
        asking = Asking(tmp_path, tasks)
        await asking.ask(P4)
        assert release_snapshots(asking.root, 1) == ()
        asking.answer(P4)
        await asking.ask(P8)  # the owner's next request lets it go
        assert [p.name for p in asking.root.snapshots.iterdir()] == ["e1.u8"]
        asking.answer(P8, state="skipped", reason="crashed", metrics={})
        assert release_snapshots(asking.root, 1) == ()  # it may be tried again

    await in_session(body)


async def test_results_land_once_at_their_update_with_their_lag(tmp_path: Path) -> None:
    async def body(tasks: Any) -> None:
        asking = Asking(tmp_path, tasks)
        await asking.ask(P4)
        asking.clock.advance(30.0)
        asking.answer(P4, trainer_update=9)
        for _ in range(2):
            await asking.evaluator.land()
        ((axis, step, row),) = asking.told.rows
        assert (axis, step) == (Axis.EVALUATION, 4)
        assert row["evaluation/held/mean"] == 0.5
        assert (row["evaluation/held/lag_updates"], row["evaluation/held/lag_s"]) == (5, 30.0)
        assert asking.told.events == [Event.EVALUATION_FINISHED]

    await in_session(body)


async def test_an_attempt_that_goes_on_voids_what_has_not_started(tmp_path: Path) -> None:
    async def body(tasks: Any) -> None:
        asking = Asking(tmp_path, tasks)
        asking.evaluator.ask_later(P4)
        asking.evaluator.ask_later(P4)
        assert asking.receipt(P4).request.kind == "final"
        asking.evaluator.ask_later(P8)
        folder = asking.root.evaluation(str(P8), "held")
        files.claim_try(folder, by="flow", time=0.0)
        files.start_try(folder, 0, Started(time=0.0, host="h", pid=1))
        records = Chain(asking.root).read()
        assert void_unstarted(asking.root, records, time=1.0) == ["test/e1.u4/held"]
        assert asking.receipt(P4).reason == "superseded"
        assert asking.receipt(P8).state == "running"

    await in_session(body)
