"""Where an attempt's Ray keeps its token and sockets, and that nothing of it stays."""

import os
from pathlib import Path

import pytest

from runtime.errors import SessionLost
from runtime.session import scratch


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "_SOCKET_PATH_LIMIT", 10_000)
    return tmp_path / f"mp-{os.getuid()}"


def test_an_epoch_has_a_private_folder_and_sweeps_older_ones(base: Path) -> None:
    older = scratch.scratch_folder("abc", 1)
    other = scratch.scratch_folder("xyz", 1)
    folder = scratch.scratch_folder("abc", 2)
    assert scratch.scratch_folder("abc", 2) == folder
    assert sorted(base.iterdir()) == sorted([folder, other])
    assert not older.exists()
    assert {p.stat().st_mode & 0o777 for p in (base, folder)} == {0o700}


def test_a_folder_that_others_may_write_to_holds_no_token(base: Path, tmp_path: Path) -> None:
    base.mkdir()
    base.chmod(0o777)
    with pytest.raises(SessionLost, match="of this user alone"):
        scratch.scratch_folder("abc", 1)
    base.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    base.symlink_to(elsewhere)
    with pytest.raises(SessionLost, match="of this user alone"):
        scratch.scratch_folder("abc", 1)
    assert list(elsewhere.iterdir()) == []


def test_folders_of_a_run_that_is_over_go_and_no_others(base: Path) -> None:
    scratch.scratch_folder("abc", 1)
    other = scratch.scratch_folder("xyz", 1)
    scratch.remove_scratch("abc")
    scratch.remove_scratch("abc")
    assert list(base.iterdir()) == [other]
