"""What a scheduler does with an experiment of one task: a process per replica, on a node each.

It takes experiments from the Beaker server of the tests, starts their command with the environment
that replicas get, and tells what became of each process as Beaker does. A replica that a test kills
was on a node that went away. Nothing is told to the others: they find out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.namespaces import Network, network
from tests.e2e.ray_cluster import kill_tree
from tests.runtime.launch.fake_beaker import FakeBeaker
from tests.runtime.launch.test_beaker_status import CANCELED, FAILED, RUNNING, SUCCEEDED, job

_POLL_S = 0.2
_NODE_UNAVAILABLE = 6


@dataclass
class Replicas:
    """The processes of one experiment, by rank."""

    task: str
    processes: list[subprocess.Popen[bytes]]
    logs: list[Path]

    def kill(self, rank: int) -> None:
        """Let the node of a rank go away, with everything on it."""
        kill_tree(self.processes[rank])

    def log(self) -> str:
        return "\n".join(
            f"--- {log}\n{log.read_text(errors='replace')[-3000:]}" for log in self.logs
        )


@dataclass
class Scheduler:
    """Runs what is submitted, and keeps the server's jobs up to date."""

    beaker: FakeBeaker
    hosts: Network
    folder: Path
    groups: dict[str, Replicas] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)
    broken: list[BaseException] = field(default_factory=list)

    def run(self) -> None:
        """Until ``over``."""
        try:
            while not self.over.wait(_POLL_S):
                for name in list(self.beaker.specs):
                    if name not in self.groups:
                        self.groups[name] = self._start(name)
                self.beaker.jobs[:] = [
                    self._job(group, rank)
                    for group in self.groups.values()
                    for rank in range(len(group.processes))
                ]
        except BaseException as error:
            self.broken.append(error)

    def group(self, attempt: int) -> Replicas | None:
        """The processes of an attempt; None before they were started."""
        return next((g for n, g in self.groups.items() if n.endswith(f"-a{attempt}")), None)

    def _start(self, name: str) -> Replicas:
        (task,) = self.beaker.specs[name]["tasks"]
        size = task["replicas"]
        while len(self.hosts.names) < size:
            self.hosts.add()
        logs = [self.folder / f"{name}-{rank}.log" for rank in range(size)]
        return Replicas(
            task=self.beaker.experiments[name].experiment.tasks[0].id,
            processes=[self._replica(task, rank, logs[rank]) for rank in range(size)],
            logs=logs,
        )

    def _replica(self, task: dict[str, Any], rank: int, log: Path) -> subprocess.Popen[bytes]:
        python, *arguments = task["command"]
        assert python == "python"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "BEAKER_"))}
        env = {
            **kept,
            **{each["name"]: each["value"] for each in task["envVars"]},
            "BEAKER_REPLICA_RANK": str(rank),
            "BEAKER_REPLICA_COUNT": str(task["replicas"]),
            "BEAKER_NODE_ID": f"node-{rank}",
            "PYTHONPATH": str(Path.cwd()),
            "OMP_NUM_THREADS": "1",
        }
        with log.open("ab") as file:
            return subprocess.Popen(
                [*self.hosts.within(rank), sys.executable, *arguments],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.folder,
            )

    def _job(self, group: Replicas, rank: int) -> Any:
        code, size = group.processes[rank].poll(), len(group.processes)
        if code is None:
            made = job(RUNNING, rank=rank, size=size)
        elif code < 0:
            made = job(CANCELED, rank=rank, size=size, code=_NODE_UNAVAILABLE)
        else:
            made = job(FAILED if code else SUCCEEDED, rank=rank, size=size, exit_code=code)
        made.task_id = group.task
        return made


@contextmanager
def scheduling(beaker: FakeBeaker, folder: Path) -> Iterator[Scheduler]:
    """A scheduler that runs until the end, and ends what it started."""
    with network(f"mp{os.getpid()}g", "10.84.0") as hosts:
        scheduler = Scheduler(beaker, hosts, folder)
        thread = threading.Thread(target=scheduler.run, name="scheduler", daemon=True)
        thread.start()
        try:
            yield scheduler
        finally:
            scheduler.over.set()
            thread.join()
            for group in scheduler.groups.values():
                for rank, process in enumerate(group.processes):
                    if process.poll() is None:
                        group.kill(rank)
