from __future__ import annotations

import json
from functools import partial

import anyio
import pytest

from runtime.checkpoints.files import locate
from runtime.checkpoints.identity import RunIdentity, differences
from runtime.checkpoints.resume import NoValidCommit, check_restored, find_restorable
from runtime.data.history import read_history
from runtime.data.ledger import Ledger
from runtime.data.order import PromptOrder
from runtime.errors import ContractViolation, RetryBy
from runtime.rundir.chain import Chain
from runtime.rundir.records import CommitRecord
from tests.runtime.checkpoints.tiny_run import IDENTITY, TinyRun, new_root, take_over, trained


@pytest.fixture
def root(tmp_path):
    """A run with commits of updates 0 to 3."""
    root = new_root(tmp_path / "run")
    anyio.run(trained, root, 3)
    return root


def find(root):
    return find_restorable(root, Chain(root).read())


def newest(root, back: int = 0) -> CommitRecord:
    return [r for r in Chain(root).read() if isinstance(r, CommitRecord)][-1 - back]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def alter(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def remove(path):
    path.unlink()


def test_a_chain_without_commits_starts_fresh(tmp_path):
    root = new_root(tmp_path)
    assert find(root) is None
    take_over(root)
    assert find(root) is None


def test_the_newest_commit_is_found_with_its_whole_ledger(root):
    found = find(root)
    assert (found.commit.update, str(found.policy)) == (3, "e1.u3")
    assert found.damaged == ()
    assert found.initial is None
    ledger = Ledger.restore(found.segments, PromptOrder(64, epochs=2))
    assert ledger.digest == found.commit.consumed_digest
    report = read_history(found.segments)
    assert (report.consumed, report.lost, report.doubled) == (6, 0, 0)
    state = json.loads((found.folder / "a.json").read_text())
    check_restored(state, found.commit)


def test_commit_0_refers_to_the_initial_model(tmp_path):
    root = new_root(tmp_path)
    anyio.run(trained, root, 0)
    found = find(root)
    assert found.commit.update == 0
    assert found.initial == {"path": "prepared/model", "digest": "m"}


@pytest.mark.parametrize("harm", [truncate, alter, remove])
@pytest.mark.parametrize("name", ["a.json", "b.bin", "ledger/000003-e1.seg"])
def test_a_damaged_commit_is_named_and_passed_over(root, harm, name):
    path = locate(root, newest(root), name)
    harm(path)
    found = find(root)
    assert found.commit.update == 2
    (damaged,) = found.damaged
    assert damaged.commit.update == 3
    assert name in str(damaged)
    assert path.exists() or harm is remove


def test_commits_of_which_none_is_valid_are_an_error_that_says_what_was_found(root):
    for back in range(4):
        truncate(locate(root, newest(root, back), f"ledger/{3 - back:06d}-e1.seg"))
    with pytest.raises(NoValidCommit, match="none of 4 commits") as caught:
        find(root)
    for update in range(4):
        assert f"checkpoints/{update:06d}-e1" in caught.value.message
    assert caught.value.retry is RetryBy.NOBODY


def test_a_lost_older_segment_is_a_gap_in_history_and_no_reason_to_rewind(root):
    (root.path / "ledger" / "000001-e1.seg").unlink()
    found = find(root)
    assert found.commit.update == 3
    assert "000001-e1.seg" in found.history_gap
    assert len(found.segments) == 2
    Ledger.restore(found.segments, PromptOrder(64, epochs=2)).check()


def test_a_commit_of_a_newer_format_is_passed_over(root):
    path = root.chain / f"{newest(root).seq}.json"
    record = json.loads(path.read_bytes())
    path.write_text(json.dumps(record | {"format_version": 99}))
    found = find(root)
    assert found.commit.update == 2
    assert "format 99" in str(found.damaged[0])


@pytest.mark.parametrize("field", ["consumed_digest", "ledger_checksum"])
def test_a_ledger_that_disagrees_with_its_record_is_refused(root, field):
    path = root.chain / f"{newest(root).seq}.json"
    record = json.loads(path.read_bytes())
    path.write_text(json.dumps(record | {field: "0" * 64}))
    assert find(root).commit.update == 2


@pytest.mark.parametrize("wrong", [{"update": 2}, {"consumed_digest": "0" * 64}, {"update": None}])
def test_a_trainer_that_restored_something_else_is_a_contract_violation(root, wrong):
    commit = newest(root)
    right = {"update": 3, "consumed_digest": commit.consumed_digest}
    check_restored(right, commit)
    with pytest.raises(ContractViolation):
        check_restored(right | wrong, commit)


def test_rewound_commits_are_no_candidates(root):
    async def second_epoch():
        truncate(locate(root, newest(root), "b.bin"))
        found = find(root)
        epoch = take_over(root, found.commit)
        async with anyio.create_task_group() as tasks:
            ledger = Ledger.restore(found.segments, PromptOrder(64, epochs=2))
            run = TinyRun(root, epoch, tasks, parent=found.commit, ledger=ledger)
            run.train()
            await run.boundary()
            await run.committer.settle()

    anyio.run(second_epoch)
    found = find(root)
    assert found.commit.policy == "e2.u3"
    assert found.damaged == ()
    report = read_history(found.segments)
    assert (report.consumed, report.lost, report.doubled) == (6, 0, 0)


def test_identity_names_what_differs(root):
    other = partial(RunIdentity, layout={"data": 8})
    commit = newest(root)
    assert differences(commit, IDENTITY) == ()
    same = other(training_digest="t" * 64, data_fingerprint="d" * 64)
    assert differences(commit, same) == ()
    new = other(training_digest="u" * 64, data_fingerprint="e" * 64)
    assert differences(commit, new) == ("training digest", "data fingerprint")
