"""The Beaker backend, over the scheduler's own client.

That client waits without end for a server that is away: every call of it runs in a thread that is
left behind at our deadline.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from runtime.errors import ConfigError, CredentialsRefused, LaunchRefused, ServiceUnavailable
from runtime.launch.backend import Submitted
from runtime.launch.beaker_document import beaker_document
from runtime.launch.beaker_status import standing_of
from runtime.launch.contract import violations
from runtime.launch.receipts import LaunchReceipt
from runtime.launch.standing import AttemptClass, AttemptStanding
from runtime.launch.submission import Submission

CALL_DEADLINE_S = 60.0
_MARK = re.compile(r"\b[0-9a-f]{16}\.[0-9a-f]{16}\b")
"""``Submission.mark``, in an experiment's description."""
T = TypeVar("T")


class BeakerLaunch:
    """Implements LaunchBackend. The experiment's name is the attempt's key."""

    name = "beaker"

    def __init__(
        self,
        connect: Callable[[], Any],
        *,
        workspace: str | None,
        deadline_s: float = CALL_DEADLINE_S,
    ) -> None:
        """Prepare; nothing is sent.

        Args:
            connect: makes a ``beaker.Beaker``.
            workspace: None takes the run's, then the client's.
            deadline_s: of every call.
        """
        self._connect = connect
        self._client: Any = None
        self._workspace = workspace
        self._deadline_s = deadline_s

    @property
    def where(self) -> str:
        """The workspace."""
        return self._workspace or "beaker"

    def render(self, submission: Submission) -> dict[str, Any]:
        """See LaunchBackend."""
        return beaker_document(submission)

    def check(self, submission: Submission) -> list[str]:
        """See LaunchBackend: the group contract on the rendered document."""
        found = violations(self.render(submission), submission.spec, submission.plan)
        return [str(each) for each in found]

    def submit(self, submission: Submission) -> Submitted:
        """See LaunchBackend. A name that is taken is our own earlier call, or a rival's."""
        from beaker.exceptions import BeakerExperimentConflict

        key, document = submission.key, self.render(submission)
        if (standing := self._find(key)) is not None:
            return self._submitted(standing, was_there=True)

        def create(client: Any) -> Any:
            place = self._place(client)
            return client.experiment.create(spec=_spec(document), name=key, workspace=place)

        try:
            return self._submitted(self._call("create an experiment", create))
        except BeakerExperimentConflict:
            pass  # somebody was faster under this name: it is looked up below
        except ServiceUnavailable:
            # The answer is lost, not the experiment: whoever asks again finds it by its name.
            if (standing := self._find(key)) is None:
                raise
            return self._submitted(standing, was_there=True)
        standing = self._find(key)
        if standing is None:
            raise LaunchRefused(
                f"the name {key} is taken by an experiment that is not ours to see: give the run "
                "another name"
            )
        return self._submitted(standing, was_there=True)

    def job_of(self, key: str) -> str | None:
        """See LaunchBackend: an experiment's id is not its name."""
        workload = self._find(key)
        return None if workload is None else workload.experiment.id

    def look(self, receipt: LaunchReceipt) -> AttemptStanding:
        """See LaunchBackend: all jobs of all tasks, the newest of each rank."""
        workload = self._find(receipt.key)
        if workload is None:
            return AttemptStanding(
                kind=AttemptClass.STOPPED,
                raw="unknown",
                reason=f"no experiment {receipt.key}",
                is_known=False,
            )

        def jobs(client: Any) -> list[Any]:
            # There is no filter by experiment, and a replica may be shown as a task of its own.
            tasks = workload.experiment.tasks
            return [job for task in tasks for job in client.job.list(task=task)]

        standing = standing_of(self._call("list jobs", jobs))
        return standing

    def stop(self, receipt: LaunchReceipt) -> None:
        """See LaunchBackend."""
        workload = self._find(receipt.key)
        if workload is not None:
            self._call(
                "cancel an experiment", lambda client: list(client.workload.cancel(workload))
            )

    # -- calls ----------------------------------------------------------------------------------

    def _submitted(self, workload: Any, *, was_there: bool = False) -> Submitted:
        url = self._call("name an experiment", lambda client: client.workload.url(workload))
        said = _MARK.search(workload.experiment.description)
        return Submitted(
            job=workload.experiment.id,
            was_there=was_there,
            url=url,
            mark=said[0] if said else None,
        )

    def _find(self, key: str) -> Any:
        def find(client: Any) -> Any:
            found = client.workload.list(workspace=self._place(client), name_or_description=key)
            return next((each for each in found if each.experiment.name == key), None)

        return self._call("find an experiment", find)

    def _place(self, client: Any) -> Any:
        return client.workspace.get(self._workspace) if self._workspace else None

    def _call(self, what: str, do: Callable[[Any], T]) -> T:
        from beaker.exceptions import BeakerError, BeakerServerError

        answer: Future[T] = Future()

        def run() -> None:
            try:
                if self._client is None:
                    self._client = self._connect()
                answer.set_result(do(self._client))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=run, name="beaker-call", daemon=True).start()
        try:
            return answer.result(self._deadline_s)
        except TimeoutError as error:
            self._client = None  # its channel may hang for ever
            raise ServiceUnavailable(
                f"Beaker did not {what} within {self._deadline_s:g} s"
            ) from error
        except BeakerServerError as error:
            raise ServiceUnavailable(f"Beaker could not {what}: {error}") from error
        except BeakerError as error:
            if type(error).__name__ in ("BeakerExperimentConflict",):
                raise
            if type(error).__name__ in ("BeakerPermissionsError", "BeakerConfigurationError"):
                raise CredentialsRefused(f"Beaker did not {what}: {error}") from error
            raise LaunchRefused(f"Beaker refused to {what}: {error}") from error
        except Exception as error:
            raise _of_wire(error, what) from error


def _spec(document: Mapping[str, Any]) -> Any:
    """The client's own object of a document; refused unless it says the same.

    The client drops what it does not know, and renames the fields of a mount's source unless that
    is an object of its own.
    """
    from beaker import BeakerDataSource, BeakerExperimentSpec

    spec: Any = BeakerExperimentSpec.from_json(dict(document))
    for mount in (mount for task in spec.tasks for mount in task.datasets or ()):
        if isinstance(mount.source, dict):
            mount.source = BeakerDataSource(**mount.source)
    if spec.to_json() != document:
        raise LaunchRefused("the Beaker client does not send this document as it is: update it")
    return spec


def _of_wire(error: Exception, what: str) -> Exception:
    """Errors of gRPC and requests, which the client lets through as they are."""
    import grpc
    import requests

    if isinstance(error, grpc.RpcError):
        code = error.code() if isinstance(error, grpc.Call) else None
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return CredentialsRefused(f"Beaker does not take our token to {what}")
        return ServiceUnavailable(f"Beaker could not {what}: {code}")
    if isinstance(error, requests.RequestException):
        return ServiceUnavailable(f"Beaker could not {what}: {type(error).__name__}")
    return error


def beaker_backend(
    workspace: str | None,
    *,
    environ: Mapping[str, str] = os.environ,
    deadline_s: float = CALL_DEADLINE_S,
) -> BeakerLaunch:
    """The backend with the credentials of this user (BEAKER_TOKEN, or Beaker's own config file).

    Args:
        workspace: None takes the client's.
        environ: not read: the client reads the process's own.
        deadline_s: of every call.

    Raises:
        ConfigError: when the first call is made, if Beaker's client is not installed.
    """
    del environ

    def connect() -> Any:
        try:
            from beaker import Beaker
        except ModuleNotFoundError as error:
            raise ConfigError(
                "beaker-py is not installed: pip install 'milepost[launch]'"
            ) from error
        return Beaker.from_env(check_for_upgrades=False, default_workspace=workspace)

    return BeakerLaunch(connect, workspace=workspace, deadline_s=deadline_s)
