"""Views, control, receipts, journal: what can be rebuilt, and what a full disk does to it."""

import errno
import json
import os
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from runtime.clock import ManualClock
from runtime.errors import ContractViolation, EngineDead, FencedError
from runtime.policy import PolicyId
from runtime.rundir import atomic, workflow
from runtime.rundir.chain import Chain
from runtime.rundir.control import Control, epoch_to_stop
from runtime.rundir.failure import Failure
from runtime.rundir.journal import RESERVE_BYTES, Journal, read_rows
from runtime.rundir.layout import RunRoot
from runtime.rundir.receipts import Receipt, read_receipt, write_receipt
from runtime.rundir.records import CommitRecord, EndRecord, EpochRecord
from runtime.rundir.workflow import WorkflowFile


def begin(chain: Chain, epoch: int = 1) -> None:
    chain.append(
        EpochRecord(
            epoch=epoch,
            time=1.0,
            attempt=epoch,
            host="h",
            pid=1,
            boot_id="b",
            started=1.0,
            reason="test",
            lease_s=None if chain.seen else 30.0,
        )
    )


def commit(chain: Chain, update: int) -> None:
    chain.append(
        CommitRecord(
            epoch=1,
            time=2.0,
            format_version=1,
            update=update,
            policy=str(PolicyId(1, update)),
            training_digest="t",
            layout={},
            data_fingerprint="d",
            ledger_checksum="l",
            consumed_digest="c",
            folder="f",
            files=(),
        )
    )


@pytest.fixture
def chain(root: RunRoot) -> Chain:
    chain = Chain(root)
    begin(chain)
    return chain


# -- workflow -----------------------------------------------------------------------------------


def test_the_view_of_an_old_owner_is_not_written(chain: Chain, root: RunRoot) -> None:
    old = WorkflowFile(root, epoch=1, clock=ManualClock())
    view = workflow.rebuild(root, chain.seen, now=0.0)
    old.write(view)
    begin(chain, 2)
    before = root.workflow.read_bytes()
    with pytest.raises(FencedError):
        old.write(view.model_copy(update={"update": 9}))
    assert root.workflow.read_bytes() == before


def test_the_view_says_complete_only_after_the_chain(chain: Chain, root: RunRoot) -> None:
    file = WorkflowFile(root, epoch=1, clock=ManualClock())
    view = workflow.rebuild(root, chain.seen, now=0.0)
    done = view.model_copy(update={"state": "complete", "activity": None})
    with pytest.raises(ContractViolation, match="complete"):
        file.write(done)
    chain.append(EndRecord(epoch=1, time=3.0, state="complete", ended_by="x", update=0))
    file.write(done)


def test_since_stands_while_the_heartbeat_goes_on(chain: Chain, root: RunRoot) -> None:
    clock = ManualClock()
    file = WorkflowFile(root, epoch=1, clock=clock)
    first = file.write(workflow.rebuild(root, chain.seen, now=clock.time()))
    clock.advance(5)
    second = file.write(first.model_copy(update={"update": 1, "since": clock.time()}))
    assert (second.since, second.heartbeat.count) == (first.since, 2)
    assert second.heartbeat.time == first.heartbeat.time + 5
    clock.advance(5)
    third = file.write(second.model_copy(update={"activity": "held", "since": clock.time()}))
    assert third.since == clock.time()
    assert workflow.read(root) == third


@pytest.mark.parametrize("damage", [b"", b"{", b'{"schema_version": 99}', None])
def test_a_damaged_view_is_rebuilt_from_the_chain(chain: Chain, root: RunRoot, damage) -> None:
    commit(chain, 0)
    commit(chain, 5)
    failure = Failure.of(EngineDead("engine 2 died"), step="segment/9", time=3.0)
    chain.append(
        EndRecord(epoch=1, time=3.0, state="failed", ended_by="fatal", update=8, failure=failure)
    )
    if damage is not None:
        root.workflow.write_bytes(damage)
    view = workflow.current(root, chain.seen, now=9.0)
    assert (view.state, view.activity, view.attempt, view.epoch) == ("failed", None, 1, 1)
    assert (view.update, view.last_checkpoint, view.seen.checkpoints) == (8, 5, 1)
    assert (view.failure, view.step, view.ended_by) == (failure, "segment/9", "fatal")
    assert view.paths["chain"] == str(root.chain)


def test_a_view_that_the_chain_has_overtaken_is_rebuilt(chain: Chain, root: RunRoot) -> None:
    WorkflowFile(root, epoch=1).write(workflow.rebuild(root, chain.seen, now=0.0))
    chain.append(
        EndRecord(
            epoch=1, time=3.0, state="training", activity="stopped", ended_by="stop", update=0
        )
    )
    assert workflow.current(root, chain.seen, now=9.0).activity == "stopped"


# -- control ------------------------------------------------------------------------------------


def test_a_stop_is_for_one_epoch_and_asking_twice_changes_nothing(root: RunRoot) -> None:
    control = Control(root)
    first = control.request_stop("stop", epoch=3, by="ann", time=1.0)
    assert control.request_stop("stop", epoch=3, by="bob", time=2.0) == first
    assert control.stop_request(3) == first
    assert control.stop_request(4) is None
    assert control.stop_request(2) is None
    later = control.request_stop("stop", epoch=4, by="bob", time=3.0)
    assert control.stop_request(4) == later


def test_the_strongest_stop_counts(root: RunRoot) -> None:
    control = Control(root)
    for mode in ("stop", "final", "now"):
        control.request_stop(mode, epoch=1, by="ann", time=1.0)
        assert control.stop_request(1).mode == mode


def test_a_stop_is_meant_for_the_epoch_that_runs_or_begins(root: RunRoot) -> None:
    chain = Chain(root)
    assert epoch_to_stop(chain.seen) == 1
    begin(chain)
    assert epoch_to_stop(chain.seen) == 1
    chain.append(EndRecord(epoch=1, time=3.0, state="training", ended_by="stop", update=0))
    assert epoch_to_stop(chain.seen) == 2


def test_a_damaged_stop_file_stops_nothing_and_can_be_replaced(root: RunRoot) -> None:
    control = Control(root)
    (root.control / "stop.json").write_text("{")
    assert control.stop_request(1) is None
    control.request_stop("stop", epoch=1, by="ann", time=1.0)
    assert control.stop_request(1) is not None


def test_a_retry_is_used_up_by_taking_it(root: RunRoot) -> None:
    control = Control(root)
    assert not control.take_retry("f-1")
    control.request_retry("f-1")
    control.request_retry("f-1")
    assert not control.take_retry("f-2")
    assert control.take_retry("f-1")
    assert not control.take_retry("f-1")
    with pytest.raises(ValueError, match="failure id"):
        control.request_retry("../../chain/0")


# -- receipts -----------------------------------------------------------------------------------


def test_a_receipt_reads_back_and_damage_reads_as_none(root: RunRoot) -> None:
    assert read_receipt(root, "export/5") is None
    receipt = Receipt(step="export/5", epoch=2, update=5, time=1.0, detail={"a": [1]})
    write_receipt(root, receipt)
    assert read_receipt(root, "export/5") == receipt
    assert receipt.policy == PolicyId(2, 5)
    (root.receipts / "export-5.json").write_text("{")
    assert read_receipt(root, "export/5") is None


# -- journal ------------------------------------------------------------------------------------


@pytest.fixture
def journal(root: RunRoot) -> Journal:
    attempt = root.attempt(2)
    attempt.path.mkdir()
    return Journal(attempt, epoch=3, role="session", clock=ManualClock())


def test_a_row_says_who_wrote_it(journal: Journal, root: RunRoot) -> None:
    assert journal.append("step.finished", step="segment/5", path=Path("x"))
    (row,) = read_rows(root.journal)
    assert row == {
        "time": 1000.0,
        "event": "step.finished",
        "attempt": 2,
        "epoch": 3,
        "role": "session",
        "step": "segment/5",
        "path": repr(Path("x")),
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(fates=st.lists(st.sampled_from(["whole", "full"]) | st.integers(0, 60), max_size=12))
def test_rows_are_whole_or_counted_whatever_the_disk_takes(
    journal: Journal, root: RunRoot, fates: list
) -> None:
    root.journal.unlink(missing_ok=True)
    journal = Journal(root.attempt(2), epoch=3, role="session", clock=ManualClock())
    real = os.write
    told = 0
    with pytest.MonkeyPatch.context() as patch:
        for n, fate in enumerate(fates):

            def write(fd: int, data: bytes, fate=fate) -> int:
                if fate == "full":
                    raise OSError(errno.ENOSPC, "full")
                return real(fd, data if fate == "whole" else data[:fate])

            patch.setattr(os, "write", write)
            told += journal.append("x.happened", n=n)
    rows = read_rows(root.journal)
    written = [r for r in rows if r["event"] == "x.happened"]
    dropped = sum(r["rows"] for r in rows if r["event"] == "journal.dropped")
    assert len(written) == told
    # Every row is in the file, counted in the file, or counted in memory.
    assert told + dropped + journal.dropped == len(fates)


def test_the_reserve_makes_room_for_the_failure_record(journal: Journal, root, monkeypatch) -> None:
    assert journal.set_reserve()
    reserve = root.attempt(2).reserve
    assert reserve.stat().st_size == RESERVE_BYTES
    real = os.write

    def write(fd: int, data: bytes) -> int:
        if reserve.exists():
            raise OSError(errno.ENOSPC, "full")
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    assert not journal.append("step.failed")
    failure = Failure.of(EngineDead("engine 2 died"), step="segment/5", time=0.0)
    assert journal.fail(failure)
    dropped, failed = read_rows(root.journal)
    assert (dropped["event"], dropped["rows"]) == ("journal.dropped", 1)
    assert failed["failure"]["fingerprint"] == failure.fingerprint


def test_no_space_for_the_reserve_is_no_error(journal: Journal, monkeypatch) -> None:
    def full(operation: str, path: Path) -> None:
        if operation == "write":
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(atomic, "probe", full)
    assert not journal.set_reserve()


def test_torn_rows_are_skipped(root: RunRoot) -> None:
    root.journal.write_bytes(b'{"event": "a"}\n{"event": "b\n[1]\n\n{"event": "c"}\n{"ev')
    assert [r["event"] for r in read_rows(root.journal)] == ["a", "c"]
    assert read_rows(root.path / "nothing") == []


# -- layout -------------------------------------------------------------------------------------


def test_names_carry_their_epoch(root: RunRoot) -> None:
    assert root.checkpoint(50, 3).relative_to(root.path) == Path("checkpoints/000050-e3")
    assert root.collection_stem(12, 3).relative_to(root.path) == Path("rollouts/000012-e3")
    for name in ("2", "10", "x", "03", "1.tmp"):
        (root.attempts / name).mkdir()
    assert root.attempt_numbers() == [2, 10]
    assert root.attempt(10).root == root
    assert all(Path(p).is_absolute() for p in root.artifacts().values())
    json.dumps(root.artifacts())
