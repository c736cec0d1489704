"""The KubeRay backend: a RayJob object, through the Kubernetes API."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from configs.names import read_variable
from runtime.errors import ConfigError, CredentialsRefused, LaunchRefused, ServiceUnavailable
from runtime.launch.backend import Submitted
from runtime.launch.kuberay_document import MARK, rayjob, schema_problems
from runtime.launch.receipts import LaunchReceipt
from runtime.launch.standing import AttemptClass, AttemptStanding
from runtime.launch.submission import Submission

GROUP, VERSION, PLURAL = "ray.io", "v1", "rayjobs"
CALL_DEADLINE_S = 30.0
_DEPLOYMENT = {
    "Initializing": AttemptClass.STARTING,
    "Waiting": AttemptClass.STARTING,
    "Suspended": AttemptClass.PENDING,
    "Suspending": AttemptClass.PENDING,
    "Retrying": AttemptClass.STARTING,
    "Running": AttemptClass.RUNNING,
    "Complete": AttemptClass.SUCCEEDED,
    "Failed": AttemptClass.FAILED,
}
_JOB = {"STOPPED": AttemptClass.CANCELED, "FAILED": AttemptClass.FAILED}
_TIME_LIMITS = ("DeadlineExceeded", "PreRunningDeadlineExceeded")
_EXITED = re.compile(r"Job entrypoint command failed with exit code (-?\d+)\b")
"""Ray's words, which the operator passes on; it has no field for the status."""


class KubeRayLaunch:
    """Implements LaunchBackend. The object's name is the attempt's key."""

    name = "kuberay"

    def __init__(
        self,
        connect: Callable[[], Any] | None,
        *,
        namespace: str = "default",
        queue: str | None = None,
        scheduler: str | None = None,
        deadline_s: float = CALL_DEADLINE_S,
    ) -> None:
        """Prepare; nothing is sent.

        Args:
            connect: makes a ``kubernetes.client.CustomObjectsApi``; None: rendering only.
            namespace: of Kubernetes.
            queue: see ``rayjob``.
            scheduler: see ``rayjob``.
            deadline_s: of every call.
        """
        self._connect = connect
        self._namespace = namespace
        self._queue = queue
        self._scheduler = scheduler
        self._deadline_s = deadline_s
        self._api: Any = None

    @property
    def where(self) -> str:
        """The namespace."""
        return self._namespace

    def render(self, submission: Submission) -> dict[str, Any]:
        """See LaunchBackend."""
        return rayjob(
            submission,
            namespace=self._namespace,
            queue=self._queue,
            scheduler=self._scheduler,
        )

    def check(self, submission: Submission) -> list[str]:
        """See LaunchBackend: an image, and the operator's schema."""
        problems = schema_problems(self.render(submission))
        if submission.image is None:
            problems.append("image.missing: a pod runs an image: launch.image, or --image")
        elif "@" not in submission.image:
            problems.append(f"image.tag: {submission.image} names no registry digest")
        return problems

    def submit(self, submission: Submission) -> Submitted:
        """See LaunchBackend. The API refuses a second object of one name."""
        key, lost = submission.key, None
        try:
            status, _ = self._call("create", body=self.render(submission))
        except ServiceUnavailable as error:
            status, lost = 409, error  # it may have been taken all the same
        if status == 404:
            # One answer for both: of a kind it does not know, and in a namespace that is not there.
            raise LaunchRefused(
                f"this Kubernetes takes no RayJob in namespace {self._namespace}: either the "
                "namespace is not there, or the KubeRay operator is not"
            )
        if status != 409:
            return Submitted(job=key)
        status, found = self._call("get", name=key)
        if status == 404:
            # Taken away between the two calls, or never taken: the same call again is safe.
            raise lost or ServiceUnavailable(f"Kubernetes both has and lacks the RayJob {key}")
        metadata = cast("dict[str, Any]", found.get("metadata") or {})
        mark = cast("dict[str, str]", metadata.get("annotations") or {}).get(MARK)
        return Submitted(job=key, was_there=True, mark=mark)

    def job_of(self, key: str) -> str | None:
        """See LaunchBackend: the key is the id."""
        return key

    def look(self, receipt: LaunchReceipt) -> AttemptStanding:
        """See LaunchBackend."""
        status, found = self._call("get", name=receipt.key)
        if status == 404:
            return AttemptStanding(
                kind=AttemptClass.STOPPED,
                raw="unknown",
                reason=f"no RayJob {receipt.key}",
                is_known=False,
            )
        return classify(cast("dict[str, Any]", found.get("status") or {}))

    def stop(self, receipt: LaunchReceipt) -> None:
        """See LaunchBackend: the object goes, and its cluster with it."""
        self._call("delete", name=receipt.key)

    def _call(self, verb: str, **arguments: Any) -> tuple[int, dict[str, Any]]:
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        if self._connect is None:
            raise ConfigError("no Kubernetes is configured here: a kubeconfig, or a pod's account")
        if self._api is None:
            self._api = self._connect()
        call = getattr(self._api, f"{verb}_namespaced_custom_object")
        try:
            answer = call(
                GROUP,
                VERSION,
                self._namespace,
                PLURAL,
                _request_timeout=self._deadline_s,
                **arguments,
            )
        except ApiException as error:
            code = int(error.status or 0)
            if code in (401, 403):
                raise CredentialsRefused(
                    f"Kubernetes does not let us {verb} RayJobs in {self._namespace}"
                ) from error
            if code in (404, 409):
                return code, {}
            if code >= 500 or code == 429:
                raise ServiceUnavailable(f"Kubernetes answered {code} to {verb}") from error
            raise LaunchRefused(f"Kubernetes answered {code}: {error.body}") from error
        except HTTPError as error:
            raise ServiceUnavailable(
                f"Kubernetes did not answer {verb}: {type(error).__name__}"
            ) from error
        return 200, cast("dict[str, Any]", answer)


def classify(status: Mapping[str, Any]) -> AttemptStanding:
    """The class of a RayJob from its ``status``; an object without one is new."""
    deployed = str(status.get("jobDeploymentStatus") or "")
    job = str(status.get("jobStatus") or "")
    reason = str(status.get("reason") or "")
    message = str(status.get("message") or "")
    kind = _DEPLOYMENT.get(deployed, AttemptClass.PENDING)
    if deployed == "Complete":
        kind = _JOB.get(job, AttemptClass.SUCCEEDED)
    if deployed == "Failed" and reason not in _TIME_LIMITS and job not in ("FAILED", "SUCCEEDED"):
        # The cluster went away under the job: no exit status of the guard's was seen.
        kind = AttemptClass.INTERRUPTED if job else AttemptClass.FAILED
    raw = "/".join(part for part in (deployed, job, reason) if part) or "created"
    said = _EXITED.match(message)
    return AttemptStanding(
        kind=kind, raw=raw, reason=message or reason, exit_code=int(said[1]) if said else None
    )


def kuberay_backend(
    cluster: str | None,
    *,
    environ: Mapping[str, str] = os.environ,
    deadline_s: float = CALL_DEADLINE_S,
) -> KubeRayLaunch:
    """The backend of the current kubeconfig, or of the pod this runs in.

    Args:
        cluster: ``launch.cluster``, the context of the kubeconfig; None takes its current one.
        environ: ``MILEPOST_K8S_NAMESPACE``, ``MILEPOST_GANG_QUEUE``, ``MILEPOST_GANG_SCHEDULER``.
        deadline_s: of every call.
    """

    def connect() -> Any:
        try:
            from kubernetes import client, config
        except ModuleNotFoundError as error:
            raise ConfigError(
                "kubernetes is not installed: pip install 'milepost[launch]'"
            ) from error
        settings = client.Configuration()
        try:
            config.load_kube_config(context=cluster, client_configuration=settings)
        except config.ConfigException:
            try:
                config.load_incluster_config(client_configuration=settings)
            except config.ConfigException as error:
                raise ConfigError(f"no Kubernetes is configured here: {error}") from error
        # Its client would ask three times more, and so wait four times as long as it may.
        settings.retries = False
        return client.CustomObjectsApi(client.ApiClient(settings))

    return KubeRayLaunch(
        connect,
        namespace=read_variable("K8S_NAMESPACE", environ) or "default",
        queue=read_variable("GANG_QUEUE", environ),
        scheduler=read_variable("GANG_SCHEDULER", environ),
        deadline_s=deadline_s,
    )
