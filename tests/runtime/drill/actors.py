"""What a session and a flow of a drilled run do at their points, and nothing else.

``python -m tests.runtime.drill.actors PART RUN_FILE ...``: each follows the run's fault plan and
writes what the real one writes there.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

from runtime.drill.job import Job, attended
from runtime.faults.plan import FaultPlan
from runtime.rundir import enter
from runtime.rundir.atomic import write_new
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import CommitRecord, encode
from tests.runtime.drill.records import commit

SESSION = "runtime.session.driver"
"""In the command line of the part that is taken for the session."""


def _evaluate(root: RunRoot, update: int) -> None:
    result = root.evaluations / f"e1.u{update}" / "held" / "tries" / "0" / "result.json"
    result.parent.mkdir(parents=True)
    result.with_suffix(".tmp").write_text(json.dumps({"state": "succeeded"}))
    result.with_suffix(".tmp").rename(result)


def session(root: RunRoot, plan: FaultPlan, evaluated: list[int]) -> None:
    """Commit every second update; an evaluation ends once its commit is held."""
    while evaluated and "commit.record" not in (root.path.parent / "faults/plan.json").read_text():
        time.sleep(0.01)  # or all would be over before the drill begins
    for seq, update in enumerate((2, 4, 6), start=1):
        record = commit(1, update).model_copy(update={"seq": seq})
        root.checkpoint(update, 1).mkdir(parents=True)
        num_held = len(plan.fired())
        writing = threading.Thread(target=_record, args=(root, plan, record))
        writing.start()
        if update in evaluated:
            while len(plan.fired()) == num_held:
                time.sleep(0.01)
            _evaluate(root, update)
        writing.join()
    time.sleep(3600)


def _record(root: RunRoot, plan: FaultPlan, record: CommitRecord) -> None:
    plan.reach("commit.record")
    write_new(root.chain / f"{record.seq}.json", encode(record))


def flow(root: RunRoot, plan: FaultPlan, file: Path, owner: int, point: str) -> None:
    """Attach to the run; once its owner is gone, claim the next attempt or attach to it."""

    def say(saw: str) -> None:
        with attended(file).open("a") as out:
            out.write(json.dumps({"time": time.time(), "pid": os.getpid(), "saw": saw}) + "\n")

    say("attached")
    while enter.started(owner) is not None:
        time.sleep(0.01)
    plan.reach(point)
    try:
        (root.path / "claimed").mkdir()
    except FileExistsError:
        say("attached")
    else:
        say("started")
    time.sleep(3600)


if __name__ == "__main__":
    part, path, *more = sys.argv[1:]
    job = Job(file=Path(path), variant="ahead", updates=8)
    faults = FaultPlan(job.file.parent / "faults")
    if part == SESSION:
        session(job.root, faults, [int(update) for update in more[1:]])
    else:
        flow(job.root, faults, job.file, int(more[0]), more[1])
