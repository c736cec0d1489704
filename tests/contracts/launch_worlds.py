"""The backends that the launch contract runs against, each in a small world of its own.

``local`` starts real processes that do nothing; ``ray``, ``kuberay`` and ``beaker`` speak their
wire to a server of their tests, which can be told to lose answers, to fail and to hang. A world's
server schedules nothing: tests say what became of an attempt.
"""

from __future__ import annotations

import json
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from pydantic import SecretStr

from configs.load import LoadedRun, load_run
from configs.plan import make_plan
from runtime.launch.attempts import Launch
from runtime.launch.backend import LaunchBackend
from runtime.launch.local import LocalLaunch
from runtime.launch.receipts import LaunchReceipt, Receipts
from runtime.launch.submission import PAYLOAD_VARIABLE, Payload, Submission
from runtime.launch.submitting import Sender, submit_run
from runtime.launch.watching import Watcher
from runtime.rundir.attempt import (
    EXIT_FAILED,
    EXIT_NOT_OWNER,
    EXIT_STOPPED,
    EXIT_TERMINATED,
    Started,
)
from runtime.rundir.layout import RunRoot
from runtime.rundir.processes import is_alive, kill_exactly
from tests.runtime.launch.submissions import DIGEST, IMAGE, PRESETS, submission

Outcome = Literal[
    "running", "succeeded", "failed", "taken", "canceled", "turned away", "stopped", "terminated"
]
"""What a scheduler can say of an attempt; ``succeeded``: its process left with status 0; ``taken``:
its hardware was lost from outside; the last three: its guard exited as one does that finds another
owner, was asked to stop, or got SIGTERM."""
EXITS: dict[Outcome, int] = {
    "failed": EXIT_FAILED,
    "turned away": EXIT_NOT_OWNER,
    "stopped": EXIT_STOPPED,
    "terminated": EXIT_TERMINATED,
}
BACKENDS = ("local", "ray", "kuberay", "beaker")
SCHEDULERS = BACKENDS[1:]
SECRET = "a-secret-of-the-submitter"
SURROUNDINGS = "only-of-the-submitters-machine"
PATIENT_S = 60.0
_LIVE = (sys.executable, "-c", "import time; time.sleep(600)")


class World(ABC):
    """One backend, with a run for it."""

    name: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def root(self) -> RunRoot:
        return RunRoot.of(self.folder / "run")

    @abstractmethod
    def loaded(self, *sets: str) -> LoadedRun:
        """The world's run, whose output root can be reached from here."""

    @abstractmethod
    def launch(
        self, loaded: LoadedRun, *, lost_attempt: int | None = None, by: str = "one"
    ) -> Launch:
        """What a submitter does; ``by`` is the machine it does it on, with receipts of its own."""

    @abstractmethod
    def attempts(self) -> list[int]:
        """Numbers of the attempts that were started, once for each start."""

    def written(self) -> Iterator[str]:
        """Everything that launching wrote to a disk."""
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and "credentials" not in path.parts:
                yield path.read_text(errors="replace")


class LocalWorld(World):
    name = "local"

    def loaded(self, *sets: str) -> LoadedRun:
        return load_run(PRESETS / "laptop.toml", [f'output.root="{self.root.path}"', *sets])

    def launch(
        self, loaded: LoadedRun, *, lost_attempt: int | None = None, by: str = "one"
    ) -> Launch:
        del by  # one machine has one
        plan = make_plan(loaded)
        return LocalLaunch(guard=_LIVE).start(
            self.root,
            loaded.spec.model_dump_json(),
            plan.training_digest,
            run=loaded.spec.name,
            plan_json=plan.model_dump_json(),
            env=dict(loaded.spec.launch.env),
            lost_attempt=lost_attempt,
        )

    def attempts(self) -> list[int]:
        return [n for n, guard in self._guards() if is_alive(guard.pid, guard.started)]

    def close(self) -> None:
        """End what was started."""
        for _, guard in self._guards():
            assert kill_exactly(guard.pid, guard.started)

    def _guards(self) -> list[tuple[int, Started]]:
        started = [(n, self.root.attempt(n).started) for n in self.root.attempt_numbers()]
        return [(n, Started.decode(p.read_bytes(), "started")) for n, p in started if p.exists()]


class SchedulerWorld(World):
    """A backend with a scheduler behind it."""

    preset: str
    image: str | None
    mounts: tuple[str, ...] = ()
    server: Any
    """With ``num_posts``, ``lose_answers``, ``fail_posts`` and ``released``."""
    breach: tuple[str, str]
    """A ``--set`` value, or ``no image``, that the scheduler's rules refuse; and its message."""

    @abstractmethod
    def backend(
        self, *, deadline_s: float = PATIENT_S, token: str | None = None
    ) -> LaunchBackend: ...

    @abstractmethod
    def documents(self) -> dict[str, dict[str, Any]]:
        """What the scheduler got, by the attempt's name."""

    @abstractmethod
    def become(self, key: str, outcome: Outcome) -> None:
        """Let the scheduler say this of an attempt from now on."""

    @abstractmethod
    def forget(self, key: str) -> None:
        """Let the scheduler know nothing of an attempt any more."""

    def loaded(self, *sets: str) -> LoadedRun:
        return self._loaded(self.root.path, self.folder, sets)

    def far(self, *sets: str) -> LoadedRun:
        """The run with an output root on a mount that this machine has not."""
        mount = Path("/nowhere/milepost")
        return self._loaded(mount / "run", mount, sets)

    def sender(self, *, by: str = "one", **credentials: Any) -> Sender:
        receipts = Receipts(self.folder / f"receipts-{by}")
        return Sender(backend=self.backend(**credentials), receipts=receipts, image=self.image)

    def launch(
        self, loaded: LoadedRun, *, lost_attempt: int | None = None, by: str = "one"
    ) -> Launch:
        return submit_run(loaded, self.sender(by=by), lost_attempt=lost_attempt)

    def attempts(self) -> list[int]:
        return sorted(int(name.rpartition("-a")[2]) for name in self.documents())

    def receipts(self, loaded: LoadedRun, *, by: str = "one") -> list[LaunchReceipt]:
        return self.sender(by=by).receipts.of_root(loaded.spec.output.root)

    def watcher(self, loaded: LoadedRun, *, by: str = "one") -> Watcher:
        return Watcher(loaded, self.sender(by=by))

    def submission(self, loaded: LoadedRun, attempt: int = 1) -> Submission:
        return submission(loaded, image=self.image, attempt=attempt, backend=self.name)

    def payloads(self) -> list[Payload]:
        """What travelled inside the documents."""
        found = (_environment(document) for document in self.documents().values())
        return [Payload.decode(environment[PAYLOAD_VARIABLE]) for environment in found]

    def _loaded(self, root: Path, mount: Path, sets: tuple[str, ...]) -> LoadedRun:
        ours = [
            f'launch.backend="{self.name}"',
            f'output.root="{root}"',
            f"launch.weka_mounts={json.dumps([*self.mounts, str(mount)])}",
            'launch.auto_resume="milepost"',
        ]
        return load_run(PRESETS / self.preset, [*ours, *sets])


def _environment(document: Any) -> dict[str, str]:
    """The first object of names and values in a document that holds a payload."""
    if isinstance(document, dict):
        if PAYLOAD_VARIABLE in document:
            return document
        if document.get("name") == PAYLOAD_VARIABLE:
            return {PAYLOAD_VARIABLE: document["value"]}
    inner = document.values() if isinstance(document, dict) else document
    for each in inner if isinstance(document, dict | list) else ():
        if found := _environment(each):
            return found
    return {}


class RayWorld(SchedulerWorld):
    name, preset, image = "ray", "laptop.toml", None
    breach = ('launch.secrets={HF_TOKEN="a-secret"}', r"launch\.secrets \(HF_TOKEN\)")
    _SAID: ClassVar[dict[Outcome, dict[str, Any]]] = {
        "running": {"status": "RUNNING"},
        "succeeded": {"status": "SUCCEEDED", "driver_exit_code": 0},
        "taken": {"status": "FAILED", "error_type": "JOB_SUPERVISOR_ACTOR_DIED"},
        "canceled": {"status": "STOPPED"},
    }
    _EXITED: ClassVar[dict[str, Any]] = {
        "status": "FAILED", "error_type": "JOB_ENTRYPOINT_COMMAND_ERROR"
    }  # fmt: skip

    def __init__(self, folder: Path, server: Any) -> None:
        super().__init__(folder)
        self.server = server
        self.checkout = folder / "checkout"
        self.checkout.mkdir()
        (self.checkout / "a.py").write_text("1\n")
        subprocess.run(["git", "-C", str(self.checkout), "init", "-q"], check=True)

    def backend(self, *, deadline_s: float = PATIENT_S, token: str | None = None) -> LaunchBackend:
        from runtime.launch.ray_jobs import RayJobs

        secret = SecretStr(token or self.server.token)
        return RayJobs(self.server.url, token=secret, checkout=self.checkout, deadline_s=deadline_s)

    def documents(self) -> dict[str, dict[str, Any]]:
        return {key: job["asked"] for key, job in self.server.jobs.items()}

    def become(self, key: str, outcome: Outcome) -> None:
        exited = {**self._EXITED, "driver_exit_code": EXITS.get(outcome)}
        self.server.jobs[key].update(self._SAID.get(outcome, exited))

    def forget(self, key: str) -> None:
        del self.server.jobs[key]


class _WithConfig(SchedulerWorld):
    """A scheduler whose client reads its credentials from a file."""

    def __init__(self, folder: Path, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder)
        self.server = server
        self._monkeypatch = monkeypatch
        self._use(server.token)

    @abstractmethod
    def _use(self, token: str) -> None:
        """Let clients of this process that are made from now on find this token."""


class KubeRayWorld(_WithConfig):
    name, preset, image = "kuberay", "three-node.toml", DIGEST
    mounts = ("/weka/oe-adapt-default",)
    breach = ("no image", r"image\.missing")
    _SAID: ClassVar[dict[Outcome, tuple[str, str]]] = {
        "running": ("Running", "RUNNING"),
        "succeeded": ("Complete", "SUCCEEDED"),
        "taken": ("Failed", "RUNNING"),
        "canceled": ("Complete", "STOPPED"),
    }

    def backend(self, *, deadline_s: float = PATIENT_S, token: str | None = None) -> LaunchBackend:
        from runtime.launch.kuberay import kuberay_backend
        from tests.runtime.launch.fake_kubernetes import NAMESPACE

        if token is not None:
            self._use(token)
        environ = {"MILEPOST_K8S_NAMESPACE": NAMESPACE}
        return kuberay_backend("c", environ=environ, deadline_s=deadline_s)

    def _use(self, token: str) -> None:
        at = self.server.config(self.folder / "credentials" / "kubeconfig", token)
        self._monkeypatch.setattr(
            "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(at)
        )

    def documents(self) -> dict[str, dict[str, Any]]:
        return {
            name: {k: v for k, v in each.items() if k != "status"}
            for name, each in self.server.objects.items()
        }

    def become(self, key: str, outcome: Outcome) -> None:
        deployed, job = self._SAID.get(outcome, ("Failed", "FAILED"))
        status = {"jobDeploymentStatus": deployed, "jobStatus": job}
        if outcome in EXITS:
            status["message"] = (
                f"Job entrypoint command failed with exit code {EXITS[outcome]}, last available "
                "logs (truncated to 20,000 chars):\nexit code 17 is no word of Ray's\n"
            )
        self.server.objects[key]["status"] = status

    def forget(self, key: str) -> None:
        del self.server.objects[key]


class BeakerWorld(_WithConfig):
    name, preset, image = "beaker", "three-node.toml", IMAGE
    mounts = ("/weka/oe-adapt-default",)
    breach = ("no image", r"image\.missing")

    def backend(self, *, deadline_s: float = PATIENT_S, token: str | None = None) -> LaunchBackend:
        from runtime.launch.beaker import beaker_backend

        if token is not None:
            self._use(token)
        return beaker_backend("ai2/test", deadline_s=deadline_s)

    def _use(self, token: str) -> None:
        for name, value in self.server.config(self.folder / "credentials", token).items():
            self._monkeypatch.setenv(name, value)
        self._monkeypatch.delenv("BEAKER_TOKEN", raising=False)

    def documents(self) -> dict[str, dict[str, Any]]:
        return self.server.specs

    def become(self, key: str, outcome: Outcome) -> None:
        from tests.runtime.launch.test_beaker_status import (
            CANCELED,
            FAILED,
            RUNNING,
            SUCCEEDED,
            job,
        )

        said: dict[Outcome, tuple[Any, dict[str, int]]] = {
            "running": (RUNNING, {}),
            "succeeded": (SUCCEEDED, {"exit_code": 0}),
            "taken": (CANCELED, {"code": 1}),
            "canceled": (CANCELED, {"code": 4}),
        }
        status, ending = said.get(outcome) or (FAILED, {"exit_code": EXITS[outcome]})
        task = self.server.experiments[key].experiment.tasks[0].id
        self.server.jobs[:] = [job(status, rank=rank, size=3, **ending) for rank in range(3)]
        if outcome in EXITS and outcome != "failed":
            # The leader's guard alone; the others are ended because of it.
            self.server.jobs[1:] = [job(CANCELED, rank=rank, size=3, code=8) for rank in (1, 2)]
        for each in self.server.jobs:
            each.task_id = task

    def forget(self, key: str) -> None:
        del self.server.experiments[key], self.server.specs[key]


@contextmanager
def world_of(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A world, and its end. Skips where the backend's client is not installed."""
    (folder / "credentials").mkdir()
    if name == "local":
        world = LocalWorld(folder)
        try:
            yield world
        finally:
            world.close()
    elif name == "ray":
        from tests.runtime.launch import fake_ray_jobs

        with fake_ray_jobs.serving() as server:
            yield RayWorld(folder, server)
    elif name == "kuberay":
        pytest.importorskip("kubernetes", reason="pip install -e '.[launch]'")
        from tests.runtime.launch import fake_kubernetes

        with fake_kubernetes.serving() as server:
            yield KubeRayWorld(folder, server, monkeypatch)
    else:
        pytest.importorskip("beaker", reason="pip install -e '.[launch]'")
        from tests.runtime.launch import fake_beaker

        with fake_beaker.serving(folder / "credentials") as server:
            yield BeakerWorld(folder, server, monkeypatch)
