"""Guards of dummy sessions, as processes and as forks that are killed at a file operation."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from runtime.rundir import atomic, history
from runtime.rundir.journal import read_rows
from runtime.rundir.layout import AttemptDir, RunRoot
from runtime.session.guard import Guard as RealGuard
from runtime.session.succession import Choice

QUICK_CODE = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
epoch = json.loads((folder / "guard.json").read_text())["epoch"]
words = {"epoch": epoch, "state": "complete", "ended_by": "max_updates", "update": 0}
(folder / "outcome.json").write_text(json.dumps(words))
"""
QUICK_SESSION = (sys.executable, "-I", "-S", "-c", QUICK_CODE)
"""Only last words: for tests of what the guard writes."""


def newest(root: RunRoot, records) -> Choice:
    """Takes the dummy's commits, which have no files, at their word."""
    return Choice(commit=history.newest_commit(records))


Guard = partial(RealGuard, choose=newest)


def digest_of(update: int) -> str:
    digest = ""
    for u in range(1, update + 1):
        digest = hashlib.sha256(f"{digest}{u}".encode()).hexdigest()
    return digest


def start_guard(attempt: AttemptDir, *argv: str) -> subprocess.Popen[bytes]:
    command = argv or (sys.executable, "-m", "runtime.session.guard", str(attempt.path))
    with attempt.guard_log.open("ab") as log:
        env = {**os.environ, "PYTHONPATH": str(Path.cwd())}
        return subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)


def killed_guard(attempt: AttemptDir, *, operations: int) -> int:
    """A guard in a fork of this process, killed before the file operation after so many."""
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            left = iter(range(operations))

            def probe(operation: str, path: Path) -> None:
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)

            atomic.probe = probe
            status = Guard(attempt).run()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wait_for(condition, what: str, timeout_s: float = 20.0):
    until = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < until, f"waited for {what}"
        time.sleep(0.01)
    return found


def session_pid(attempt: AttemptDir) -> int:
    rows = read_rows(attempt.processes)
    return next(int(r["pid"]) for r in reversed(rows) if r["role"] == "session")


def check_history(root: RunRoot, records) -> None:
    """Whatever was killed: updates ascend by what was counted, none lost, none twice."""
    commits = history.standing_commits(records)
    updates = [c.update for c in commits]
    assert updates == sorted(set(updates))
    for commit in commits:
        assert commit.consumed_digest == digest_of(commit.update)


def snapshot(root: RunRoot) -> dict[str, tuple[int, bytes]]:
    """Everything in the root but the old attempt's own folder: history, views, other attempts."""
    own = root.attempt(1).path
    return {
        str(p): (p.stat().st_mtime_ns, p.read_bytes())
        for p in sorted(root.path.rglob("*"))
        if p.is_file() and own not in p.parents
    }
