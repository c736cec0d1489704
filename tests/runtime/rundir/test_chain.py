"""The chain's promises one by one: damage, full disks, and a second epoch of one owner."""

import errno
import multiprocessing
import os
import resource
import signal
import threading
from pathlib import Path

import pytest

from runtime.errors import ContractViolation, DiskFull, FencedError, RetryBy, StoreError
from runtime.policy import PolicyId
from runtime.rundir import atomic, history
from runtime.rundir.chain import Chain, lease_duration
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import (
    ChainUnreadable,
    CommitRecord,
    EndRecord,
    EpochRecord,
    FileEntry,
    decode,
    encode,
)


def epoch(number: int, restored: CommitRecord | None = None, **more: object) -> EpochRecord:
    fields = {
        "epoch": number,
        "time": 0.0,
        "attempt": number,
        "host": "h",
        "pid": 1,
        "boot_id": "b",
        "started": 1.0,
        "reason": "test",
        "restored": restored.policy if restored else None,
        "restored_seq": restored.seq if restored else None,
        "lease_s": 30.0 if number == 1 else None,
    }
    return EpochRecord.model_validate({**fields, **more})


def commit(number: int, update: int, **more: object) -> CommitRecord:
    fields = {
        "epoch": number,
        "time": 0.0,
        "format_version": 1,
        "update": update,
        "policy": str(PolicyId(number, update)),
        "training_digest": "t",
        "layout": {"tensor": 1},
        "data_fingerprint": "d",
        "ledger_checksum": "l",
        "consumed_digest": "c",
        "folder": f"checkpoints/{update:06d}-e{number}",
        "files": (FileEntry(name="model/a.safetensors", size=3, sha256="0" * 64),),
    }
    return CommitRecord.model_validate({**fields, **more})


@pytest.fixture
def chain(root: RunRoot) -> Chain:
    chain = Chain(root)
    chain.append(epoch(1))
    return chain


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch):
    def install(at: str, error: BaseException) -> None:
        def raise_at(operation: str, path: Path) -> None:
            if operation == at:
                raise error

        monkeypatch.setattr(atomic, "probe", raise_at)

    return install


def test_a_record_reads_back_equal(chain: Chain, root: RunRoot) -> None:
    written = chain.append(commit(1, 0))
    assert Chain(root).read() == chain.seen
    assert Chain(root).read()[1] == written
    assert written.seq == 1


def test_of_many_writers_at_once_one_wins(root: RunRoot) -> None:
    won: list[int] = []
    lost: list[int] = []
    start = threading.Barrier(12)

    def take(attempt: int) -> None:
        own = Chain(root)
        own.read()
        start.wait()
        try:
            own.append(epoch(1, attempt=attempt))
            won.append(attempt)
        except FencedError:
            lost.append(attempt)

    threads = [threading.Thread(target=take, args=(n + 1,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 11)
    (record,) = Chain(root).read()
    assert record.attempt == won[0]


def test_an_owner_that_is_overtaken_just_before_its_link_is_superseded(
    chain: Chain, root: RunRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it had looked at before, the name itself decides."""
    rival = Chain(root)
    rival.read()

    def overtake(operation: str, path: Path) -> None:
        if operation == "link":
            monkeypatch.setattr(atomic, "probe", None)
            rival.append(epoch(2, attempt=7))

    chain.read()
    monkeypatch.setattr(atomic, "probe", overtake)
    with pytest.raises(FencedError):
        chain.append(epoch(2))
    assert Chain(root).read() == rival.seen


def test_an_old_owner_stays_fenced_even_after_it_looked(chain: Chain, root: RunRoot) -> None:
    new = Chain(root)
    new.read()
    new.append(epoch(2))
    with pytest.raises(FencedError, match=r"chain/1\.json exists already"):
        chain.append(commit(1, 0))
    chain.read()
    with pytest.raises(FencedError):
        chain.append(commit(1, 0))
    with pytest.raises(FencedError, match="epoch 2 belongs to attempt 2, pid 1 on h"):
        chain.check(1)
    assert len(Chain(root).read()) == 2


def test_guard_and_session_append_for_one_epoch_by_turns(chain: Chain, root: RunRoot) -> None:
    session = Chain(root)
    session.read()
    session.append(commit(1, 0))
    chain.check(1)
    chain.append(EndRecord(epoch=1, time=0.0, state="complete", ended_by="max_updates", update=0))
    assert history.is_complete(Chain(root).read())


def test_a_damaged_commit_is_taken_out_of_history_by_a_further_epoch(chain: Chain) -> None:
    chain.append(commit(1, 0))
    good = chain.append(commit(1, 5))
    bad = chain.append(commit(1, 9))
    chain.append(epoch(2, bad))
    taken = chain.retake(good, reason="checksum of e1.u9 is wrong", time=1.0)
    assert (taken.epoch, taken.restored, taken.owner) == (3, "e1.u5", chain.seen[-2].owner)
    assert [c.update for c in history.standing_commits(chain.seen)] == [0, 5]
    assert history.restored_commit(chain.seen) == good
    (rewind,) = history.rewinds(chain.seen)
    assert (rewind.epoch, rewind.was, rewind.to) == (3, 9, 5)


def test_the_lease_is_written_once_in_record_zero(root: RunRoot) -> None:
    chain = Chain(root)
    with pytest.raises(ContractViolation, match="written once"):
        chain.append(epoch(1, lease_s=None))
    assert lease_duration(()) is None
    chain.append(epoch(1))
    with pytest.raises(ContractViolation, match="written once"):
        chain.append(epoch(2, lease_s=60.0))
    assert lease_duration(chain.seen) == 30.0


def test_epochs_are_not_skipped(chain: Chain) -> None:
    with pytest.raises(ContractViolation, match="epoch 3 cannot follow epoch 1"):
        chain.append(epoch(3))


# -- damage -------------------------------------------------------------------------------------


def test_torn_temporary_files_are_ignored(chain: Chain, root: RunRoot) -> None:
    (root.chain / ".1.json.77.abcd.tmp").write_bytes(b'{"kin')
    (root.chain / "notes.txt").write_text("by hand")
    (root.chain / "01.json").write_text("{}")
    assert len(Chain(root).read()) == 1
    chain.append(commit(1, 0))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is no JSON"),
        (b'{"kind": "commit", "seq', "is no JSON"),
        (b"\x00" * 512, "is no JSON"),
        (b"[]", "is no record"),
        (b'{"kind": "dance"}', "is no record"),
        (b'{"kind": "end", "schema_version": 1, "seq": 1}', r"end\.epoch: Field required"),
        (b'{"kind": "end", "schema_version": 2}', "schema version 2, this Milepost reads up to 1"),
    ],
)
def test_a_damaged_or_newer_record_is_a_clear_error(
    chain: Chain, root: RunRoot, data: bytes, message: str
) -> None:
    (root.chain / "1.json").write_bytes(data)
    with pytest.raises(ChainUnreadable, match=message) as caught:
        chain.read()
    assert "1.json" in caught.value.message
    assert caught.value.retry is RetryBy.NOBODY


def test_a_missing_record_is_a_clear_error(chain: Chain, root: RunRoot) -> None:
    chain.append(commit(1, 0))
    chain.append(commit(1, 5))
    (root.chain / "1.json").unlink()
    with pytest.raises(ChainUnreadable, match=r"1\.json is missing but record 2 exists"):
        Chain(root).read()


def test_a_renamed_record_is_a_clear_error(chain: Chain, root: RunRoot) -> None:
    chain.append(commit(1, 0))
    (root.chain / "1.json").rename(root.chain / "2.json")
    (root.chain / "0.json").rename(root.chain / "1.json")
    (root.chain / "2.json").rename(root.chain / "0.json")
    with pytest.raises(ChainUnreadable, match="says it is record 1"):
        Chain(root).read()


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a//b", "a/./b", ""])
def test_a_commit_cannot_name_files_outside_its_folder(name: str) -> None:
    with pytest.raises(ValueError, match="leads out"):
        FileEntry(name=name, size=0, sha256="0" * 64)


@pytest.mark.parametrize(("policy", "number"), [("e1.u4", 1), ("e3.u5", 2), ("5", 2)])
def test_a_commit_names_the_policy_of_its_weights(policy: str, number: int) -> None:
    with pytest.raises(ValueError, match=r"names e|not a policy id"):
        commit(number, 5, policy=policy)


def test_records_written_by_version_1_stay_readable() -> None:
    """Golden records: new code must read what old code wrote."""
    for path in sorted(Path(__file__).with_name("records-v1").glob("*.json")):
        record = decode(path.read_bytes(), name=path.name)
        assert encode(record) == path.read_bytes()


# -- full and failing disks ---------------------------------------------------------------------


@pytest.mark.parametrize("at", ["write", "fsync"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_no_record_and_may_be_tried_again(
    chain: Chain, root: RunRoot, probe, monkeypatch, at: str, number: int
) -> None:
    probe(at, OSError(number, "full"))
    with pytest.raises(DiskFull, match="no space"):
        chain.append(commit(1, 0))
    assert [p.name for p in root.chain.iterdir()] == ["0.json"]
    monkeypatch.setattr(atomic, "probe", None)
    chain.append(commit(1, 0))
    assert len(Chain(root).read()) == 2


def test_a_refusal_of_the_kernel_itself_leaves_no_record(chain: Chain, root: RunRoot) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = commit(1, 0, detail={"padding": "x" * 100_000})
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(DiskFull):
            chain.append(big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in root.chain.iterdir()] == ["0.json"]
    chain.append(big)


def test_a_record_whose_folder_could_not_be_synced_is_still_our_own(
    chain: Chain, root: RunRoot, probe, monkeypatch
) -> None:
    probe("fsync_folder", OSError(errno.EIO, "broken"))
    with pytest.raises(StoreError, match=r"cannot append .*1\.json"):
        chain.append(commit(1, 0))
    monkeypatch.setattr(atomic, "probe", None)
    # It is visible, so it is history; the next append must not take it for a newer owner's.
    assert len(chain.seen) == 2
    chain.append(commit(1, 5))
    assert len(Chain(root).read()) == 3


def test_a_link_whose_answer_got_lost_counts_as_made(root: RunRoot, monkeypatch) -> None:
    real = os.link

    def link(source: Path, target: Path) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, "retransmitted", str(target))

    monkeypatch.setattr(os, "link", link)
    chain = Chain(root)
    chain.append(epoch(1))
    assert len(Chain(root).read()) == 1


def write_and_die(path: Path) -> None:
    def probe(operation: str, _: Path) -> None:
        if operation == "fsync":
            os.kill(os.getpid(), signal.SIGKILL)

    atomic.probe = probe
    atomic.write_bytes(path, b"half", durable=True)


def test_half_files_of_dead_writers_alone_are_swept(root: RunRoot) -> None:
    dead = multiprocessing.get_context("spawn").Process(
        target=write_and_die, args=(root.chain / "7.json",)
    )
    dead.start()
    dead.join(30)
    (left,) = root.chain.glob(".*.tmp")
    own = atomic.draft(root.chain / "8.json")
    own.write_bytes(b"under way")
    fields = left.name.split(".")
    elsewhere = left.with_name(".".join([*fields[:-4], "00000000", *fields[-3:]]))
    elsewhere.write_bytes(b"whose host is not this one")
    (root.chain / ".1.json.77.abcd.tmp").write_bytes(b"of nobody we know")
    kept = set(root.chain.iterdir()) - {left}
    assert atomic.sweep(root.path) == [left]
    assert set(root.chain.iterdir()) == kept
