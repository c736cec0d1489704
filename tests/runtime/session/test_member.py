"""Whoever joins an attempt on a node makes sure of the folder that its compilers trust."""

import os
import stat
from pathlib import Path

import pytest

from runtime.errors import SessionLost
from runtime.session import member
from runtime.session.member import join_attempt
from runtime.session.scratch import CACHES_VARIABLE

ATTEMPT = "/nowhere/attempts/1"


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder around the caches of a session that runs on another node."""
    base = tmp_path / "mp-1000"
    monkeypatch.setenv(CACHES_VARIABLE, str(base / "abc-1.caches"))
    return base


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Attempts that this process would be tied to; the guard is not what is looked at here."""
    tied: list[str] = []
    monkeypatch.setattr(member.deadman, "watch", lambda attempt_dir, **_: tied.append(attempt_dir))
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    return tied


def test_who_comes_to_a_node_first_makes_the_folder_private(base: Path, guarded: list[str]) -> None:
    umask = os.umask(0)
    try:
        join_attempt(ATTEMPT, epoch=1)
        join_attempt(ATTEMPT, epoch=1)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(base.stat().st_mode) == 0o700
    assert list(base.iterdir()) == []
    assert guarded == [ATTEMPT] * 2


@pytest.mark.parametrize("what", ["open", "foreign", "link", "file", "no place"])
def test_a_folder_that_is_not_ours_alone_is_refused_by_name(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    match what:
        case "open":
            base.mkdir()
            base.chmod(0o755)
        case "foreign":
            base.mkdir(mode=0o700)
            owner = base.stat().st_uid
            monkeypatch.setattr(os, "getuid", lambda: owner + 1)
        case "link":
            (tmp_path / "theirs").mkdir(mode=0o700)
            base.symlink_to(tmp_path / "theirs")
        case "file":
            base.touch(mode=0o600)
        case _:
            gone = base.parent / "of-the-other-node" / base.name
            monkeypatch.setenv(CACHES_VARIABLE, str(gone / "abc-1.caches"))
    with pytest.raises(SessionLost, match=rf"/{base.name} (on|has no place on) "):
        join_attempt(ATTEMPT, epoch=1)


def test_without_caches_nothing_is_made(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHES_VARIABLE)
    join_attempt(ATTEMPT, epoch=1)
    assert not base.exists()
