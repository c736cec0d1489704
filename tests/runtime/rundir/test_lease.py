"""Lease and liveness, with clocks that are told; real freezes are in tests/runtime/session."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from runtime.clock import ManualClock
from runtime.errors import OwnedError
from runtime.rundir import enter
from runtime.rundir.filesystem import is_shared
from runtime.rundir.layout import RunRoot
from runtime.rundir.lease import LeaseWatch, RunLease
from runtime.rundir.liveness import Mark, Watch
from runtime.rundir.processes import HostBoot
from runtime.rundir.records import EpochRecord

HOLDER = """
import sys
from runtime.rundir.layout import RunRoot
from runtime.rundir.lease import RunLease
lease = RunLease(RunRoot.of(sys.argv[1]), duration_s=float(sys.argv[2]))
lease.acquire()
sys.stdout.write("held\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def hold(root: RunRoot, duration_s: float) -> subprocess.Popen[str]:
    """Another process that holds the lease until its stdin closes."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root.path), str(duration_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    assert holder.stdout.readline() == "held\n"
    return holder


def never(_: float) -> None:
    raise AssertionError("no wait is needed here")


# -- Watch --------------------------------------------------------------------------------------

looks = st.lists(st.tuples(st.floats(0.0, 20.0), st.booleans()), max_size=40)


@given(looks)
def test_what_moves_between_looks_never_lapses(times) -> None:
    clock = ManualClock()
    watch = Watch(clock, limit_s=10.0, again_s=1.0)
    for n, (step, _) in enumerate(times):
        clock.advance(step)
        assert not watch.has_lapsed(n)


@given(looks)
def test_a_lapse_takes_the_whole_limit_and_two_looks(times) -> None:
    clock = ManualClock()
    watch = Watch(clock, limit_s=10.0, again_s=1.0)
    changed_at = over_at = None
    stamp = 0
    for step, changes in times:
        clock.advance(step)
        now = clock.monotonic()
        stamp += changes
        if changed_at is None or changes:
            changed_at, over_at = now, None
        if now - changed_at > 10.0 and over_at is None:
            over_at = now
        assert watch.has_lapsed(stamp) == (over_at is not None and now - over_at >= 1.0)
        assert watch.is_suspect == (over_at is not None)
        assert watch.age_s == now - changed_at


def test_doubt_makes_our_own_lease_older_and_anothers_younger() -> None:
    for is_own, age in ((True, 8.0), (False, 0.0)):
        clock = ManualClock()
        watch = Watch(clock, limit_s=10.0, again_s=1.0, is_own=is_own)
        watch.has_lapsed(1)
        clock.advance(8.0)
        watch.has_lapsed(2)
        assert watch.age_s == age


# -- LeaseWatch ---------------------------------------------------------------------------------


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    path = tmp_path / "owner.lease"
    path.write_text("x")
    return path


def watching(marker: Path) -> tuple[LeaseWatch, ManualClock]:
    clock = ManualClock()
    mark = Mark.of(marker)
    watch = LeaseWatch(marker, duration_s=30.0, identity=mark.identity, clock=clock)
    assert watch.lost() is None
    return watch, clock


def touch(marker: Path, clock: ManualClock) -> None:
    os.utime(marker, ns=(0, int(clock.monotonic() * 1e9)))


def test_a_refreshed_lease_is_held(marker: Path) -> None:
    watch, clock = watching(marker)
    for _ in range(20):
        clock.advance(10.0)
        touch(marker, clock)
        assert watch.lost() is None


def test_a_lease_without_refresh_is_left_before_a_contender_may_take_it(marker: Path) -> None:
    watch, clock = watching(marker)
    waited = 0.0
    while watch.lost() is None:
        clock.advance(0.5)
        waited += 0.5
    assert 20.0 < waited < 30.0


def test_after_a_freeze_a_refresh_between_two_looks_saves_the_lease(marker: Path) -> None:
    watch, clock = watching(marker)
    clock.advance(500.0)
    assert watch.lost() is None
    touch(marker, clock)
    clock.advance(3.0)
    assert watch.lost() is None


def test_a_marker_swapped_aside_for_a_moment_is_not_lost(marker: Path, tmp_path: Path) -> None:
    watch, clock = watching(marker)
    marker.rename(tmp_path / "aside")
    marker.write_text("contender")
    assert watch.lost() is None
    clock.advance(1.0)
    assert watch.lost() is None
    (tmp_path / "aside").replace(marker)
    clock.advance(5.0)
    assert watch.lost() is None


@pytest.mark.parametrize("replaced", [True, False])
def test_a_marker_that_is_gone_or_anothers_is_lost_on_the_second_look(
    marker: Path, replaced: bool
) -> None:
    watch, clock = watching(marker)
    keep = marker.open()
    marker.unlink()
    if replaced:
        marker.write_text("another")
    assert watch.lost() is None
    clock.advance(3.0)
    assert watch.lost() == ("the marker is another owner's" if replaced else "the marker is gone")
    keep.close()


# -- RunLease -----------------------------------------------------------------------------------


def test_a_free_lease_is_taken_and_given_back(root: RunRoot) -> None:
    lease = RunLease(root, duration_s=30.0, sleep=never)
    lease.acquire()
    assert lease.lost() is None
    assert Mark.of(root.lease).identity == lease.identity
    lease.release()
    lease.release()
    assert Mark.of(root.lease) is None
    with pytest.raises(RuntimeError, match="not held"):
        _ = lease.identity


def test_a_live_owner_is_named_and_respected_before_the_lease_is_over(root: RunRoot) -> None:
    holder = hold(root, 0.6)
    here = HostBoot.here()
    epoch = EpochRecord(
        epoch=4,
        time=0.0,
        attempt=7,
        host=here.host,
        pid=holder.pid,
        boot_id=here.boot_id,
        started=enter.started(holder.pid),
        reason="test",
    )
    try:
        with pytest.raises(OwnedError) as caught:
            RunLease(root, duration_s=0.6).acquire([epoch], here)
    finally:
        holder.communicate()
    said = caught.value.message
    for part in ("another process owns this run", f"pid {holder.pid}", socket.gethostname(),
                 "attempt 7, epoch 4", "milepost stop", "recovering the node's lock"):  # fmt: skip
        assert part in said
    assert "delete" not in said
    assert "remove" not in said


def test_a_killed_owner_of_this_host_is_succeeded_without_a_wait(root: RunRoot) -> None:
    holder = hold(root, 600.0)
    holder.kill()
    holder.communicate()
    lease = RunLease(root, duration_s=600.0, sleep=never)
    lease.acquire()
    lease.release()


def test_a_dead_owner_that_nobody_collected_is_succeeded_without_a_wait(root: RunRoot) -> None:
    """A zombie: in a container whose first process collects nobody it stays for ever."""
    holder = hold(root, 600.0)
    here = HostBoot.here()
    epoch = EpochRecord(
        epoch=1,
        time=0.0,
        attempt=1,
        host=here.host,
        pid=holder.pid,
        boot_id=here.boot_id,
        started=enter.started(holder.pid),
        reason="test",
    )
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    lease = RunLease(root, duration_s=600.0, sleep=never)
    lease.acquire([epoch], here)
    lease.release()
    holder.communicate()


def test_an_empty_marker_of_a_killed_owner_blocks_nobody_for_ever(root: RunRoot) -> None:
    """SIGKILL between creating the marker and writing it; filelock alone would wait for ever."""
    root.lease.touch()
    clock = ManualClock()
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        clock.advance(seconds)

    lease = RunLease(root, duration_s=30.0, clock=clock, sleep=sleep)
    lease.acquire()
    assert 30.0 < sum(waited) < 45.0
    lease.release()


def test_contenders_agree_on_the_duration(root: RunRoot) -> None:
    holder = hold(root, 5.0)
    try:
        with pytest.raises(OwnedError, match="agree on lease_duration"):
            RunLease(root, duration_s=7.0).acquire()
    finally:
        holder.communicate()


# -- where the root lies ------------------------------------------------------------------------

MOUNTS = """\
/dev/vda / ext4 rw 0 0
nas:/x /mnt/nas nfs4 rw 0 0
/dev/vdb /mnt/nas/local xfs rw 0 0
weka /weka wekafs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "shared"),
    [
        ("/home/run", False),
        ("/mnt/nas", True),
        ("/mnt/nas/run/7", True),
        ("/mnt/nas/local/run", False),
        ("/mnt/nasty", False),
        ("/weka/run", True),
    ],
)
def test_the_longest_mount_decides(path: str, shared: bool) -> None:
    assert is_shared(Path(path), MOUNTS) is shared
