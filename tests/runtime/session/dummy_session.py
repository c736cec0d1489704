"""A session that trains nothing: it counts updates and commits the count.

What it keeps of the real one: it is tied to its guard, restores what its epoch names, appends
commits, writes the view, stops on SIGTERM or a stop file, and leaves last words. The commit's
consumed digest is the hash chain of all updates, so a lost or doubled update shows.

``DUMMY`` (JSON): updates, every (updates per commit), kill_at (own SIGKILL before that file
operation), hang_at (update at which it waits for ever), exit_status, fail (message), spawn
(starts a child that ignores everything), silent (no last words), distrusts (updates of commits
that it finds damaged), deaf (ignores SIGTERM).
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from runtime.errors import EngineDead, FencedError
from runtime.policy import PolicyId
from runtime.rundir import atomic, history, workflow
from runtime.rundir.attempt import Outcome
from runtime.rundir.chain import Chain
from runtime.rundir.control import Control
from runtime.rundir.failure import Failure
from runtime.rundir.layout import AttemptDir
from runtime.rundir.records import CommitRecord
from runtime.session import deadman

asked = json.loads(os.environ.get("DUMMY", "{}"))
every = asked.get("every", 1)
operations = 0


def probe(operation: str, path: Path) -> None:
    global operations
    if operations == asked["kill_at"]:
        os.kill(os.getpid(), signal.SIGKILL)
    operations += 1


def digest_of(update: int) -> str:
    digest = ""
    for u in range(1, update + 1):
        digest = hashlib.sha256(f"{digest}{u}".encode()).hexdigest()
    return digest


def commit(chain: Chain, epoch: int, update: int, digest: str) -> None:
    parent = history.newest_commit(chain.seen)
    chain.append(
        CommitRecord(
            epoch=epoch,
            time=time.time(),
            format_version=1,
            update=update,
            policy=str(PolicyId(epoch, update)),
            training_digest="t",
            layout={},
            data_fingerprint="d",
            ledger_checksum="l",
            consumed_digest=digest,
            folder=f"checkpoints/{update:06d}-e{epoch}",
            files=(),
            parent_seq=parent.seq if parent else None,
        )
    )


def main() -> int:
    attempt = AttemptDir(Path(sys.argv[1]))
    deadman.watch(attempt.path)
    stop = threading.Event()
    stopped_by = ["stop"]

    def terminated(*_: object) -> None:
        stopped_by[:] = ["sigterm"]
        stop.set()

    signal.signal(signal.SIGTERM, terminated)
    if asked.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "kill_at" in asked:
        atomic.probe = probe
    if asked.get("spawn"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (attempt.path / "child.pid").write_text(str(child.pid))
    chain = Chain(attempt.root)
    records = chain.read()
    epoch = history.newest_epoch(records)
    restored = history.restored_commit(records)
    update, digest = (restored.update, restored.consumed_digest) if restored else (0, "")
    if restored and restored.update in asked.get("distrusts", ()):
        older = history.standing_commits(records)[-2]
        epoch = chain.retake(older, reason="damaged", time=time.time())
        update, digest = older.update, older.consumed_digest
    if restored is None:
        commit(chain, epoch.epoch, 0, "")
    view = workflow.WorkflowFile(attempt.root, epoch=epoch.epoch)
    control = Control(attempt.root)
    ended_by = "max_updates"
    while update < asked["updates"]:
        rebuilt = workflow.rebuild(attempt.root, chain.seen, now=time.time())
        fields = {
            "update": update,
            "activity": "running",
            "step": f"segment/{update + 1}",
            "state": "training",
        }
        view.write(rebuilt.model_copy(update=fields))
        if asked.get("hang_at") == update:
            (attempt.path / "hanging").touch()
            while not stop.wait(0.01):
                if control.stop_request(epoch.epoch):
                    stop.set()
        if stop.is_set():
            (ended_by,) = stopped_by
            break
        update += 1
        digest = hashlib.sha256(f"{digest}{update}".encode()).hexdigest()
        if update % every == 0:
            commit(chain, epoch.epoch, update, digest)
    is_over = ended_by == "max_updates"
    failure = None
    if "fail" in asked:
        error = EngineDead(asked["fail"])
        failure = Failure.of(error, step=f"segment/{update}", time=time.time())
    if not asked.get("silent"):
        Outcome(
            epoch=epoch.epoch,
            state="failed" if failure else "complete" if is_over else "training",
            activity=None if is_over or failure else "stopped",
            ended_by="fatal" if failure else ended_by,
            update=update,
            failure=failure,
        ).write(attempt)
    return asked.get("exit_status", 1 if failure else 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FencedError as error:
        sys.stderr.write(f"fenced: {error}\n")
        sys.exit(3)
