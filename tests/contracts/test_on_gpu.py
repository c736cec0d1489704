"""Whoever ends the run on a GPU from outside ends the groups it started."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.contracts.on_gpu import GROUPS, ROOT

GROUP = """\
#!/bin/sh
sleep 600 &
trap "{heard}" INT
touch {at}/$$.pid
wait
"""
LISTENS = "touch {at}/$$.heard; kill $!; exit 2"
RUN = """
import signal, sys
from tests.contracts import on_gpu
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.executable, on_gpu.GRACE_S = sys.argv.pop(1), float(sys.argv.pop(1))
on_gpu.main()
"""


@pytest.mark.parametrize(
    ("by", "listen", "grace_s"), [(signal.SIGINT, True, 60.0), (signal.SIGTERM, False, 0.2)]
)
def test_an_interrupt_ends_every_group_in_time_or_at_once(
    by: signal.Signals, listen: bool, grace_s: float, tmp_path: Path
) -> None:
    group = tmp_path / "group"
    group.write_text(GROUP.format(at=tmp_path, heard=LISTENS.format(at=tmp_path) if listen else ""))
    group.chmod(0o755)
    words = [str(group), str(grace_s), "--python", "unused", "--out", str(tmp_path / "out")]
    running = subprocess.Popen(
        [sys.executable, "-c", RUN, *words],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        pids = started(tmp_path, running)
        running.send_signal(by)
        assert running.wait(60.0) != 0
        assert [pid for pid in pids if is_there(pid)] == []
        assert len(list(tmp_path.glob("*.heard"))) == (len(GROUPS) if listen else 0)
    finally:
        running.kill()
        running.wait()
        for pid in filter(is_there, (int(path.stem) for path in tmp_path.glob("*.pid"))):
            os.killpg(pid, signal.SIGKILL)


def started(folder: Path, running: subprocess.Popen[bytes]) -> list[int]:
    """Process ids of all groups, once they listen or do not."""
    assert running.stdout is not None
    assert b"groups run" in running.stdout.readline()
    while len(found := list(folder.glob("*.pid"))) < len(GROUPS):
        assert running.poll() is None
        time.sleep(0.02)
    return [int(path.stem) for path in found]


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
