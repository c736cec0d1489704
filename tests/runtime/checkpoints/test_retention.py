from __future__ import annotations

import errno

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.checkpoints.resume import find_restorable
from runtime.checkpoints.retention import retain
from runtime.errors import FencedError
from runtime.rundir import atomic
from runtime.rundir.chain import Chain
from runtime.rundir.records import CommitRecord
from tests.runtime.checkpoints.tiny_run import new_root, take_over, trained


@pytest.fixture
def root(tmp_path):
    """A run with commits of updates 0 to 5."""
    root = new_root(tmp_path / "run")
    anyio.run(trained, root, 5)
    return root


def folders(root) -> set[str]:
    return {p.name for p in root.checkpoints.iterdir()}


def test_keeps_the_newest_the_pinned_and_commit_0(root):
    deleted = retain(root, 1, keep=2, pinned={"e1.u2"})
    assert deleted == ("checkpoints/000001-e1", "checkpoints/000003-e1")
    assert folders(root) == {"000000-e1", "000002-e1", "000004-e1", "000005-e1"}
    assert retain(root, 1, keep=2, pinned={"e1.u2"}) == ()
    found = find_restorable(root, Chain(root).read())
    assert found.commit.update == 5
    assert len(found.segments) == 6  # history is whole


def test_the_newest_is_never_deleted(root):
    with pytest.raises(ValueError, match="keep=0"):
        retain(root, 1, keep=0)


def test_only_the_owner_deletes(root):
    newest = [r for r in Chain(root).read() if isinstance(r, CommitRecord)][-1]
    before = folders(root)
    take_over(root, newest)
    with pytest.raises(FencedError):
        retain(root, 1, keep=1)
    assert folders(root) == before


def test_damage_that_was_rewound_past_is_kept_as_evidence(root):
    commits = [r for r in Chain(root).read() if isinstance(r, CommitRecord)]
    epoch = take_over(root, commits[3])
    retain(root, epoch, keep=1)
    assert folders(root) == {"000000-e1", "000003-e1", "000004-e1", "000005-e1"}


def test_what_writers_left_is_swept(root):
    for name in (".000006-e1.writing", ".000002-e1.deleted", "000009-e1"):
        (root.checkpoints / name / "deep").mkdir(parents=True)
        (root.checkpoints / name / "deep" / "file").write_text("x")
    (root.checkpoints / "gpu_usage_node0.jsonl").write_text("{}\n")
    assert retain(root, 1, keep=9) == ("checkpoints/000009-e1",)
    assert folders(root) == {f"{u:06d}-e1" for u in range(6)} | {"gpu_usage_node0.jsonl"}


def test_what_cannot_be_deleted_is_left_to_the_next_call(root, monkeypatch):
    def busy(operation, path):
        if operation == "rmdir" and "000001-e1" in path.name:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")  # NFS keeps what is being read

    monkeypatch.setattr(atomic, "probe", busy)
    deleted = retain(root, 1, keep=2)
    assert deleted == tuple(f"checkpoints/{u:06d}-e1" for u in (1, 2, 3))
    kept = {"000000-e1", "000004-e1", "000005-e1"}
    assert folders(root) == kept | {".000001-e1.deleted"}
    monkeypatch.setattr(atomic, "probe", None)
    assert retain(root, 1, keep=2) == ()
    assert folders(root) == kept


class _Killed(BaseException):
    pass


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(kills=st.lists(st.integers(1, 12), max_size=3), keep=st.integers(1, 4))
def test_a_kill_at_any_operation_leaves_whole_folders_and_the_next_call_finishes(
    tmp_path_factory, kills, keep
):
    root = new_root(tmp_path_factory.mktemp("run"))
    anyio.run(trained, root, 3)
    for number in kills:
        left = number

        def probe(operation, path):
            nonlocal left
            left -= 1
            if left == 0:
                raise _Killed

        atomic.probe = probe
        try:
            retain(root, 1, keep=keep)
        except _Killed:
            pass
        finally:
            atomic.probe = None
        for folder in root.checkpoints.iterdir():
            if not folder.name.startswith(".") and folder.name != "000000-e1":
                assert {p.name for p in folder.iterdir()} == {"a.json", "b.bin"}
        assert find_restorable(root, Chain(root).read()).commit.update == 3
    retain(root, 1, keep=keep)
    kept = {f"{u:06d}-e1" for u in range(max(1, 4 - keep), 4)} | {"000000-e1"}
    assert folders(root) == kept
