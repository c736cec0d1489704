"""A job server of a Ray cluster: jobs by id, 500 for a second one of an id, packages by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.runtime.launch.fake_http import FakeScheduler, JsonHandler

TOKEN = "the-token-of-the-ray-cluster"


class FakeJobs(FakeScheduler):
    """State of the server; tests read and write it."""

    token = TOKEN

    def __init__(self) -> None:
        super().__init__()
        self.jobs: dict[str, Any] = {}
        self.packages: dict[str, bytes] = {}


def _handler(state: FakeJobs) -> type[JsonHandler]:
    class Handler(JsonHandler):
        fake = state

        def do_GET(self) -> None:
            if not self.may_enter():
                return
            name = self.path.rpartition("/")[2]
            if "/packages/" in self.path:
                self.answer(200 if name in state.packages else 404, {})
            else:
                found = state.jobs.get(name)
                self.answer(200 if found else 404, found or {})

        def do_PUT(self) -> None:
            body = self.body()
            if self.may_enter():
                state.packages[self.path.rpartition("/")[2]] = body
                self.answer(200, {})

        def do_POST(self) -> None:
            body = self.body()
            if not self.may_enter():
                return
            if self.path.endswith("/stop"):
                self._stop(self.path.split("/")[-2])
                return
            if self.is_failing():
                return
            asked = json.loads(body)
            key = asked["submission_id"]
            job = {"status": "PENDING", "message": "", "metadata": asked["metadata"]}
            with state.lock:
                is_new = key not in state.jobs
                if is_new:
                    state.jobs[key] = {**job, "asked": asked}
            if not is_new:
                self.answer(500, {"error": f"Job with submission_id {key} already exists"})
            elif not self.is_lost():
                self.answer(200, {"submission_id": key})

        def _stop(self, key: str) -> None:
            job = state.jobs.get(key)
            if job is None:
                self.answer(404, {"error": f"Job {key} does not exist"})
                return
            was_live = job["status"] in ("PENDING", "RUNNING")
            if was_live:
                job["status"] = "STOPPED"
            self.answer(200, {"stopped": was_live})

    return Handler


@contextmanager
def serving() -> Iterator[FakeJobs]:
    """A server on loopback."""
    state = FakeJobs()
    with state.serving(_handler(state)):
        yield state
