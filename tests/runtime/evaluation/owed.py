"""A run whose evaluations are owed, and a store of the jobs that make them."""

import threading
from pathlib import Path

from runtime.clock import ManualClock
from runtime.evaluation import files, receipts
from runtime.evaluation.job import JobOrder
from runtime.evaluation.records import Request, Result, Started
from runtime.evaluation.submission import JobsAway, JobState, Row, Rules, submit_due
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import EndRecord
from tests.runtime.session.attempted import commit, own


class Jobs:
    """Keeps of the real ones: a key is one job, however often it is asked for; it may be away."""

    def __init__(self) -> None:
        self.states: dict[str, JobState] = {}
        self.orders: list[tuple[str, JobOrder]] = []
        self.is_away = False
        self.loses_answers = False
        self.loses_calls = False
        self._lock = threading.Lock()

    def check(self) -> None:
        if self.is_away:
            raise JobsAway("no deployment")

    def state(self, key: str) -> JobState:
        return self.states.get(key, "absent")

    def submit(self, key: str, order: JobOrder) -> str:
        if self.loses_calls:
            raise JobsAway("connection refused")
        with self._lock:
            if key not in self.states:
                self.states[key] = "alive"
                self.orders.append((key, order))
        if self.loses_answers:
            raise JobsAway("connection reset")
        return f"job {key}"


class Owed:
    """A run of one epoch with commits, whose evaluations are asked for one by one."""

    def __init__(self, folder: Path) -> None:
        self.root = RunRoot(folder / "run")
        self.root.create()
        own(self.root, epoch=1)
        self.jobs = Jobs()
        self.clock = ManualClock()
        self.clock.advance(1000.0)

    def ask(self, update: int, kind: str = "cadence", **fields: object) -> Path:
        commit(self.root.path, update=update)
        folder = self.root.evaluation(f"e1.u{update}", "held")
        request = {
            "time": self.clock.time(), "run": "owed", "policy": f"e1.u{update}", "set": "held",
            "kind": kind, "required": kind == "final", "mode": "background", "attempt": 1,
            "epoch": 1, "set_digest": "d", "sampling": {}, "seed": 0, **fields,
        }  # fmt: skip
        files.write_request(folder, Request.model_validate(request))
        return folder

    def ask_at_the_end(self, update: int) -> Path:
        """The run ends where the cadence was skipped as busy."""
        folder = self.ask(update)
        files.skip(folder, "busy", time=self.clock.time())
        last = {"kind": "final", "required": True, "time": self.clock.time()}
        files.ask_once(folder, request_of(folder).model_copy(update=last))
        return folder

    def submit(self, **rules: object) -> dict[int, Row]:
        asked = Rules(by="test", **rules)  # type: ignore[arg-type]
        rows = submit_due(self.root, self.jobs, asked, clock=self.clock)
        return {row.update: row for row in rows}

    def end(self, folder: Path, **result: object) -> None:
        """The newest try's job writes its result and ends."""
        (newest,) = receipts.derive(folder, stands=True).tries[-1:]
        made = {"time": self.clock.time(), "state": "succeeded", **result}
        files.finish_try(folder, newest.number, Result.model_validate(made))
        self.jobs.states[newest.submission.key] = "over"

    def crash(self, folder: Path) -> None:
        """The newest try's job is killed."""
        (newest,) = receipts.derive(folder, stands=True).tries[-1:]
        files.start_try(folder, newest.number, Started(time=self.clock.time(), host="h", pid=1))
        self.jobs.states[newest.submission.key] = "over"


def request_of(folder: Path) -> Request:
    found = receipts.derive(folder, stands=True)
    assert found is not None
    return found.request


def end_of(root: RunRoot) -> None:
    chain = Chain(root)
    chain.read()
    chain.append(EndRecord(epoch=1, time=0.0, state="complete", ended_by="max_updates", update=4))
